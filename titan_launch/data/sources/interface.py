"""The interface of data sources. A source returns samples by index. `data.order` decides their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_launch.config.image_format import ImageFormat
from titan_launch.core.errors import KeyPath
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.data.token_files import Tokens
from titan_launch.data.tokenizers import Tokenizer

Sample = tuple[Tensor, ...]
"""A pair (input, target). Samples of packed documents are triples (input, target, documents).

A target of `IGNORED_TARGET` does not count. `documents`, int32 `[seq_len]`, has a number for each token. The numbers
begin at 0 and rise by 0 or 1 from token to token. Tokens with the same number are one document: they attend to each
other only, and their positions count from 0. Padding has document numbers that no document has, and ignored targets.
"""


class Batch(NamedTuple):
    """Samples of one rank. The first axis of each tensor is the sample."""

    inputs: Tensor
    targets: Tensor
    documents: Tensor | None = None
    """Document number of each token (see `Sample`); None if samples have no document numbers."""

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device. If the batch is in pinned memory, the host does not wait for the copy."""
        return Batch._make(None if tensor is None else tensor.to(device, non_blocking=True) for tensor in self)


class SampleSource(Protocol):
    """A fixed number of samples. The same index always returns the same sample. Shapes are the same for all samples."""

    def __len__(self) -> int:
        """Return the number of samples, at least 1."""

    def __getitem__(self, index: int, /) -> Sample:
        """Return sample `index`, from 0 to `len(self)` - 1."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the targets. For tokens, this is the size of the vocabulary."""

    def describe(self) -> str:
        """Return a text for a log line, with the amount and kind of the data."""

    def fingerprint(self, seed: int) -> Fingerprint | None:
        """Return a fingerprint of the source's data; None if the source reads no data, is a mixture, or is a stream.

        `seed` selects the samples that are hashed. Keys that only transform samples do not change the result.
        """


@runtime_checkable
class AugmentedSource(Protocol):
    """A source that changes training samples at random (augmentation), depending on their position in the stream."""

    def at(self, index: int, position: int, /) -> Sample:
        """Return sample `index` as it occurs at `position` of the stream of training samples."""


@runtime_checkable
class BatchSource(Protocol):
    """A source that reads a whole batch faster than one sample after another."""

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None, /) -> Sample:
        """Return the same batch as the function `read_batch` below. Its integers may be int32: the loader converts
        them to int64."""


@dataclass(frozen=True)
class Details:
    """The contents of a source, as `titan-launch data` prints them."""

    amounts: dict[str, Any]
    """Numbers and texts by name. A table of numbers is a histogram: `{"classes": {"0": 178, "1": 182}}`."""

    document_lengths: npt.NDArray[np.int64] | None = None
    """Number of tokens of each document; None for data without documents."""

    first_tokens: Tokens | None = None
    """The first tokens of the data, from which the number of bytes per token is computed; None without text."""


@runtime_checkable
class DetailedSource(Protocol):
    """A source that can list the contents of its data, beyond the number of samples."""

    def details(self) -> Details:
        """Return the contents of the source. The call may read all ends of documents, or all labels."""


def read_batch(source: SampleSource, indices: Sequence[int], positions: Sequence[int] | None = None) -> Sample:
    """Return the samples at `indices`, stacked along a new first axis.

    `positions`: positions of the samples in the stream of training samples; None in validation.
    """
    if isinstance(source, BatchSource):
        return source.read_batch(indices, positions)
    if positions is not None and isinstance(source, AugmentedSource):
        samples = map(source.at, indices, positions)
    else:
        samples = map(source.__getitem__, indices)
    return tuple(map(torch.stack, zip(*samples, strict=True)))


def bytes_of(sample: Sample) -> bytes:
    """Return the content of a sample, for a fingerprint."""
    return b"".join(tensor.numpy().tobytes() for tensor in sample)


@dataclass(frozen=True)
class SourceContext:
    """The parts of a job that a source needs besides its own section."""

    tokenizer: Tokenizer
    seq_len: int
    """Number of tokens in a sample."""

    images_taken: ImageFormat | None
    """Format of the images that the model takes; None if the format is unknown, or if the model takes tokens."""

    key: KeyPath
    """Path of the section in the job file, for errors: `("data",)`, `("validation", "data")`, or `("data", "sources",
    0)` for the first source of a mixture."""
