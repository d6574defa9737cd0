"""JSON lines. Each line of a file is one JSON object, and one document."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from titan_launch.config.paths import COMPRESSED
from titan_launch.config.sections.data import JsonlData, LinesData
from titan_launch.core.errors import listed
from titan_launch.data.corpora.base import Document, File, Part, Skipped
from titan_launch.data.corpora.files import FileCorpus
from titan_launch.data.corpora.records import RecordCorpus, RecordError


class LinesCorpus(FileCorpus, RecordCorpus):
    """The lines of the files that `path` names, as documents. Blank lines do not count."""

    config: LinesData
    unit = "line"
    remedy = "name files with one JSON object per line"

    @abstractmethod
    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        """Return the document of a line's object. Raises RecordError. `file`: name and size of the line's file."""

    def parts(self) -> list[Part]:
        """Return groups of small and compressed files, and ranges of bytes of each large file. A line belongs to the
        range in which it begins."""
        parts: list[Part] = []
        small: list[File] = []
        for file in self.files:
            if file.size <= self.part_bytes or file.path.suffix in COMPRESSED:
                small.append(file)
                continue
            parts += [*self.grouped(small), *self._ranges(file)]
            small = []
        return parts + self.grouped(small)

    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        """Yield the documents of a part. Raises ConfigError for a line that stops the run."""
        for file in part.files:
            lines_before: int | None = None
            for number, line in enumerate(self._lines(file, part), start=1):
                if not line.strip():
                    continue
                try:
                    yield self.document(_parse(line), (file.name, file.size))
                except RecordError as error:
                    if lines_before is None:
                        lines_before = self._lines_before(file, part.start)
                    yield self.failed(error, f"{file.name}, line {lines_before + number}")

    def _ranges(self, file: File) -> list[Part]:
        step = self.part_bytes
        starts = range(0, file.size, step)
        return [Part((file,), min(step, file.size - start), start, start + step) for start in starts]

    def _lines(self, file: File, part: Part) -> Iterator[bytes]:
        """Yield the lines of a file that begin in the range of a part."""
        with self.opened(file) as stream:
            position = part.start
            if position:
                stream.seek(position - 1)
                position += len(stream.readline()) - 1
            for line in stream:
                if part.stop is not None and position >= part.stop:
                    return
                position += len(line)
                yield line

    def _lines_before(self, file: File, start: int) -> int:
        """Return the number of lines that begin before a position. Only messages need this number."""
        count, position = 0, 0
        with self.opened(file) as stream:
            for line in stream if start else ():
                if position >= start:
                    break
                count, position = count + 1, position + len(line)
        return count


class JsonlCorpus(LinesCorpus):
    """Lines with the text in one field."""

    config: JsonlData

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        """Return the document of a line's object. Raises RecordError if the field is missing, or not a string."""
        found: Any = record
        for name in self.config.field.split("."):
            if not isinstance(found, dict) or name not in found:
                keys = listed(list(found), most=8) if isinstance(found, dict) else ""
                raise RecordError(f'without the key "{self.config.field}"', keys and f"its keys: {keys}", "field")
            found = found[name]
        return self.text_document(found, file, "field")


def _parse(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise RecordError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise RecordError("not valid JSON", f"{error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError):  # numbers of thousands of digits, thousands of nested arrays
        raise RecordError("not valid JSON", "it is too long or too deeply nested") from None
    if not isinstance(record, dict):
        raise RecordError("not a JSON object")
    return record
