"""Text files. Each file is one document."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from titan_launch.data.corpora.interface import Document, Part, Skipped
from titan_launch.data.corpora.text_files import MOST_DOCUMENT, FileCorpus, is_compressed

_CHECKED_BYTES = 1 << 20
"""Number of bytes that `is_text` decodes at a time."""


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
    """Return True if the content of a file is valid UTF-8 without NUL bytes. Decoding in chunks saves memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), _CHECKED_BYTES):
            decoder.decode(data[start : start + _CHECKED_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return b"\0" not in data
