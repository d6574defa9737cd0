"""Where samples come from. A source answers for every index alone, so that order and position belong to the loader."""

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
    """A fixed number of samples; asking for one twice gives the same one.

    A sample is a pair (input, target) of tensors whose shapes are the same for all samples. A target of
    `IGNORED_TARGET` does not count.
    """

    def __len__(self) -> int:
        """Number of samples, at least 1."""

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        """Sample `index`, from 0 to `len(self)` - 1."""

    @property
    def num_classes(self) -> int:
        """Number of classes of the targets; of tokens, the size of their vocabulary."""

    def describe(self) -> str:
        """Return how much data the source has, as a part of a log line."""

    def fingerprint(self, seed: int) -> Fingerprint | None:
        """Return the fingerprint of the data that the source read, with the hashed samples drawn by `seed`; None where
        the source reads no data. The keys of the job that transform samples do not change the fingerprint."""


def build_source(
    config: DataConfig,
    tokenizer: Tokenizer,
    seq_len: int,
    key: KeyPath = ("data",),
    images_taken: ImageFormat | None = None,
) -> SampleSource:
    """The source that `config` describes.

    A sample is int64 tokens `[seq_len]` and the tokens that follow `[seq_len]`, or a float32 image `[channels, height,
    width]` and its class, an int64 scalar; for images, `tokenizer` and `seq_len` mean nothing, and `images_taken` is
    what the model takes, where that is known.

    `key` is where `config` stands in the job file, which errors name: `("validation", "data")` for the held-out source.
    Raises ConfigError for data that is missing, unreadable, too small, or not for the model.
    """
    if isinstance(config, ImageData):
        return build_images(config, images_taken, key)
    if isinstance(config, SyntheticData):
        return build_synthetic(config, tokenizer.vocab_size, seq_len, key)
    return build_text(config, tokenizer, seq_len, key)
