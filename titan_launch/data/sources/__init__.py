"""Data sources. A source returns the sample at any index; the loader decides the order."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from titan_launch.config.sections.data import DataConfig, ImageData, ImageFormat, SyntheticData
from titan_launch.core.errors import KeyPath
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.data.sources.images import build_images
from titan_launch.data.sources.synthetic import build_synthetic
from titan_launch.data.sources.text import build_text
from titan_launch.data.tokenizers import Tokenizer


class SampleSource(Protocol):
    """A fixed number of samples. The same index always returns the same sample.

    A sample is a pair (input, target) of tensors. Their shapes are the same for all samples. The loss ignores targets
    equal to `IGNORED_TARGET`.
    """

    def __len__(self) -> int:
        """Return the number of samples, at least 1."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        """Return sample `index`, from 0 to `len(self)` - 1."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the targets. For tokens: the size of the vocabulary."""

    def describe(self) -> str:
        """Return the amount of data as part of a log line."""

    def fingerprint(self, seed: int) -> Fingerprint | None:
        """Return the fingerprint of the data that the source has read; None if the source reads no data.

        `seed` selects the hashed samples. Job keys that transform samples do not change the fingerprint."""


def build_source(
    config: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    key: KeyPath = ("data",),
    images_taken: ImageFormat | None = None,
) -> SampleSource:
    """Return the source that `config` describes.

    A text sample is int64 tokens `[seq_len]` and the tokens one position later `[seq_len]`. An image sample is a
    float32 image `[channels, height, width]` and its class, an int64 scalar. For images, `tokenizer` and `seq_len` are
    unused, and `images_taken` is the image format that the model requires, if known.

    `key`: key of `config` in the job file, for errors. Raises ConfigError for data that is missing, unreadable, too
    small, or does not fit the model.
    """
    if isinstance(config, ImageData):
        return build_images(config, images_taken, key)
    if isinstance(config, SyntheticData):
        return build_synthetic(config, tokenizer.vocab_size, seq_len, key)
    return build_text(config, tokenizer, seq_len, key)
