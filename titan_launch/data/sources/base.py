"""The interface of data sources. A source returns samples by index. `data.loader` decides their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from titan_launch.config.sections.data import ImageFormat
from titan_launch.core.errors import KeyPath
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.data.tokenizers import Tokenizer


class SampleSource(Protocol):
    """A fixed number of samples. The same index always returns the same sample.

    A sample is a pair (input, target) of tensors whose shapes are the same for all samples. A target of
    `IGNORED_TARGET` does not count.
    """

    def __len__(self) -> int:
        """Return the number of samples, at least 1."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        """Return sample `index`, from 0 to `len(self)` - 1."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the targets. For tokens, this is the size of the vocabulary."""

    def describe(self) -> str:
        """Return a text for a log line: how much data the source has."""

    def fingerprint(self, seed: int) -> Fingerprint | None:
        """Return a fingerprint of the data that the source has read; None if the source reads no data.

        `seed` selects the samples that are hashed. Keys that only transform samples do not change the result.
        """


@runtime_checkable
class AugmentedSource(Protocol):
    """A source whose training samples also depend on their position in the stream, by random changes."""

    def at(self, index: int, position: int, /) -> tuple[Tensor, Tensor]:
        """Return sample `index` as it occurs at `position` of the stream of training samples."""


@dataclass(frozen=True)
class SourceContext:
    """The parts of a job that a source needs besides its own section."""

    tokenizer: Tokenizer
    """Tokenizer of text."""

    seq_len: int
    """Number of tokens in a sample."""

    images_taken: ImageFormat | None
    """Format of the images that the model takes; None if it is unknown, or if the model takes tokens."""

    key: KeyPath
    """Path of the section in the job file, for errors: `("data",)` or `("validation", "data")`."""
