"""Text files. Each file is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from functools import cached_property

from titan_launch.config.sections.data import TextData, expand_text_paths
from titan_launch.core.errors import config_error
from titan_launch.core.files import read_regular
from titan_launch.data.corpora.base import Corpus, Document, File, Part, Skipped, grouped

NOT_TEXT = "file that is not UTF-8 text"

_PART_BYTES = 1 << 26
_CHECKED_BYTES = 1 << 20
"""Bytes per chunk in which `is_text` decodes a file."""


class TextCorpus(Corpus):
    """The files that `path` names, as documents. Files that are not text are skipped."""

    config: TextData

    @cached_property
    def files(self) -> list[File]:
        """All files. Raises ConfigError if an entry of `path` matches none."""
        try:
            found = expand_text_paths(self.config.path)
        except FileNotFoundError as error:
            reason = f'no file is found at "{error.args[0]}"'
            raise config_error((*self.key, "path"), reason, self.config.path) from None
        stats = ((name, path, path.stat()) for name, path in found)
        return [File(name, path, stat.st_size, stat.st_mtime_ns) for name, path, stat in stats]

    def parts(self) -> list[Part]:
        """Return groups of files."""
        return grouped(self.files, _PART_BYTES)

    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        """Yield the text files of a part. Raises ConfigError for a file that cannot be read."""
        for file in part.files:
            try:
                content = read_regular(file.path)
            except OSError as error:
                reason = f"cannot read {file.path}: {error.strerror}; correct the permissions, or name other files"
                raise config_error((*self.key, "path"), reason) from None
            if is_text(content):
                yield Document(file.name, content, (file.name, len(content)))
            else:
                yield Skipped(NOT_TEXT, file.name)


def is_text(data: bytes) -> bool:
    """Return True if a file is valid UTF-8 without NUL bytes. Decoding in chunks saves memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), _CHECKED_BYTES):
            decoder.decode(data[start : start + _CHECKED_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
