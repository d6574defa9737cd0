"""Parquet files. Each row is one document."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from titan_launch.config.sections.data import ParquetData
from titan_launch.core.errors import config_error
from titan_launch.data.corpora.base import Document, File, Part, Skipped
from titan_launch.data.corpora.files import FileCorpus
from titan_launch.data.corpora.records import BATCH_ROWS, ColumnCorpus


class ParquetCorpus(FileCorpus, ColumnCorpus):
    """The rows of the files that `path` names, as documents."""

    config: ParquetData
    remedy = "name files with rows of text"

    def parts(self) -> list[Part]:
        """Return ranges of each file's row groups."""
        return list(itertools.chain.from_iterable(map(self._ranges, self.files)))

    def documents(self, part: Part) -> Iterator[Document | Skipped]:
        """Yield the documents of a part. Raises ConfigError for a row that stops the run."""
        (file,), column = part.files, self.config.column
        with self._table(file) as table:
            first_row = sum(table.metadata.row_group(group).num_rows for group in range(part.start))
            groups = range(part.start, part.stop or 0)
            batches = table.iter_batches(BATCH_ROWS, groups, [column], use_threads=False)
            yield from self.rows(batches, (file.name, file.size), file.name, first_row)

    @contextmanager
    def _table(self, file: File) -> Iterator[Any]:
        """Open a `pyarrow.parquet.ParquetFile` that has the column. Raises ConfigError."""
        try:
            from pyarrow import ArrowException  # optional, and slow to import
            from pyarrow.parquet import ParquetFile
        except ImportError:
            reason = "needs the package pyarrow, which is not installed: pip install 'titan-launch[parquet]'"
            raise config_error((*self.key, "kind"), reason, self.config.kind) from None
        with self.opened(file) as stream:
            try:
                with ParquetFile(stream) as table:
                    self.check_column(table.schema_arrow, file.name)
                    yield table
            except ArrowException as error:
                reason = f"it is not a valid Parquet file ({str(error).partition(chr(10))[0]}); copy or write it again"
                raise self.unreadable(file, reason) from None

    def _ranges(self, file: File) -> list[Part]:
        """Return ranges of row groups with about `part_bytes` bytes of the column."""
        parts, start, size = [], 0, 0
        with self._table(file) as table:
            last, column = table.num_row_groups - 1, table.schema_arrow.names.index(self.config.column)
            for group in range(table.num_row_groups):
                size += table.metadata.row_group(group).column(column).total_uncompressed_size
                if size >= self.part_bytes or group == last:
                    parts.append(Part((file,), size, start, group + 1))
                    start, size = group + 1, 0
        return parts
