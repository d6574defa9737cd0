"""Streams: samples that can only be read in order.

Each data-parallel rank reads its own part of a stream. At the end of its part, a rank starts again from the beginning
of the part. The order of the samples therefore depends on the number of data-parallel ranks. A reader has a state that
JSON can represent. A checkpoint saves the state of each rank's reader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, Protocol

import numpy as np
import torch

from titan_launch.config.sections.data import HuggingFaceData
from titan_launch.core.errors import ConfigError, UserError, config_error, listed
from titan_launch.data.chat_rendering import RecordError
from titan_launch.data.corpora.huggingface import HuggingFaceCorpus, load_rows
from titan_launch.data.corpora.interface import in_split
from titan_launch.data.sources.interface import Sample, SourceContext

_log = logging.getLogger(__name__)

_MORE = "use fewer data-parallel ranks, or name more data"

State = dict[str, Any]
"""The state of a reader: values that JSON can represent."""


class Reader(Iterator[Sample], Protocol):
    """An endless iterator over the samples of one part of a stream."""

    def state_dict(self) -> State:
        """Return the position after the last sample."""

    def load_state_dict(self, state: State) -> None:
        """Continue after the position in `state`, which `state_dict` returned."""


class StreamSource:
    """A stream as a data source. Its `len` is 2^62, which is more than any run reads. Only the first sample can be read
    by index."""

    def __init__(self, open_part: Callable[[int, int], Reader], first: Sample, num_classes: int, description: str):
        """`open_part(part, parts)` returns a reader of one of `parts` parts; `part` counts from 0. `first`: the first
        sample of the stream."""
        self.open_part, self._first, self.num_classes = open_part, first, num_classes
        self._description = description

    def __len__(self) -> int:
        return 1 << 62

    def __getitem__(self, index: int) -> Sample:
        """Return the first sample, which shows the form of all samples. `index` must be 0."""
        if index:
            raise IndexError(index)
        return self._first

    def describe(self) -> str:
        return f"stream of {self._description}; its order depends on the number of data-parallel ranks"

    def fingerprint(self, seed: int) -> None:
        """Return None: a stream cannot be read twice for a comparison."""


class _Cursor:
    """An endless iterator over the items of an iterable. After the last item, the iterable is opened again. Raises
    UserError for an iterable without items."""

    def __init__(self, open_stream: Callable[[], Any]):
        self._open = open_stream
        self._begin()
        self.epoch = 0
        self.count = 0
        """Number of items read in this epoch."""

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            if not self.count:
                raise UserError(f"the stream of the training data has no samples for this rank; {_MORE}") from None
            self.epoch, self.count = self.epoch + 1, 0
            self._begin()
            return next(self)
        self.count += 1
        return item

    def state_dict(self) -> State:
        """Return the position. It includes the state of the iterable, if the iterable has a `state_dict`."""
        stream = self._stream.state_dict() if hasattr(self._stream, "state_dict") else None
        return {"epoch": self.epoch, "count": self.count, "stream": stream}

    def load_state_dict(self, state: State) -> None:
        """Continue after the position in `state`. If the iterable has no state, read and drop the items before the
        position."""
        self.epoch, self.count = state["epoch"], state["count"]
        self._begin(state["stream"])
        if state["stream"] is None and self.count:
            _log.info("stream: reading %d items again to continue, because the stream has no state_dict", self.count)
            next(islice(self._items, self.count - 1, None), None)

    def _begin(self, state: State | None = None) -> None:
        stream: Any = self._open()
        if state is not None:
            stream.load_state_dict(state)
        self._stream, self._items = stream, iter(stream)


class SampleReader(Iterator[Sample]):
    """Reader of one part of a stream of samples. Part k of n has the samples k, k + n, k + 2n, ... of the stream."""

    def __init__(self, open_stream: Callable[[], Any], check: Callable[[Any, str], Sample], part: int, parts: int):
        """`check(sample, where)` returns the sample, or raises an error. `where`: name of the sample in the error."""
        self._cursor, self._check, self._part, self._parts = _Cursor(open_stream), check, part, parts
        self.state_dict, self.load_state_dict = self._cursor.state_dict, self._cursor.load_state_dict

    def __next__(self) -> Sample:
        start = self._cursor.epoch
        while True:
            sample = next(self._cursor)
            index = self._cursor.count - 1
            if index % self._parts == self._part:
                return self._check(sample, f"sample {index} of the stream")
            if self._cursor.epoch > start + 1:
                reason = f"fewer samples than the {self._parts} ranks need"
                raise UserError(f"the stream of the training data has {reason}; {_MORE}")


class TextReader(Iterator[Sample]):
    """Reader of one part of a stream of text rows. The tokens of the rows are concatenated and cut into samples."""

    def __init__(self, corpus: HuggingFaceCorpus, seq_len: int, part: int, parts: int):
        self._corpus, self._seq_len = corpus, seq_len
        self._cursor = _Cursor(lambda: _part_of_rows(corpus, part, parts))
        self._tokens = np.zeros(0, np.int64)
        """Tokens of rows that were read, but are not yet in a sample."""

    def __next__(self) -> Sample:
        parts, size = [self._tokens], len(self._tokens)
        while size <= self._seq_len:
            document = self._next_document()
            parts.append(document)
            size += len(document)
        tokens = np.concatenate(parts)
        self._tokens = tokens[self._seq_len :]
        window = torch.from_numpy(tokens[: self._seq_len + 1])
        return window[:-1], window[1:]

    def state_dict(self) -> State:
        return {"rows": self._cursor.state_dict(), "tokens": self._tokens.tolist()}

    def load_state_dict(self, state: State) -> None:
        self._cursor.load_state_dict(state["rows"])
        self._tokens = np.array(state["tokens"], np.int64)

    def _next_document(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the tokens of the next usable row that belongs to the split. Raises ConfigError for a row that stops
        the run, and UserError if no row is usable."""
        corpus, start = self._corpus, self._cursor.epoch
        while True:
            row = next(self._cursor)
            if self._cursor.epoch > start + 1:
                raise UserError(f"the stream of the training data has no usable rows for this rank; {_MORE}")
            where = f"row {self._cursor.count - 1} of this rank"
            try:
                content = corpus.content(_text(row, corpus), "column")
            except RecordError as error:
                skipped = corpus.failed(error, where)
                _log.debug("skipped: %s is %s", skipped.name, skipped.reason)
                continue
            if in_split(content, corpus.config):
                return corpus.encode([content])[0].tokens.astype(np.int64)


