"""The optional packages that a job needs. Only the command `check` uses the rule of this file: a run whose tokens are
already in the cache needs fewer packages."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.config.paths import images_named
from titan_launch.config.rules.data import entries_of, sources_of
from titan_launch.config.sections.data import FilesData, ImageData
from titan_launch.config.sections.run import SINKS_WITH_PACKAGE
from titan_launch.core.errors import KeyPath, Problem
from titan_launch.core.object_store import module_of
from titan_launch.core.packages import is_installed, not_installed

Needed = tuple[str, KeyPath, object]
"""A module, the key that needs it, and the value of the key."""

_KINDS = {
    "chat": "jinja2",
    "preferences": "jinja2",
    "unpaired_preferences": "jinja2",
    "parquet": "pyarrow",
    "huggingface": "datasets",
}
"""The module that each kind of data needs. Other kinds need no module, or a module that depends on their files."""

_IMAGES = {"digits": "sklearn", "folder": "PIL", "shards": "PIL", "npz": None}
"""The module that each kind of image storage needs (see `images_named`); None: no module."""


def packages_are_installed(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each key that needs a package which is not installed. Nothing is imported."""
    for module, key, value in _needed(config):
        if not is_installed(module):
            yield Problem(key, not_installed(module), value)


def _needed(config: JobConfig) -> Iterator[Needed]:
    for index, name in enumerate(config.metrics.sinks):
        if name in SINKS_WITH_PACKAGE:
            yield name, ("metrics", "sinks", index), name
    if config.tokenizer.kind == "huggingface":
        yield "tokenizers", ("tokenizer", "kind"), config.tokenizer.kind
    if config.float8.enable:
        yield "torchao", ("float8", "enable"), True
    if config.lora.adapter is not None:
        yield "safetensors", ("lora", "adapter"), config.lora.adapter
    if (store := config.checkpoint.store) is not None:
        yield module_of(store), ("checkpoint", "store"), store
    if (second := config.loss.frozen_model()) is not None:
        yield "safetensors", second.key, second.folder
    for source, data in sources_of(config):
        if data.kind in _KINDS:
            yield _KINDS[data.kind], (*source, "kind"), data.kind
        if isinstance(data, ImageData) and (module := _IMAGES[images_named(data.path)]):
            yield module, (*source, "path"), data.path
        if isinstance(data, FilesData) and not is_installed("compression.zstd"):  # part of Python 3.14
            entries = (entry for _, entry in entries_of(source, data) if entry.endswith(".zst"))
            yield from (("backports.zstd", (*source, "path"), entry) for entry in entries)
