"""The facts that the launcher needs about a model of this package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from titan_launch.models.initializers import Initializer

TensorStyle = Literal["embedding", "positions", "sequence", "input", "colwise", "heads", "rowwise", "head"]
"""The style by which tensor parallelism divides a module over T ranks. The stream is the activations (batch, tokens,
features) between layers; with sequence parallelism it is divided by token, otherwise every rank has the whole stream.

    style       part of the module on each rank                     input -> output
    embedding   1/T of the rows of an nn.Embedding                  token ids -> stream
    positions   all parameters; of its buffers the rows of the tokens    stream -> stream
    sequence    all parameters of a module that works per token     stream -> stream
    input       nothing; makes a module's first input whole         stream -> all tokens and features
    colwise     1/T of the output features of an nn.Linear          all features -> 1/T of the features (of the heads)
    heads       all parameters of a module that works per head      1/T of the heads -> the same
    rowwise     1/T of the input features of an nn.Linear           1/T of the features -> stream, summed over ranks
    head        1/T of the output features of an nn.Linear          stream -> 1/T of the classes
"""


@dataclass(frozen=True)
class AttentionHeads:
    """The shape of a model's calls of attention, the same in every block."""

    queries: int
    keys: int
    """Heads of keys and values."""

    width: int
    """Features of one head."""

    queries_from: str
    """Glob of the modules whose output becomes the queries. Attention computes in the dtype of these modules."""


@dataclass(frozen=True)
class ModelSpec:
    """One model: its construction, initial values, and the ways in which it can be divided.

    `args` below are the model's arguments, of its class in `titan_launch.config.architectures`. A glob may match
    nothing: with some arguments a model lacks a module.
    """

    build: Callable[[Any, int], nn.Module]
    """Function of (args, seq_len) that returns the module on the default device."""

    blocks: tuple[str, ...]
    """Globs of the modules that become one FSDP2 unit each."""

    head: tuple[str, ...]
    """Paths of the modules that run last, in order."""

    initializer: Callable[[Any], Initializer]
    """Function of args that returns the initializer of parameters and buffers."""

    embeddings: tuple[str, ...] = ()
    """Paths of the embeddings that run first. Only their own forward reads their weights, and backward needs only the
    indices."""

    tensor_parallel: Mapping[str, TensorStyle] | None = None
    """Styles of tensor parallelism by glob of modules; the first glob that matches wins. Every module with parameters
    needs a style. None: tensor parallelism is not supported."""

    pipeline_order: tuple[str, ...] = ()
    """Globs of the modules between which pipeline parallelism may divide the model, in the order of their forwards.
    Each module takes the output of the module before it, one tensor. All parameters are in these modules, and the
    forwards around them do nothing else. Empty: pipeline parallelism is not supported."""

    context_parallel: Mapping[str, int] | None = None
    """The axis of the tokens in each buffer along the sequence (tables of positions), by glob of full names. These
    buffers are divided like the tokens. The table also declares that tokens interact only in
    `F.scaled_dot_product_attention` of (batch, heads, tokens, width) with `is_causal=True`. None: context parallelism
    is not supported."""

    attention: Callable[[Any, int], AttentionHeads | None] | None = None
    """Function of (args, seq_len) that returns the shape of plain causal attention. None: no such attention."""