def build_text_stream(config: HuggingFaceData, context: SourceContext) -> StreamSource:
    """Build the stream of a data set of Hugging Face. Raises ConfigError for data that cannot be read."""
    corpus = HuggingFaceCorpus(config, context.tokenizer, context.key, context.seq_len)

    def open_part(part: int, parts: int) -> Reader:
        return TextReader(corpus, context.seq_len, part, parts)

    try:
        first = next(open_part(0, 1))
    except ConfigError:
        raise
    except UserError:
        reason = "the stream has no rows with text in this split; name other data, or another split"
        raise config_error((*context.key, "path"), reason, config.path) from None
    description = f"{config.path}, sequences of {context.seq_len} tokens"
    return StreamSource(open_part, first, context.tokenizer.vocab_size, description)


def _part_of_rows(corpus: HuggingFaceCorpus, part: int, parts: int) -> Any:
    from datasets.distributed import split_dataset_by_node  # `load_rows` has reported a missing package

    rows = load_rows(corpus.config, corpus.key, streaming=True)
    if rows.features is not None:
        corpus.check_column(rows.features.arrow_schema, corpus.config.path)
        rows = rows.select_columns([corpus.config.column])
    return split_dataset_by_node(rows, rank=part, world_size=parts)


def _text(row: dict[str, Any], corpus: HuggingFaceCorpus) -> Any:
    column = corpus.config.column
    if column not in row:
        reason = f"is not a column of {corpus.config.path}; its columns are {listed(list(row), most=12)}"
        raise config_error((*corpus.key, "column"), reason, column)
    return row[column]
