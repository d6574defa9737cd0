"""What the launcher knows about a model of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from titan_launch.models.initializers import Initializer

TensorStyle = Literal["embedding", "sequence", "input", "colwise", "heads", "rowwise", "head"]
"""How tensor parallelism treats a module. Of activations (batch, tokens, features), the stream between the layers is
divided by token (sequence parallelism) or whole; of T ranks each has

    embedding   1/T of the rows of an nn.Embedding                  token ids -> stream
    sequence    all parameters of a module that works per token     stream -> stream
    input       nothing; makes a module's first input whole         stream -> all tokens and features
    colwise     1/T of the output features of an nn.Linear          all features -> 1/T of the features (of the heads)
    heads       all parameters of a module that works per head      1/T of the heads -> the same
    rowwise     1/T of the input features of an nn.Linear           1/T of the features -> stream, summed over ranks
    head        1/T of the output features of an nn.Linear          stream -> 1/T of the classes
"""


@dataclass(frozen=True)
class AttentionHeads:
    """What a model's attention is called with, in every block."""

    queries: int
    keys: int
    """Heads of keys and values."""

    width: int
    """Of one head."""

    queries_from: str
    """Glob of the modules whose output becomes the queries: in what they compute, attention does."""


@dataclass(frozen=True)
class ModelSpec:
    """One model: how it is built, divided and initialised.

    `args` below are the model's arguments, of its class in `titan_launch.config.architectures`.
    """

    build: Callable[[Any, int], nn.Module]
    """(args, seq_len) to the module, on the default device."""

    blocks: tuple[str, ...]
    """Globs of the modules that become an FSDP unit each."""

    head: tuple[str, ...]
    """Paths of the modules that run last, in order."""

    initializer: Callable[[Any], Initializer]
    """args to what fills the parameters and buffers."""

    embeddings: tuple[str, ...] = ()
    """Paths of the modules that run first and whose weights nothing but their own forward reads: backward needs only
    the indices."""

    tensor_parallel: Mapping[str, TensorStyle] | None = None
    """Globs of modules to how tensor parallelism treats them; the first that matches wins. All modules with parameters
    of their own are among them. None: the model cannot be divided so."""

    pipeline_order: tuple[str, ...] = ()
    """Globs of the modules that run one after another, in order, each on what the one before it returns, one tensor:
    where pipeline parallelism may cut. All parameters are in them, and the forwards of the modules around them do
    nothing else. Empty: the model cannot be divided so."""

    context_parallel: Mapping[str, int] | None = None
    """Globs of the full names of the buffers along the sequence (tables of positions), which are divided as the tokens
    are, and the axis of the tokens in each. Declares that tokens meet only in `F.scaled_dot_product_attention` of
    (batch, heads, tokens, width) with `is_causal=True`. None: the model cannot be divided so."""

    attention: Callable[[Any], AttentionHeads] | None = None
    """args to the shape of its `F.scaled_dot_product_attention`, causal and without a mask. None: there is none."""
