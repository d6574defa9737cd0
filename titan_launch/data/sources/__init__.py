"""The data sources, by the `kind` of their section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from titan_launch.config.image_format import ImageFormat
from titan_launch.config.sections.data import (
    FACTORY,
    DataSource,
    HuggingFaceData,
    MixtureData,
    data_kind,
    single_sources,
)
from titan_launch.core.errors import KeyPath
from titan_launch.data.corpora import CORPORA
from titan_launch.data.sources.factory import build_factory
from titan_launch.data.sources.images import build_images
from titan_launch.data.sources.interface import Batch, Sample, SampleSource, SourceContext, read_batch
from titan_launch.data.sources.mixture import MixtureSource
from titan_launch.data.sources.stream import StreamSource, build_text_stream
from titan_launch.data.sources.synthetic import build_synthetic
from titan_launch.data.sources.tokens import build_corpus, build_tokens
from titan_launch.data.tokenizers import Tokenizer

__all__ = ["Batch", "MixtureSource", "Sample", "SampleSource", "StreamSource", "build_source", "read_batch"]


def build_huggingface(config: HuggingFaceData, context: SourceContext) -> SampleSource:
    """Build the source of a data set of Hugging Face: its token files, or with `streaming` a stream."""
    return build_text_stream(config, context) if config.streaming else build_corpus(config, context)


def build_mixture(config: MixtureData, context: SourceContext) -> MixtureSource:
    """Build the source of a mixture, and the source of each of its entries."""
    key = (*context.key, "sources")
    built = (
        SOURCES[data_kind(entry.kind)](entry, replace(context, key=(*key, index)))
        for index, entry in enumerate(config.sources)
    )
    return MixtureSource(dict(zip(single_sources(config), built, strict=True)), key)


SOURCES: dict[str, Callable[[Any, SourceContext], SampleSource]] = {
    **dict.fromkeys(CORPORA, build_corpus),
    "huggingface": build_huggingface,
    "tokens": build_tokens,
    "synthetic": build_synthetic,
    "images": build_images,
    "mixture": build_mixture,
    FACTORY: build_factory,
}
"""The function (section, context) -> source for each `data_kind` of a section. The keys are those of `DATA_KINDS`."""


def build_source(
    config: DataSource,
    tokenizer: Tokenizer,
    seq_len: int,
    key: KeyPath = ("data",),
    images_taken: ImageFormat | None = None,
) -> SampleSource:
    """Build the source that `config` describes. `SourceContext` explains the other arguments.

    A sample of text is (tokens, targets), both int64 `[seq_len]`; with `packing = "documents"`, the document numbers,
    int32 `[seq_len]`, follow. A sample of images is a float32 image `[channels, height, width]` and its class,
    an int64 scalar.

    Raises ConfigError if data is missing, unreadable or too small, or if it does not fit the model. Raises UserError if
    the first image cannot be read, or if the cache cannot be written. Raises RunError if a process that tokenizes is
    killed.
    """
    return SOURCES[data_kind(config.kind)](config, SourceContext(tokenizer, seq_len, images_taken, key))
