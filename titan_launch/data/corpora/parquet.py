"""Parquet files. Each row is one document."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from titan_launch.config.sections.data import ParquetData
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.files import MIB
from titan_launch.core.packages import not_installed
from titan_launch.core.terminal import one_line
from titan_launch.data.corpora.interface import Document, File, Part, Skipped
from titan_launch.data.corpora.records import BATCH_ROWS, ColumnCorpus
from titan_launch.data.corpora.text_files import LEAST_RECORD, FileCorpus, most_of_records

_MOST_DICTIONARY = 32 * MIB
"""Largest size in bytes of a column's dictionary. Writers usually limit dictionaries to 1 MiB."""

_AT_ONCE = 32 * MIB
"""Largest size in bytes of the rows that are read at a time. Each row counts as the size of the dictionary."""


class ParquetCorpus(FileCorpus, ColumnCorpus):
    """The rows of the files that `path` names, as documents."""

    config: ParquetData
    remedy = "name files with rows of text"
    remedy_for_size = 'write it again with compression="none" and use_dictionary=False (pyarrow)'

    def parts(self) -> list[Part]:
        """Return the parts. Each part is a range of row groups of one file, with about `part_bytes` bytes of the
        column. Raises ConfigError for a file that cannot be read."""
        parts = list[Part]()
        for file in self.files:
            start, size, of_all, limit = 0, 0, 0, most_of_records(file)
            with self._table(file) as (table, _):
                last, leaves = table.num_row_groups - 1, table.metadata.schema  # a struct has several leaves
                column = next(i for i in range(len(leaves)) if leaves.column(i).path == self.config.column)
                for group in range(table.num_row_groups):
                    # For damaged metadata, this read raises an exception. The next line would crash the process.
                    next(table.iter_batches(1, [group], [self.config.column], use_threads=False), None)
                    in_group = table.metadata.row_group(group).column(column).total_uncompressed_size
                    of_all += in_group
                    if in_group < 0 or of_all > limit:
                        raise self.expanded(file, limit)
                    size += in_group
                    if size >= self.part_bytes or group == last:
                        parts.append(Part((file,), size, start, group + 1))
                        start, size = group + 1, 0
        return parts

    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        (file,) = part.files
        limit, counted = most_of_records(file), 0
        with self._table(file) as (table, stream):
            first_row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
            batches = self._batches(table, stream, file, range(part.start, part.stop or 0))
            for document in self.rows(batches, (file.name, file.size), file.name, first_row):
                size = len(document.content) if isinstance(document, Document) else 0
                counted += max(size, LEAST_RECORD)
                if counted > limit:
                    raise self.expanded(file, limit)
                yield document

    def _batches(self, table: Any, stream: BinaryIO, file: File, groups: Iterable[int]) -> Iterator[Any]:
        """Yield the rows of row groups in batches that fit into memory. Every row may repeat a large value of the
        dictionary by a small index. So the more bytes the dictionary has, the fewer rows are in a batch. Raises
        ConfigError for a dictionary that is too large."""
        from pyarrow.parquet import ParquetFile

        column = self.config.column
        encoded = ParquetFile(stream, metadata=table.metadata, read_dictionary=[column])
        for group in groups:
            first = next(encoded.iter_batches(1, [group], [column], use_threads=False), None)
            size = 0 if first is None else first.column(column).dictionary.nbytes
            if size > _MOST_DICTIONARY:
                reason = f"row group {group} has a dictionary of {size:,} bytes, and the limit is {_MOST_DICTIONARY:,}"
                raise self.unreadable(file, f"{reason}; {self.remedy_for_size}")
            rows = min(BATCH_ROWS, max(1, _AT_ONCE // max(1, size)))
            yield from table.iter_batches(rows, [group], [column], use_threads=False)

    @contextmanager
    def _table(self, file: File) -> Iterator[tuple[Any, BinaryIO]]:
        """Open a Parquet file until the end of the block. Yield its `pyarrow.parquet.ParquetFile` and its stream.
        Raises ConfigError if pyarrow or the column of text is missing, or if the file cannot be read."""
        try:
            import pyarrow  # noqa: F401 - optional, and slow to import
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise config_error((*self.key, "kind"), not_installed("pyarrow"), self.config.kind) from None
        with self.opened(file) as stream:
            try:
                with ParquetFile(stream) as table:
                    self.check_column(table.schema_arrow, file.name)
                    yield table, stream
            except ConfigError:
                raise
            except Exception as error:  # pyarrow raises many types of errors for damaged files
                found = one_line(str(error).partition("\n")[0] or type(error).__name__)
                reason = f"it is not a valid Parquet file ({found:.300}); copy or write it again"
                raise self.unreadable(file, reason) from None
