"""The base class of model arguments. It describes a model before the model is built, without torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Annotated, Any, ClassVar

from pydantic import Field

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import SampleUnit
from titan_launch.config.sections.section import Section

MOST_LAYERS, MOST_PARTS, MOST_WIDTH, MOST_TOKENS = 1000, 1 << 16, 1 << 20, 1 << 31
"""Limits of sizes, far above those of any model: the largest published models have about 130 layers, 512 experts, a
width of 60,000, and a vocabulary of 260,000. Within the limits, the checks of a model take seconds, and each tensor has
less than 2^63 bytes."""

Layers = Annotated[int, Field(ge=1, le=MOST_LAYERS)]
Parts = Annotated[int, Field(ge=1, le=MOST_PARTS)]
"""A small size: a number of heads, experts or labels, or the width of a head."""

Width = Annotated[int, Field(ge=1, le=MOST_WIDTH)]
Pixels = Annotated[int, Field(ge=1, le=1 << 16)]
NumTokens = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


@dataclass(frozen=True)
class TwinNeeds:
    """The properties of a job that its twin must keep. A twin is a small model with the same structure as the job's
    model. The command `prove` trains it in place of the job's model."""

    shards: int
    """Number of ranks over which FSDP2 and tensor parallelism together shard the rows of the job's parameters."""

    is_tensor_parallel: bool
    stages: int
    """Number of pipeline stages of the twin; 1 without pipeline parallelism."""

    keeps_depth: bool
    """True if globs in the job contain layer numbers. The twin then has as many layers as the job's model."""

    seq_len: int
    """Tokens per sequence of the job."""

    twin_seq_len: int

    def rows(self, own: int, small: int) -> int:
        """Return the number of rows of a parameter in the twin: `own`, the number in the job's model, if `own` is at
        most `small`. Otherwise, return `small` or, if the job shards the rows unevenly, `small - 1` (`small - 2` with
        tensor parallelism)."""
        uneven = small - (2 if self.is_tensor_parallel else 1)
        return own if own <= small else small if own % self.shards == 0 else uneven


class ArgsTable(Section):
    """The base class of `[model.args]` and of the tables in it."""

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (names of the arguments, reason) for each contradiction between arguments. The first name is the
        likeliest cause of the contradiction."""
        yield from ()

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield (argument, reason and remedy) for each argument whose value is not the default, but has no effect
        because of other arguments. An argument in a table has a name such as `experts.num_groups`."""
        yield from ()


class ModelArgs(ArgsTable):
    """The base class of the arguments of every model of this package.

    A subclass overrides the methods whose default result is wrong for its model. If the model takes tokens, the
    argument `vocab_size` is the number of rows of its embedding.
    """

    unit: ClassVar[SampleUnit] = "tokens"
    """Unit of the model's samples: tokens or images."""

    supports_tensor_parallel: ClassVar[bool] = False
    supports_context_parallel: ClassVar[bool] = False
    supports_labels: ClassVar[bool] = False
    """True if the argument `num_labels` makes the model a classifier or a reward model."""

    def effective(self) -> dict[str, Any]:
        """Return the arguments that have an effect. A subclass replaces unset arguments by the values that the model
        uses. Two models with equal effective arguments compute the same results."""
        table = self.model_dump(mode="json")
        for name in {name for name, _ in self.unused()}:
            *tables, last = name.split(".")
            reduce(dict.__getitem__, tables, table).pop(last)
        return table

    def longest_sequence(self) -> tuple[str, int] | None:
        """Return the argument that limits the length of sequences, and the limit in tokens; None for no limit."""
        return None

    def beyond_causal_attention(self, seq_len: int) -> str | None:
        """Return the setting that makes attention differ from plain causal attention, such as `sliding_window = 4096`.
        Return None if no setting has this effect on sequences of `seq_len` tokens."""
        return None

    def images_taken(self) -> ImageFormat | None:
        """Return the format of the images that the model takes; None for a model of tokens."""
        return None

    def num_layers(self) -> int | None:
        """Return the number of layers to divide among pipeline stages; None if it is unknown."""
        return None

    def tied_by(self) -> str | None:
        """Return the argument that ties the output layer to the embedding; None if each has a weight of its own."""
        return None

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """Return the arguments, with their values, that the tensor-parallel degree must divide."""
        return {}

    def width(self) -> int | None:
        """Return the width of the model for muP; None if the model does not support muP."""
        return None

    def beyond_mup(self) -> Iterator[str]:
        """Yield the features of the model for which muP has no rule."""
        yield from ()

    def num_experts(self) -> int | None:
        """Return the number of experts in a layer; None for a model without experts."""
        return None

    def experts_per_token(self) -> int | None:
        """Return the number of experts that process a token in a layer; None for a model without experts."""
        return None

    def twin(self, needs: TwinNeeds) -> dict[str, Any]:
        """Return the arguments that make a small twin of the model, with their values. The twin has the same structure,
        the fewest layers that include every kind of block, and the smallest sizes that `needs` allows. If the result is
        empty, the model is not shrunk."""
        return {}

    def batchnorm_over_tokens(self) -> str | None:
        """Return the setting in `[model.args]` that selects a BatchNorm with statistics over tokens, such as `norm =
        "batchnorm"`. Return None if the model has no such BatchNorm."""
        return None
