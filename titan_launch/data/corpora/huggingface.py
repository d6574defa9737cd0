"""Data sets that the package `datasets` loads, from local folders or from the Hugging Face Hub. Each row is one
document."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_launch.config.sections.data import HuggingFaceData
from titan_launch.core.errors import ConfigError, KeyPath, config_error, did_you_mean
from titan_launch.core.files import file_state
from titan_launch.core.packages import not_installed
from titan_launch.data.corpora.interface import Document, File, Part, Skipped
from titan_launch.data.corpora.records import BATCH_ROWS, ColumnCorpus


class HuggingFaceCorpus(ColumnCorpus):
    """The rows of one split of a data set, as documents."""

    config: HuggingFaceData
    remedy = "name a data set with rows of text"

    @cached_property
    def files(self) -> list[File]:
        """The Arrow files, which `datasets` maps into memory."""
        paths = [Path(file["filename"]) for file in self._dataset.cache_files]
        return [File(path.name, path, file_state(path)) for path in paths]

    def parts(self) -> list[Part]:
        files, num_rows = tuple(self.files), len(self._dataset)
        num_bytes = sum(file.size for file in files)
        step = max(1, num_rows * self.part_bytes // max(1, num_bytes))
        starts = range(0, num_rows, step)
        return [Part(files, num_bytes // len(starts), start, min(start + step, num_rows)) for start in starts]

    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        rows = self._dataset.select(range(part.start, part.stop or 0))
        name = f"{self.config.subset or 'default'}/{self.config.hf_split}"
        file = (name, sum(file.size for file in self.files))
        yield from self.rows(rows.iter(BATCH_ROWS), file, self.config.path, part.start)

    @cached_property
    def _dataset(self) -> Any:
        dataset = load_rows(self.config, self.key)
        self.check_column(dataset.features.arrow_schema, self.config.path)
        return dataset.select_columns([self.config.column]).with_format("arrow")


def load_rows(config: HuggingFaceData, key: KeyPath, streaming: bool = False) -> Any:
    """Return the split that `config` names as a `datasets.Dataset`, or with `streaming` as a
    `datasets.IterableDataset`. Raises ConfigError on a key below `key`."""
    try:
        import datasets  # optional, and slow to import
    except ImportError:
        raise config_error((*key, "kind"), not_installed("datasets"), config.kind) from None
    datasets.disable_progress_bars()  # otherwise each rank prints a progress bar
    folder = Path(config.path)
    try:
        if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found = _saved(config, key, datasets.load_from_disk(config.path))
            return found.to_iterable_dataset() if streaming else found
        return datasets.load_dataset(config.path, config.subset, split=config.hf_split, streaming=streaming)
    except ConfigError:
        raise
    except Exception as error:  # each kind of data set has exceptions of its own
        raise config_error((*key, "path"), _why(config, error), config.path) from None


def _saved(config: HuggingFaceData, key: KeyPath, found: Any) -> Any:
    """Return the split of data that `save_to_disk` wrote. `found`: the loaded data, which is one data set, or a dict of
    data sets by split. Raises ConfigError if `subset` is set, or if the data has no split `hf_split`."""
    if config.subset is not None:
        reason = "a folder that save_to_disk wrote has no subsets; remove this key"
        raise config_error((*key, "subset"), reason, config.subset)
    splits = found if isinstance(found, dict) else {str(found.split or config.hf_split): found}
    if config.hf_split not in splits:
        hint = did_you_mean(config.hf_split, splits)
        reason = f"is not a split of {config.path}; its splits are {', '.join(splits)}{hint}"
        raise config_error((*key, "hf_split"), reason, config.hf_split)
    return splits[config.hf_split]


def _why(config: HuggingFaceData, error: Exception) -> str:
    message = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if Path(config.path).exists():
        return f"cannot be loaded: {message}; correct the folder, subset or hf_split"
    if isinstance(error, ConnectionError):
        return (
            f"is not a folder on this machine, and the Hugging Face Hub cannot be reached ({message}); correct the "
            "path, or write the data set with save_to_disk on a machine with a network and copy the folder"
        )
    return f"cannot be loaded from the Hugging Face Hub: {message}; correct path, subset or hf_split"
