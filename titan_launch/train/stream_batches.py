"""Training batches of a stream, and their position in checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from titan_launch.checkpoint.state import SizedPart, Values
from titan_launch.core.errors import RunError, config_error
from titan_launch.core.json_files import parse_json
from titan_launch.data.loader import StreamLoader, Workers
from titan_launch.data.sources import Batch, StreamSource
from titan_launch.parallel.context_parallel import SequencePart, part_of_batch
from titan_launch.plan.layout import Layout

_MOST_VALUES = 20_000_000
"""Largest number of values in the state of a stream. The state may hold the samples of a shuffle buffer."""


class StreamBatches(SizedPart):
    """An endless iterator over this rank's microbatches of a stream, and a part of the training state.

    The state is that of torchdata's loader: plain data, saved as JSON for each data-parallel rank. A resume needs the
    same numbers of data-parallel ranks and of workers. Ranks of tensor, context or pipeline parallelism that read the
    same data have the same state.
    """

    def __init__(self, source: StreamSource, layout: Layout, dp_rank: int, part: SequencePart | None, workers: Workers):
        """`part`: this rank's part of the tokens of every sequence; None without context parallelism."""
        self._loader = StreamLoader(source, dp_rank, layout.data_parallel, layout.local_batch_size, workers)
        self._division = f"{layout.data_parallel} data-parallel ranks with {workers.number} workers"
        self._key = f"{layout.data_parallel}x{workers.number}.{dp_rank}"
        self._part = part
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self._loader)
        return part_of_batch(next(self._batches), self._part)

    def close(self) -> None:
        """End the data workers."""
        self._loader.close()

    def state_dict(self) -> Values:
        """Return the position after the last batch. Raises RunError if the position is not plain data."""
        try:
            text = json.dumps(self._loader.state_dict(), allow_nan=False)
        except (TypeError, ValueError) as error:
            reason = "the state_dict of the stream must consist of dicts, lists, strings, finite numbers and None"
            raise RunError(f"{reason}: {error}") from None
        return {self._key: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def targets(self, shapes: Mapping[str, tuple[int, ...]]) -> Values:
        """Return tensors into which a checkpoint with these shapes is read. Raises ConfigError if the checkpoint has
        the positions of another number of data-parallel ranks or workers."""
        if shapes and self._key not in shapes:
            saved, _, workers = next(iter(shapes)).partition(".")[0].partition("x")
            raise config_error(
                ("data", "kind"),
                f"the checkpoint has the positions of a stream on {saved} data-parallel ranks with {workers} workers, "
                f"which {self._division} cannot continue; resume with the same numbers, or load a step "
                "(--checkpoint.load=1000) and begin the stream again with "
                "--checkpoint.exclude_from_loading='[\"data\"]'",
            )
        return {key: torch.empty(shape, dtype=torch.uint8) for key, shape in shapes.items() if key == self._key}

    def load_state_dict(self, state: Values) -> None:
        """Continue after a saved position. If the iterator has already started, as after a rollback, the position is
        ignored, because a stream cannot go back. Raises ValueError for a position that is not a JSON object."""
        if self._key in state and self._batches is None:
            saved: Any = parse_json(state[self._key].numpy().tobytes(), _MOST_VALUES)
            if not isinstance(saved, dict):
                raise ValueError("the position in the stream is not a JSON object")
            self._loader.load_state_dict(saved)
