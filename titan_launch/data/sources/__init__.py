"""The data sources, by the `kind` of their section."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from titan_launch.config.sections.data import DataSource, ImageFormat
from titan_launch.core.errors import KeyPath
from titan_launch.data.sources.base import SampleSource, SourceContext
from titan_launch.data.sources.images import build_images
from titan_launch.data.sources.synthetic import build_synthetic
from titan_launch.data.sources.text import build_text
from titan_launch.data.tokenizers import Tokenizer

__all__ = ["SampleSource", "build_source"]

SOURCES: dict[str, Callable[[Any, SourceContext], SampleSource]] = {
    "text": build_text,
    "synthetic": build_synthetic,
    "images": build_images,
}
"""(section, context) to the source, by the `kind` of the section: `titan_launch.config.sections.data.DATA_KINDS`."""


def build_source(
    config: DataSource,
    tokenizer: Tokenizer,
    seq_len: int,
    key: KeyPath = ("data",),
    images_taken: ImageFormat | None = None,
) -> SampleSource:
    """Build the source that `config` describes. The other arguments are those of `SourceContext`.

    A sample is int64 tokens `[seq_len]` and the tokens that follow `[seq_len]`, or a float32 image `[channels, height,
    width]` and its class, an int64 scalar.

    Raises ConfigError for data that is missing, unreadable, too small, or not for the model.
    """
    return SOURCES[config.kind](config, SourceContext(tokenizer, seq_len, images_taken, key))
