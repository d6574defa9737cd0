"""`ModelSpec`, which describes a model of this package: its construction, initial values and division over ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from titan_launch.models.initializers import Initializer

TensorStyle = Literal[
    "embedding",
    "positions",
    "sequence",
    "input",
    "colwise",
    "latent",
    "heads",
    "by_head",
    "rowwise",
    "head",
    "mixture",
    "router",
    "experts",
    "shared_colwise",
    "shared_rowwise",
]
"""The style by which tensor parallelism divides a module over T ranks. "Stream" means the activations (batch, tokens,
features) between layers. With sequence parallelism each rank has a part of the tokens, otherwise the whole stream.

    style       part of the module on each rank                     input -> output
    embedding   1/T of the rows of an nn.Embedding                  token ids -> stream
    positions   all parameters; other inputs and buffers are cut to this rank's tokens              stream -> stream
    sequence    all parameters of a module that works per token     stream -> stream
    input       nothing; gathers the module's first input           stream -> all tokens and features
    colwise     1/T of the output features of an nn.Linear          all features -> 1/T of the features (of the heads)
    latent      all parameters of a module                          all tokens and features -> whole latents
    heads       all parameters of a module that works per head      1/T of the heads -> the same
                (of an AllHeadsRMSNorm: the parameters of 1/T of the heads)
    by_head     1/T of the rows of all parameters, by whole heads   1/T of the heads, or latents -> 1/T of the heads
    rowwise     1/T of the input features of an nn.Linear           1/T of the features -> stream, summed over ranks
    head        1/T of the output features of an nn.Linear          stream -> 1/T of the classes
    mixture     nothing (style of a MixtureOfExperts)               stream -> stream, summed over ranks
    router      all parameters                                      all tokens and features -> the same on all ranks
    experts     1/T of the width of each expert                     all tokens and features -> partial sums
    shared_colwise    as colwise, within a mixture                  all tokens and features -> 1/T of the features
    shared_rowwise    as rowwise, within a mixture                  1/T of the features -> partial sums

Latents are vectors that every rank computes whole. From the latents, each rank computes only its own heads. So its
gradient of a latent covers only these heads. Such gradients are not summed over ranks. Instead, the gradients of the
parameters of `latent` and `heads` modules are summed over ranks. A module between `latent` and `by_head`, such as the
norm of latents, has the style `heads`.
"""


@dataclass(frozen=True)
class AttentionHeads:
    """Numbers of heads and features in a model's attention, which are the same in every block."""

    queries: int
    """Number of query heads."""

    keys: int
    """Number of key heads, and of value heads."""

    width: int
    """Number of features of one head of queries and of keys."""

    value_width: int
    """Number of features of one head of values."""

    queries_from: str
    """Glob of the modules whose output becomes the queries. Attention computes in the dtype of these modules."""

    def widths(self, pads_values: bool) -> tuple[int, int]:
        """Return (features of a query head, features of a value head), as attention passes them to a kernel. With
        `pads_values`, both are padded to the larger number."""
        widest = max(self.width, self.value_width)
        return (widest, widest) if pads_values else (self.width, self.value_width)


@dataclass(frozen=True)
class ModelSpec:
    """The construction of a model, its initial values and its division over ranks.

    Below, `args` is an object with the model's arguments, of the class in `Architecture.args`
    (`titan_launch.models.architectures`). A glob may match nothing, because some modules exist only with certain
    arguments.
    """

    build: Callable[[Any, int], nn.Module]
    """Function of (args, seq_len) that builds the module on the default device."""

    blocks: tuple[str, ...]
    """Globs of the modules that become one FSDP2 unit each."""

    head: tuple[str, ...]
    """Paths of the modules that run last, in order."""

    initializer: Callable[[Any], Initializer]
    """Function of args that returns the initializer of parameters and buffers."""

    embeddings: tuple[str, ...] = ()
    """Paths of the embeddings that run first. No other module reads their weights, except a tied output layer. Their
    backward needs the token ids, but not the weights."""

    tensor_parallel: Mapping[str, TensorStyle] | None = None
    """Styles of tensor parallelism by glob of modules; the first glob that matches wins. Every module with parameters
    needs a style. None: tensor parallelism is not supported."""

    pipeline_order: tuple[str, ...] = ()
    """Globs of the modules that pipeline parallelism may put on different stages, in the order of their forwards. Each
    module takes one tensor, the output of the module before it. All parameters are in these modules, and the model's
    forward does nothing but call these modules in order. Empty: pipeline parallelism is not supported."""

    context_parallel: Mapping[str, int] | None = None
    """The token axis of each buffer with one row per position, by glob of full names. These buffers are divided like
    the tokens. In a model with this table, tokens may interact only in `F.scaled_dot_product_attention`, on tensors
    (batch, heads, tokens, width) and with `is_causal=True`. None: context parallelism is not supported."""

    attention: Callable[[Any, int], AttentionHeads | None] | None = None
    """Function of (args, seq_len) that describes the plain causal attention of sequences of `seq_len` tokens. It
    returns None if no layer has plain causal attention with these arguments. None in place of the function: the model
    never has plain causal attention."""
