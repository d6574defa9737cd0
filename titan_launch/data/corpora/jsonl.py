"""JSON lines. Each line of a file is one JSON object. An object is one document, or a pair of documents."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np

from titan_launch.config.sections.data import ClassificationData, JsonlData, LinesData
from titan_launch.core.errors import KeyPath, config_error, did_you_mean, listed
from titan_launch.core.files import MIB
from titan_launch.core.json_files import JsonError, parse_record
from titan_launch.data.chat_rendering import RecordError
from titan_launch.data.corpora.interface import Document, File, Part, Skipped
from titan_launch.data.corpora.records import RecordCorpus
from titan_launch.data.corpora.text_files import LEAST_RECORD, FileCorpus, is_compressed, most_of_records
from titan_launch.data.token_files import Encoded, Tokens
from titan_launch.data.tokenizers import Tokenizer

MOST_LINE = 32 * MIB
"""Largest size of a line in bytes. The parsed values of a line may take 20 times as much memory."""

_MOST_CONTAINERS = 2_000_000
"""Largest number of arrays and objects in a line. Brackets in strings also count."""


class LinesCorpus(FileCorpus, RecordCorpus):
    """The lines of the files that `path` names, as documents. Blank lines are not documents."""

    config: LinesData
    unit = "line"
    remedy = "name files with one JSON object per line"

    @abstractmethod
    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        """Return the document of a line's object. Raises RecordError. `file`: name and size of the line's file."""

    def parts(self) -> list[Part]:
        """Return the parts. Small files and compressed files are grouped. Each large uncompressed file is divided into
        ranges of bytes. A line belongs to the range in which it begins."""
        parts: list[Part] = []
        small: list[File] = []
        step = self.part_bytes
        for file in self.files:
            if file.size <= step or is_compressed(file):
                small.append(file)
                continue
            starts = range(0, file.size, step)
            ranges = (Part((file,), min(step, file.size - start), start, start + step) for start in starts)
            parts += [*self.grouped(small), *ranges]
            small = []
        return parts + self.grouped(small)

    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        for file in part.files:
            lines_before: int | None = None
            for number, line in enumerate(self.lines(file, part), start=1):
                if not line.strip():
                    continue
                try:
                    yield self.document(parse_line(line), (file.name, file.size))
                except RecordError as error:
                    if lines_before is None:
                        lines_before = self._lines_before(file, part.start)
                    yield self.failed(error, f"{file.name}, line {lines_before + number}")

    def lines(self, file: File, part: Part) -> Iterator[bytes]:
        """Yield the lines of a file that begin in the range of a part. If a line is longer than MOST_LINE, yield only
        its beginning. Raises ConfigError for a file that cannot be read, and for a compressed file that is larger than
        its limit after decompression."""
        stop = part.stop or _NO_END
        limit = most_of_records(file) if is_compressed(file) else _NO_END
        with self.opened(file) as stream:
            position, counted = part.start, 0
            if position:
                stream.seek(position - 1)
                position += _skip_line(stream, stop - position + 1) - 1
            while position < stop and (line := stream.readline(MOST_LINE + 1)):
                position += len(line)
                counted += max(len(line), LEAST_RECORD)
                yield line
                if len(line) > MOST_LINE and not line.endswith(b"\n"):
                    skipped = _skip_line(stream, limit - counted)
                    position, counted = position + skipped, counted + skipped
                if counted >= limit:
                    raise self.expanded(file, limit)

    def _lines_before(self, file: File, start: int) -> int:
        """Return the number of lines that begin before byte `start` of a file. Only the names of records that cannot be
        used need this number."""
        count, position = 0, 0
        with self.opened(file) as stream:
            while position < start and (found := _skip_line(stream, _NO_END)):
                count, position = count + 1, position + found
        return count


_NO_END = 1 << 62


def _skip_line(stream: BinaryIO, limit: int) -> int:
    """Read a stream to the end of the line, but at most about `limit` bytes. Return the number of bytes read."""
    size = 0
    while size < limit and (found := stream.readline(MIB)):
        size += len(found)
        if found.endswith(b"\n"):
            break
    return size


class TokenizedLinesCorpus(LinesCorpus):
    """Lines that `document` tokenizes itself, because only some of the tokens count as targets."""

    has_targets = True

    def encode(self, contents: Sequence[Encoded]) -> list[Encoded]:
        return list(contents)


class JsonlCorpus(LinesCorpus):
    """A corpus of lines whose text is in the field that the key `field` names."""

    config: JsonlData

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        content = self.content(value_of(record, self.config.field, "field"), "field")
        return Document(content, content, file)


class ClassificationCorpus(TokenizedLinesCorpus):
    """One text with its label per line. The only target of a document is its label, after its last token."""

    config: ClassificationData
    remedy = "name files with one text and its label per line"

    def __init__(self, config: ClassificationData, tokenizer: Tokenizer, key: KeyPath, seq_len: int):
        """Raises ConfigError if there are more labels than tokens in the vocabulary."""
        super().__init__(config, tokenizer, key, seq_len)
        number, vocab_size = len(config.labels), tokenizer.vocab_size
        if number > vocab_size:
            reason = (
                f"has {number:,} labels, whose numbers are stored as tokens, but the tokenizer has {vocab_size:,} "
                f"tokens; use a tokenizer with at least {number:,} tokens"
            )
            raise config_error((*key, "labels"), reason, also=(("tokenizer",),))

    @property
    def identity(self) -> list[object]:
        """The length of a sample: a further value that decides the tokens."""
        return [self.seq_len]

    def document(self, record: dict[str, Any], file: tuple[str, int]) -> Document:
        label = self._label(value_of(record, self.config.label, "label"))
        content = self.content(value_of(record, self.config.text, "text"), "text")
        (tokens,) = self.tokenizer.encode_documents([content])
        tokens, rule = tokens[:-1], self.config.truncation  # without the token that ends a document
        if len(tokens) > self.seq_len and rule in ("skip", "stop"):
            reason = f"longer than training.seq_len = {self.seq_len:,} tokens"
            raise RecordError(reason, f"it has {len(tokens):,}", "truncation", on_error=rule)
        if not len(tokens):
            raise RecordError("without a text", key="text")
        return Document(content, scored(tokens, label, self.seq_len, rule), file)

    def _label(self, value: object) -> int:
        """Return the index of a label in the key `labels`. `value`: the label, or already its index. Raises RecordError
        for any other value."""
        labels = self.config.labels
        if isinstance(value, str) and value in labels:
            return labels.index(value)
        if type(value) is int and 0 <= value < len(labels):
            return value
        hint = did_you_mean(value, labels) if isinstance(value, str) else ""
        detail = f"it is {value!r:.80}{hint}; the labels are {listed(labels, most=8)}, or their numbers from 0"
        raise RecordError("without a known label", detail, "label")


def scored(tokens: Tokens, label: int, longest: int, truncation: str) -> Encoded:
    """Return a document whose only target is `label`, after its last token. `longest`: largest number of tokens,
    without the label. `truncation`: "left" keeps the last tokens of a longer document, any other value keeps the first
    tokens."""
    kept = tokens[max(len(tokens) - longest, 0) :] if truncation == "left" else tokens[:longest]
    targets = np.zeros(len(kept) + 1, np.bool_)
    targets[-1] = True
    return Encoded(np.append(kept, np.array([label], kept.dtype)), targets)


def value_of(record: dict[str, Any], field: str, key: str) -> Any:
    """Return the value of a field, such as `meta.text`: the field `text` in the object `meta`. `key`: the key of the
    section that names the field, for errors. Raises RecordError if the field is missing."""
    found: Any = record
    owner = "its keys"
    for name in field.split("."):
        if not isinstance(found, dict) or name not in found:
            keys = listed(list(found), most=8) if isinstance(found, dict) else ""
            raise RecordError(f'without the key "{field}"', keys and f"{owner}: {keys}", key)
        found, owner = found[name], f'keys of "{name}"'
    return found


def parse_line(line: bytes) -> dict[str, Any]:
    """Return the object of a line. Raises RecordError for a line that is too long, or is not a JSON object."""
    if len(line) - line.endswith(b"\n") > MOST_LINE:
        raise RecordError(f"longer than {MOST_LINE // MIB} MiB, the limit of a line")
    if len(line) > MIB and line.count(b"[") + line.count(b"{") > _MOST_CONTAINERS:
        raise RecordError("not valid JSON", f"it has more than {_MOST_CONTAINERS:,} arrays and objects")
    try:
        record = parse_record(line)
    except JsonError as error:
        try:
            line.decode()
        except UnicodeDecodeError:
            raise RecordError("not UTF-8 text") from None
        detail = str(error).replace(" at line 1, column", " at column")
        raise RecordError("not valid JSON", f"{detail}{_of_array(line)}") from None
    if not isinstance(record, dict):
        raise RecordError("not a JSON object", _of_array(line).removeprefix("; "))
    return record


def _of_array(line: bytes) -> str:
    """Return a remedy if `line` begins an array of objects, because the whole file may be one array; "" otherwise."""
    remedy = "; the file may be one JSON array: jq -c '.[]' FILE writes each object as a line"
    return remedy if re.match(rb"\s*\[\s*({|$)", line) else ""
