"""Corpora of records: lines of files, or rows of tables. Each record is one document, or a pair of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from titan_launch.config.sections.data import HuggingFaceData, ParquetData, RecordsData
from titan_launch.core.errors import config_error, did_you_mean, format_key, listed
from titan_launch.core.terminal import one_line
from titan_launch.data.corpora.interface import Corpus, Document, Skipped

BATCH_ROWS = 1000
"""Largest number of rows that are read at a time."""

_SHOWN = 500
"""Limit of the characters that an error quotes from a record, or from the names of columns."""


class RecordError(Exception):
    """Error for a record that cannot be used."""

    def __init__(self, reason: str, detail: str = "", key: str = "path", on_error: Literal["stop", "skip", ""] = ""):
        """`reason`: text that follows "is" in the error, such as `not valid JSON`; skipped records are counted by
        reason. `detail`: further text for the error. `key`: key of the section that may be wrong. `on_error`: the value
        of `key`, if `key` decides what happens to the record; "" if the key `on_error` decides it."""
        self.reason, self.detail, self.key, self.on_error = reason, detail, key, on_error
        super().__init__(reason)


class RecordCorpus(Corpus):
    """A corpus whose documents are records. If a record cannot be used, it is skipped, or the run stops: the key
    `on_error` decides."""

    config: RecordsData
    unit = "row"

    def text_document(self, text: object, file: tuple[str, int], key: str) -> Document:
        """Return the document of a record's text. `key`: the key of the section that names the text. Raises RecordError
        if `text` is not a string of valid Unicode."""
        name = getattr(self.config, key)
        if not isinstance(text, str):
            raise RecordError(f'without a string in "{name}"', f"it is {_TYPES.get(type(text), 'another type')}", key)
        content = utf8(text)
        return Document(content, content, file)

    def failed(self, error: RecordError, where: str) -> Skipped:
        """Return a Skipped for the record that caused `error`. Raises ConfigError if `error.on_error` or, if that is
        "", the key `on_error` is "stop". `where`: name of the record."""
        if (error.on_error or self.config.on_error) == "skip":
            return Skipped(error.reason, where)
        detail = f" ({one_line(error.detail[:_SHOWN])})" if error.detail else ""
        where = one_line(where)
        skip = f'{format_key((*self.key, error.key if error.on_error else "on_error"))} = "skip"'
        reason = f"{where} is {error.reason}{detail}; correct this {self.unit}, or set {skip}"
        raise config_error((*self.key, error.key), reason, getattr(self.config, error.key))


def utf8(text: str) -> bytes:
    """Return the text in UTF-8. Raises RecordError for half of a surrogate pair, which JSON can represent, but UTF-8
    cannot."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise RecordError("not valid Unicode", "it has half of a surrogate pair") from None


_TYPES: dict[type, str] = {
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}


class ColumnCorpus(RecordCorpus):
    """A corpus of rows in tables of Arrow. The key `column` names the column with the text. Rows count from 0."""

    config: ParquetData | HuggingFaceData

    def check_column(self, schema: Any, where: str) -> None:
        """Raise ConfigError if a `pyarrow.Schema` does not have the column with the text, or if the column is not text.
        `where`: name of the data."""
        key, column, types = (
            (*self.key, "column"),
            self.config.column,
            dict(zip(schema.names, schema.types, strict=True)),
        )
        if column not in types:
            columns = one_line(f"its columns are {listed(list(types), most=12)}{did_you_mean(column, types)}")
            raise config_error(key, f"is not a column of {one_line(where)}; {columns:.{_SHOWN}}", column)
        if not _is_text(types[column]):
            texts = one_line(listed([name for name in types if _is_text(types[name])], most=12)) or "none"
            kind = one_line(str(types[column]))
            reason = f"is a column of {kind:.80} in {one_line(where)}, not of text; columns of text: {texts:.{_SHOWN}}"
            raise config_error(key, reason, column)

    def rows(
        self, batches: Iterable[Any], file: tuple[str, int], where: str, first_row: int
    ) -> Iterator[Document | Skipped]:
        """Yield the documents of record batches or tables, and the skipped rows. `file`: `Document.file` of the
        documents. `where`: name of the data, for errors. `first_row`: number of the first row within `where`. Raises
        ConfigError for a row that stops the run."""
        row = first_row
        for batch in batches:
            for content in _bytes_of(batch.column(self.config.column)):
                try:
                    yield self.text_document(_decoded(content), file, "column")
                except RecordError as error:
                    yield self.failed(error, f"row {row} of {where}")
                row += 1


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string")


def _bytes_of(column: Any) -> Sequence[bytes | None]:
    """Return the values of a column of text as bytes, because Arrow does not check that they are UTF-8. A null value is
    None."""
    values: Sequence[bytes | None] = column.cast("large_binary").to_pylist()
    return values


def _decoded(content: bytes | None) -> str | None:
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError:
        raise RecordError("not UTF-8 text", key="column") from None
