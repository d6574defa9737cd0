"""Corpora of records: lines of files, or rows of tables. Each record is one document, or a pair of documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from titan_launch.config.sections.data import HuggingFaceData, ParquetData, RecordsData
from titan_launch.core.errors import config_error, did_you_mean, format_key, listed
from titan_launch.core.terminal import one_line
from titan_launch.data.chat_rendering import RecordError
from titan_launch.data.corpora.interface import Corpus, Document, Skipped

BATCH_ROWS = 1000
"""Largest number of rows that are read at a time."""

_SHOWN = 500
"""Largest number of characters of column names that an error quotes."""


class RecordCorpus(Corpus):
    """A corpus whose documents are records. The key `on_error` decides whether a record that cannot be used is skipped
    or stops the run. For a record that is too long, the key `truncation` decides, if the section has this key."""

    config: RecordsData
    unit = "row"

    def content(self, text: object, key: str) -> bytes:
        """Return a record's text in UTF-8. `key`: the key of the section with the name of the text's field, such as
        `column`. Raises RecordError if `text` is not a string of valid Unicode."""
        name = getattr(self.config, key)
        if not isinstance(text, str):
            raise RecordError(f'without a string in "{name}"', f"it is {_TYPES.get(type(text), 'another type')}", key)
        return utf8(text)

    def failed(self, error: RecordError, where: str) -> Skipped:
        """Return a Skipped for the record that caused `error`. Raises ConfigError if the record stops the run.
        `error.on_error` decides this or, if it is "", the key `on_error`. `where`: name of the record."""
        if (error.on_error or self.config.on_error) == "skip":
            return Skipped(error.reason, where)
        skip = f'{format_key((*self.key, error.key if error.on_error else "on_error"))} = "skip"'
        reason = f"{one_line(where)} is {error}; correct this {self.unit}, or set {skip}"
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
    """A corpus of rows in tables of Arrow. The key `column` names the column with the text. Errors number the rows from
    0."""

    config: ParquetData | HuggingFaceData

    def check_column(self, schema: Any, where: str) -> None:
        """Raise ConfigError if a `pyarrow.Schema` does not have the column with the text, or if the column is not text.
        `where`: name of the data."""
        key, column = (*self.key, "column"), self.config.column
        types = dict(zip(schema.names, schema.types, strict=True))
        if column not in types:
            known = listed(list(types), most=12) or "none"
            columns = one_line(f"its columns are {known}{did_you_mean(column, types)}")
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
        documents. `where`: name of the data, for errors. `first_row`: index of the first row in this data. Raises
        ConfigError for a row that stops the run."""
        row = first_row
        for batch in batches:
            # Arrow does not check that text is UTF-8, so it is decoded here. A null value is None.
            for value in batch.column(self.config.column).cast("large_binary").to_pylist():
                try:
                    content = self.content(None if value is None else value.decode(), "column")
                    yield Document(content, content, file)
                except UnicodeDecodeError:
                    yield self.failed(RecordError("not UTF-8 text", key="column"), f"row {row} of {where}")
                except RecordError as error:
                    yield self.failed(error, f"row {row} of {where}")
                row += 1


def _is_text(kind: Any) -> bool:
    return str(kind) in ("string", "large_string")
