"""Where each rank of a run is, told through the process group's store, and so which of them are behind."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from titan_launch.distributed.process_group import Ranks
from titan_launch.distributed.torch_private import default_store
from titan_launch.train.health.flight_recorder import collectives_started
from titan_launch.train.health.flight_records import ranks_listed

STORE_TIMEOUT_S = 5
"""How long the store may take."""

_FAILED = "titan_launch/failed"


@dataclass(frozen=True)
class ProgressPoint:
    """Where a rank is."""

    sequence: int
    """How often it has entered a phase. All ranks go through the same phases, so whoever has the least is behind."""

    step: int
    phase: str
    since: float
    """When it entered it, by this rank's monotonic clock."""

    limit_s: float
    """How long the phase may last."""

    collectives: int = 0
    """Collectives that it has begun, where it hangs and that is known."""

    @property
    def progress(self) -> tuple[int, int]:
        """Grows with everything that all ranks do."""
        return self.sequence, self.collectives

    def __str__(self) -> str:
        return f"in step {self.step} ({self.phase})"


class ProgressBoard:
    """Where ranks read of each other where they are: the process group's store."""

    def __init__(self, ranks: Ranks):
        self.rank, self._world_size = ranks.rank, ranks.world_size
        # A client of its own: one that waits for an answer makes another thread wait.
        self._store = default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=STORE_TIMEOUT_S))

    def publish(self, point: ProgressPoint) -> None:
        """Tell where this rank is. Where the store is gone, the run is about to end for that reason."""
        fields = [point.sequence, point.step, point.phase, point.collectives]
        with suppress(RuntimeError):
            self._store.set(self._key(self.rank), json.dumps(fields))

    def read(self) -> list[ProgressPoint | None] | None:
        """Where each rank was last; None for one that never told, or for all where the store is gone."""
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
        """The run has failed on this rank."""
        with suppress(RuntimeError):
            self._store.set(_FAILED, "")

    def has_failed(self) -> bool:
        """Whether it has on any rank, as far as the store can be asked."""
        with suppress(RuntimeError):
            return bool(self._store.check([_FAILED]))
        return False

    def _key(self, rank: int) -> str:
        return f"titan_launch/where/{rank}"


def ranks_behind(board: ProgressBoard, now: ProgressPoint) -> str:
    """A sentence that names the ranks that have come least far. `now`: where this one is."""
    own = with_collectives(now)
    board.publish(own)
    points = board.read()
    if points is None:
        return f"rank {board.rank} is {own}; where the others are cannot be read any more"
    missing = [rank for rank, point in enumerate(points) if point is None]
    if missing:
        return f"nothing was ever heard of {ranks_listed(missing)}; rank {board.rank} is {own}"
    known = [point for point in points if point is not None]
    least, most = (extreme(known, key=lambda point: point.progress) for extreme in (min, max))
    behind = [rank for rank, point in enumerate(known) if point.progress == least.progress]
    if len(behind) == len(known):
        return f"no rank is behind: all are {least}" if len(known) > 1 else f"the only rank is {least}"
    is_are, it_is = ("is", "it is") if len(behind) == 1 else ("are", "they are")
    if least.sequence < most.sequence:
        return f"{ranks_listed(behind)} {is_are} behind: {it_is} {least} while the others are {most}"
    counts = f"has begun {least.collectives} collectives there, and others {most.collectives}"
    return f"{ranks_listed(behind)} {is_are} behind: all are {least}, but {ranks_listed(behind)} {counts}"


def with_collectives(point: ProgressPoint) -> ProgressPoint:
    """With the number of collectives."""
    try:
        return replace(point, collectives=collectives_started())
    except (RuntimeError, ValueError):  # an account of what has gone wrong, which must not go wrong itself
        return point
