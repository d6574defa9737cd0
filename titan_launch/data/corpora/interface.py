"""The interface of corpora. A corpus is a set of documents in files. `data.prepare` turns it into token files."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_launch.config.sections.data import CorpusData
from titan_launch.core.errors import ConfigError, KeyPath, config_error
from titan_launch.core.terminal import one_line
from titan_launch.data.token_files import Encoded
from titan_launch.data.tokenizers import Tokenizer


@dataclass(frozen=True)
class File:
    """A file of a corpus."""

    name: str
    """Path relative to the folder that the job names, or to the folder in which the job's glob searches. So the name
    does not change when that folder is moved. For a data set of Hugging Face: the name of the Arrow file."""

    path: Path
    state: Sequence[int]
    """Size, times of the last changes and inode: the result of `file_state`."""

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.state[0]


@dataclass(frozen=True)
class Part:
    """A part of a corpus: some files, or a range of one file or data set. One process tokenizes a part into one
    shard."""

    files: tuple[File, ...]
    num_bytes: int
    """Approximate size in bytes, for the progress bar."""

    start: int = 0
    """Start of the part. The class of the corpus decides the unit: bytes, rows or row groups."""

    stop: int | None = None
    """End of the part, in the unit of `start`; None: the part ends with its last file."""


@dataclass(frozen=True)
class Document:
    """A document before its tokenization."""

    name: str | bytes
    """For a text file, its name. For a record, its content. A hash of `name` decides to which split the document
    belongs."""

    content: Any
    """The input of `Corpus.encode`: by default UTF-8 bytes. A corpus with its own `encode` may use another type."""

    file: tuple[str, int]
    """(Name, size in bytes) of the document's file. For a data set of Hugging Face: the names of subset and split, and
    the size of all its files."""


@dataclass(frozen=True)
class Skipped:
    """A file or a document that is not used."""

    reason: str
    """Reason such as `not UTF-8 text`. Skipped files and documents are counted by reason."""

    name: str
    """Name of the file or of the record, such as `a.jsonl, line 3`."""


class Corpus(ABC):
    """Documents in files. Instances are sent to worker processes."""

    unit = "file"
    """Noun for the part of a file that is one document, in errors and log lines: `file`, `line` or `row`."""

    remedy = "name other files"
    """Remedy in the error for data without any usable document."""

    has_targets = False
    """True if documents can have tokens that do not count as targets."""

    has_pairs = False
    """True if every record is two documents: the chosen and the rejected answer to a prompt."""

    has_ratings = False
    """True if the last token of every document is a label of its answer, 0 or 1. The label is never an input."""

    def __init__(self, config: CorpusData, tokenizer: Tokenizer, key: KeyPath, seq_len: int):
        """`key`: path of the section in the job file, for errors. `seq_len`: tokens of a sample."""
        self.config, self.tokenizer, self.key, self.seq_len = config, tokenizer, key, seq_len

    @property
    def identity(self) -> Sequence[object]:
        """Further values on which the tokens depend, besides the files, the keys of the section, and the tokenizer."""
        return []

    @property
    @abstractmethod
    def files(self) -> Sequence[File]:
        """All files, in the order of the corpus. Raises ConfigError if the data is missing or cannot be used."""

    @property
    def left_out(self) -> str:
        """Text about unread files in the corpus's folders; "" if the corpus reads all files."""
        return ""

    @cached_property
    def part_bytes(self) -> int:
        """Approximate size of a part in bytes: 1/256 of the corpus, but between 1 MiB and 1 GiB.

        With small parts, processes end at nearly the same time, and an interrupted preparation loses little. But each
        part becomes a shard of several files, so the number of parts must not be large.
        """
        return min(max(sum(file.size for file in self.files) // 256, 1 << 20), 1 << 30)

    @abstractmethod
    def parts(self) -> list[Part]:
        """Return the parts, in the order of `files`. The parts do not depend on the number of processes. Raises
        ConfigError if the data cannot be read."""

    @abstractmethod
    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        """Yield the documents of a part, and its skipped documents, in order. Raises ConfigError for documents that
        stop the run, and for files that cannot be read."""

    def unreadable(self, file: File, reason: str) -> ConfigError:
        """Return the error for a file that cannot be read. `reason`: text after the file's path, with the remedy."""
        return config_error((*self.key, "path"), f"cannot read {one_line(str(file.path))}: {reason}")

    def unopened(self, file: File, error: OSError) -> ConfigError:
        """Return the error for a file that cannot be opened."""
        return self.unreadable(file, f"{error.strerror or error}; correct the permissions, or name other files")

    def encode(self, contents: Sequence[Any]) -> list[Encoded]:
        """Return an Encoded for each of `contents`, which are values of `Document.content`."""
        return [Encoded(tokens) for tokens in self.tokenizer.encode_documents(contents)]


def in_split(name: str | bytes, config: CorpusData) -> bool:
    """Return True if the split that `config` names contains document `name`."""
    return config.split == "all" or is_held_out(name, config.validation_percent) == (config.split == "validation")


def is_held_out(name: str | bytes, percent: int) -> bool:
    """Return True if a document belongs to the validation split, which gets about `percent` % of the documents. The
    result depends only on the arguments. `name`: `Document.name`."""
    data = name if isinstance(name, bytes) else name.encode(errors="surrogateescape")
    return zlib.crc32(data) % 100 < percent
