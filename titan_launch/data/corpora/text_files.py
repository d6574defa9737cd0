"""Corpora of files that `path` names. The files may be compressed. In a corpus of text, each file is a document."""

from __future__ import annotations

import codecs
import gzip
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from titan_launch.config.paths import COMPRESSED, LinkError, describe_ends, expand_paths, files_left_out
from titan_launch.config.sections.data import FilesData, TextData, misread_as_text
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.files import MIB, file_state, open_regular
from titan_launch.core.packages import not_installed
from titan_launch.data.corpora.interface import Corpus, Document, File, Part, Skipped

MOST_DOCUMENT = 256 * MIB
"""A decompressed document may have at most ten times the bytes of its file, plus this number of bytes."""

MOST_RECORDS = 64 * MIB
"""The decompressed lines or rows of a file may have at most a hundred times the bytes of the file, plus this number of
bytes."""

LEAST_RECORD = 256
"""A line or row with fewer bytes counts as this number of bytes toward the limit of `most_of_records`. Otherwise a file
could have any number of empty lines."""


class FileCorpus(Corpus):
    """A corpus whose `path` names files."""

    config: FilesData

    @cached_property
    def files(self) -> list[File]:
        """The files that `path` names. Raises ConfigError if an entry of `path` matches no file, or if `kind = "text"`
        would read a file of records, such as `.jsonl` or `.parquet`. Also raises ConfigError for a link that leads out
        of a folder, and for folders that are nested too deeply."""
        found: list[tuple[str, Path]] = []
        problem: str | None = None
        try:
            found = expand_paths(self.config.path, self.config.suffixes)
        except RecursionError:
            problem = "has folders that are nested too deeply; name other files"
        except FileNotFoundError as error:
            problem = f'no file is found at "{error.args[0]}" (paths are relative to the working directory)'
        except LinkError as error:
            problem = f"{error}, or name the target"
        entries = (self.config.path,) if isinstance(self.config.path, str) else self.config.path
        for entry in entries if isinstance(self.config, TextData) else ():
            below = [name for name, path in found if path.is_relative_to(entry)] if os.path.isdir(entry) else [entry]
            problem = problem or misread_as_text(entry, below)
        if problem is not None:
            raise config_error((*self.key, "path"), problem, self.config.path)
        return [File(name, path, file_state(path)) for name, path in found]

    @property
    def left_out(self) -> str:
        return describe_ends(files_left_out(self.config.path, self.config.suffixes))

    def parts(self) -> list[Part]:
        return self.grouped(self.files)

    def grouped(self, files: Sequence[File]) -> list[Part]:
        """Return parts of consecutive files that together have about `part_bytes` bytes."""
        parts: list[Part] = []
        group: list[File] = []
        size = 0
        for file in files:
            group.append(file)
            size += file.size
            if size >= self.part_bytes:
                parts.append(Part(tuple(group), size))
                group, size = [], 0
        return [*parts, Part(tuple(group), size)] if group else parts

    @contextmanager
    def opened(self, file: File) -> Iterator[BinaryIO]:
        """Open a file until the end of the block. Yield a stream of its decompressed content. Raises ConfigError if the
        file cannot be read."""
        decompress, damage = self._decompressor(file)
        try:
            with open_regular(file.path) as raw, decompress(raw) as stream:
                yield stream
        except damage as error:
            raise self.unreadable(file, f"it is damaged ({error}); compress or copy it again") from None
        except OSError as error:
            raise self.unopened(file, error) from None

    remedy_for_size = "store it uncompressed"
    """Remedy for a file that is too large after decompression."""

    def expanded(self, file: File, limit: int) -> ConfigError:
        """Return the error for a file that is larger than its limit after decompression."""
        reason = f"after decompression it exceeds {limit:,} bytes, the limit for {file.size:,} compressed bytes"
        return self.unreadable(file, f"{reason}; {self.remedy_for_size}")

    def _decompressor(self, file: File) -> tuple[Callable[[BinaryIO], Any], tuple[type[Exception], ...]]:
        """Return a function that decompresses the stream of a file, and the exceptions that the function raises for
        damaged files. Raises ConfigError if a package for `.zst` files is not installed."""
        if file.path.suffix == ".gz":
            return gzip.open, (gzip.BadGzipFile, zlib.error, EOFError)
        if file.path.suffix != ".zst":
            return nullcontext, ()
        try:
            from compression import zstd  # Python 3.14
        except ImportError:
            try:
                from backports import zstd
            except ImportError:
                raise self.unreadable(file, f"it {not_installed('backports.zstd')}") from None
        return zstd.open, (zstd.ZstdError, EOFError)


def is_compressed(file: File) -> bool:
    """Return True for a file that is decompressed while it is read."""
    return file.path.suffix in COMPRESSED


def most_of_records(file: File) -> int:
    """Return the number of bytes that the lines or rows of a compressed file may have after decompression."""
    return 100 * file.size + MOST_RECORDS


class TextCorpus(FileCorpus):
    """The files that `path` names, as documents. Files that are not text are skipped."""

    remedy = "convert files to UTF-8 without NUL bytes, or name text files"

    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        for file in part.files:
            with self.opened(file) as stream:
                limit = 10 * file.size + MOST_DOCUMENT
                content = stream.read(limit + 1 if is_compressed(file) else -1)
            if is_compressed(file) and len(content) > limit:
                raise self.expanded(file, limit)
            if is_text(content):
                yield Document(file.name, content, (file.name, file.size))
            else:
                yield Skipped("not UTF-8 text", file.name)


def is_text(data: bytes) -> bool:
    """Return True if the content of a file is valid UTF-8 without NUL bytes."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), MIB):  # decoding in chunks saves memory
            decoder.decode(data[start : start + MIB])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
