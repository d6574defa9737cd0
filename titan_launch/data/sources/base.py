"""The interface of data sources. A source answers for every index alone: order and position belong to the loader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from titan_launch.config.sections.data import ImageFormat
from titan_launch.core.errors import KeyPath
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.data.tokenizers import Tokenizer


class SampleSource(Protocol):
    """A fixed number of samples; asking for one twice gives the same one.

    A sample is a pair (input, target) of tensors whose shapes are the same for all samples. A target of
    `IGNORED_TARGET` does not count.
    """

    def __len__(self) -> int:
        """Return the number of samples, at least 1."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        """Return sample `index`, from 0 to `len(self)` - 1."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the targets; of tokens, the size of their vocabulary."""

    def describe(self) -> str:
        """Return how much data the source has, as a part of a log line."""

    def fingerprint(self, seed: int) -> Fingerprint | None:
        """Return the fingerprint of the data that the source read, with the hashed samples drawn by `seed`; None where
        the source reads no data. The keys of the job that transform samples do not change the fingerprint."""


@dataclass(frozen=True)
class SourceContext:
    """The parts of a job that a source needs besides its own section."""

    tokenizer: Tokenizer
    """Tokenizer of text."""

    seq_len: int
    """Tokens in a sample."""

    images_taken: ImageFormat | None
    """Format of the images that the model takes; None where it is not known, and for a model of tokens."""

    key: KeyPath
    """Path of the section in the job file, which errors name: `("data",)` or `("validation", "data")`."""
