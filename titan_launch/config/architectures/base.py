"""The questions that the launcher asks about a model of this package before the model is built. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from titan_launch.config.sections.base import Section
from titan_launch.config.sections.data import ImageFormat, SampleUnit


class ModelArgs(Section):
    """The base of the arguments of every model of this package.

    A model overrides the methods for which the default answer is wrong. A model of tokens calls the number of rows of
    its embedding `vocab_size`.
    """

    unit: ClassVar[SampleUnit] = "tokens"
    """Unit of the model's samples."""

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield what does not fit together: the arguments concerned, the likeliest culprit first, and the reason."""
        yield from ()

    def images_taken(self) -> ImageFormat | None:
        """Return the format of the images that the model takes; None for a model of tokens."""
        return None

    def flops_per_sample(self, seq_len: int) -> int | None:
        """Return the FLOPs of forward and backward for one sample: a whole sequence, or an image. None: unknown."""
        return None

    def checkpointed_block_flops(self, seq_len: int, saves_costly_ops: bool) -> int | None:
        """Return the FLOPs per sample that activation checkpointing of one block adds; None: unknown.

        `saves_costly_ops`: the block saves what `selective_ac_option = "op"` saves.
        """
        return None

    def num_layers(self) -> int | None:
        """Return the number of layers that pipeline stages divide among them; None: unknown."""
        return None

    def tied_by(self) -> str | None:
        """Return the argument that ties the output layer to the embedding; None if each has a weight of its own."""
        return None

    def tensor_parallel_sizes(self) -> Mapping[str, int] | None:
        """Return the sizes, by argument, that the tensor-parallel degree must divide; None: no tensor parallelism."""
        return None

    def has_context_parallel(self) -> bool:
        """Return whether context parallelism can divide the model's sequences."""
        return False

    def batchnorm_over_tokens(self) -> str | None:
        """Return the setting of `[model.args]` that makes BatchNorm take statistics over tokens; None: none does."""
        return None
