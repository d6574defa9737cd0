"""Progress of each rank, published in the process group's store, and the ranks that are behind."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from titan_launch.distributed.process_group import Ranks
from titan_launch.distributed.torch_private import default_store
from titan_launch.train.health.flight_recorder import collectives_started, ranks_listed

STORE_TIMEOUT_S = 5
"""Timeout of the store in seconds."""

_FAILED = "titan_launch/failed"


@dataclass(frozen=True)
class ProgressPoint:
    """The progress of a rank: its step, its phase, and the start of the phase."""

    sequence: int
    """Number of phases that the rank has entered. All ranks enter the same phases, so the ranks with the lowest number
    are behind."""

    step: int
    phase: str
    since: float
    """Start of the phase by this rank's monotonic clock, in seconds. This number is not published, so it is 0 in the
    results of `ProgressBoard.read`."""

    limit_s: float
    """Seconds after which the phase counts as hanging; 0 disables hang detection. Like `since`, this number is not
    published."""

    collectives: int = 0
    """Number of collectives started, set only for a hanging rank."""

    @property
    def progress(self) -> tuple[int, int]:
        """The progress as a sort key. Ranks that are behind have a lower value."""
        return self.sequence, self.collectives

    def __str__(self) -> str:
        return f"in step {self.step} ({self.phase})"


class ProgressBoard:
    """Progress of all ranks in the process group's store."""

    def __init__(self, ranks: Ranks):
        self.rank, self._world_size = ranks.rank, ranks.world_size
        # A client of the store serves one thread at a time, even while the thread waits. So each board has its own.
        self._store = default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))

    def publish(self, point: ProgressPoint) -> None:
        """Publish this rank's progress. If the store is gone, do nothing, because the run then ends anyway."""
        fields = [point.sequence, point.step, point.phase, point.collectives]
        with suppress(RuntimeError):
            self._store.set(self._key(self.rank), json.dumps(fields))

    def read(self) -> list[ProgressPoint | None] | None:
        """Return the last progress of each rank, or None if the store is gone. The progress of a rank that has never
        published is None."""
        try:
            return [self._read(rank) for rank in range(self._world_size)]
        except RuntimeError:
            return None

    def _read(self, rank: int) -> ProgressPoint | None:
        if not self._store.check([self._key(rank)]):
            return None
        sequence, step, phase, collectives = json.loads(self._store.get(self._key(rank)))
        return ProgressPoint(sequence, step, phase, 0.0, 0.0, collectives)

    def publish_failure(self) -> None:
        """Publish that the run has failed on this rank."""
        with suppress(RuntimeError):
            self._store.set(_FAILED, "")

    def has_failed(self) -> bool:
        """Return True if the run has failed on any rank. If the store is gone, return False."""
        with suppress(RuntimeError):
            return bool(self._store.check([_FAILED]))
        return False

    def _key(self, rank: int) -> str:
        return f"titan_launch/where/{rank}"


def ranks_behind(board: ProgressBoard, now: ProgressPoint) -> str:
    """Publish `now`, the progress of this rank, and return a sentence that names the ranks that are behind."""
    own = with_collectives(now)
    board.publish(own)
    points = board.read()
    if points is None:
        return f"rank {board.rank} is {own}; the store with the progress of the other ranks is gone"
    missing = [rank for rank, point in enumerate(points) if point is None]
    if missing:
        return f"{ranks_listed(missing)} never reported progress; rank {board.rank} is {own}"
    known = [point for point in points if point is not None]
    least, most = (extreme(known, key=lambda point: point.progress) for extreme in (min, max))
    behind = [rank for rank, point in enumerate(known) if point.progress == least.progress]
    if len(behind) == len(known):
        return f"no rank is behind: all are {least}" if len(known) > 1 else f"the only rank is {least}"
    is_are, it_is = ("is", "it is") if len(behind) == 1 else ("are", "they are")
    if least.sequence < most.sequence:
        return f"{ranks_listed(behind)} {is_are} behind: {it_is} {least} while the others are {most}"
    counts = f"started {least.collectives} collectives, and other ranks up to {most.collectives}"
    return f"{ranks_listed(behind)} {is_are} behind: all are {least}, but {ranks_listed(behind)} {counts}"


def with_collectives(point: ProgressPoint) -> ProgressPoint:
    """Return `point` with the number of started collectives, if it can be read."""
    try:
        return replace(point, collectives=collectives_started())
    except (RuntimeError, ValueError):  # the report of a hang must not raise another error
        return point
