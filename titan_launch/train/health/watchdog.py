"""Hang detection: each rank publishes its progress in the process group's store. After a hang, the watchdog logs the
ranks that are behind, and writes the stacks of all threads."""

from __future__ import annotations

import faulthandler
import json
import logging
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from titan_launch.config.sections.run import CommConfig
from titan_launch.core.errors import RunError
from titan_launch.core.process import FAILED, exit_immediately
from titan_launch.distributed.process_group import Ranks
from titan_launch.distributed.torch_private import default_store
from titan_launch.train.health.flight_recorder import FOLDER as FLIGHT_RECORDER
from titan_launch.train.health.flight_recorder import collectives_started, dump_flight_recorder, ranks_listed

_log = logging.getLogger(__name__)

FOLDER = "hangs"
"""Folder of the stacks, in the run folder."""

_CHECKS_PER_LIMIT = 20
_CHECK_INTERVAL_S = (0.05, 10.0)

_STDERR = 2
"""Standard error, as a file descriptor: faulthandler does not use Python's file objects."""

_TIMED_OUT = ("Timed out waiting", "wait timeout after", "operation timeout")
_CONNECTION_LOST = ("Connection closed by peer", "Connection reset by peer")
"""Texts in the messages of gloo's errors. Gloo raises RuntimeError, so only the message identifies an error of gloo.

NCCL raises errors in the training thread only with TORCH_NCCL_BLOCKING_WAIT=1. By default NCCL's watchdog thread aborts
the process, and `launch` reports the unfinished collective.
"""

TRAINING, VALIDATING = "forward, backward and update", "validating"
"""The phases in which the model runs."""

_STORE_TIMEOUT_S = 5
"""Timeout of the store in seconds."""

_FAILED_KEY = "titan_launch/failed"

T = TypeVar("T")


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
        # A client of the store serves one thread at a time, even while this thread waits. So each board has a client.
        self._store = default_store().clone()  # type: ignore[attr-defined]
        self._store.set_timeout(timedelta(seconds=_STORE_TIMEOUT_S))

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
            self._store.set(_FAILED_KEY, "")

    def has_failed(self) -> bool:
        """Return True if the run has failed on any rank. If the store is gone, return False."""
        with suppress(RuntimeError):
            return bool(self._store.check([_FAILED_KEY]))
        return False

    def _key(self, rank: int) -> str:
        return f"titan_launch/where/{rank}"


class Watchdog:
    """A thread that checks whether the main thread of this rank makes progress.

    with Watchdog(config.comm, ranks) as watchdog:
        watchdog.enter("loading data", step)
        ...

    Progress means that the main thread enters a phase, or starts a batch of a validation. Every rank publishes its
    progress in the process group's store several times within the limit (`comm.hang_seconds`). Slow phases (`is_slow`),
    and all phases before `end_warm_up`, have a longer limit if `comm.init_timeout_seconds` is above
    `comm.timeout_seconds`. Each hang is reported once. If the run has failed on another rank, a hanging rank ends its
    process. Without `with` there is no thread and no hang detection.
    """

    def __init__(self, config: CommConfig, ranks: Ranks):
        """Start in the phase "building the run"."""
        self._ranks = ranks
        self._limit_s = config.timeout_seconds / 2 if config.hang_seconds is None else float(config.hang_seconds)
        self._slow_factor = max(1.0, config.init_timeout_seconds / config.timeout_seconds)
        self.is_warm = False
        """True after `end_warm_up`."""

        self._folder: Path | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._board: ProgressBoard | None = None
        self._now = ProgressPoint(0, 0, "", 0.0, 0.0)
        self.enter("building the run", 0)

    def __enter__(self) -> Watchdog:
        if self._limit_s:
            self._board = ProgressBoard(self._ranks)  # after a failure the store may refuse new clients
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._closing.set()
            self._thread.join(_STORE_TIMEOUT_S)
            faulthandler.cancel_dump_traceback_later()

    def enter(self, phase: str, step: int, *, is_slow: bool = False) -> None:
        """Record that the main thread enters a phase of a step. `is_slow`: True gives the phase the limit of slow
        phases."""
        limit = self._limit_s * (self._slow_factor if is_slow or not self.is_warm else 1.0)
        self._now = ProgressPoint(self._now.sequence + 1, step, phase, time.monotonic(), limit)

    def each_validation_batch(self, batches: Iterable[T], step: int) -> Iterator[T]:
        """Yield the batches of a validation. Before each batch, enter a phase with the number of the batch."""
        for number, batch in enumerate(batches, start=1):
            self.enter(f"{VALIDATING}, batch {number}", step)
            yield batch

    def end_warm_up(self) -> None:
        """Use the limit of regular phases from now on. Call this method after the slow first steps."""
        self.is_warm = True

    def set_run_folder(self, run_folder: Path) -> None:
        """Write later stacks and flight records to the run folder. Stacks before this call go to standard error."""
        self._folder = run_folder

    @property
    def runs_model(self) -> bool:
        """True while the main thread runs steps or validations."""
        return self._now.phase.startswith((TRAINING, VALIDATING))

    def publish_failure(self) -> None:
        """Tell the other ranks that the run has failed, so that hanging ranks end. Stop hang detection on this
        rank, because this rank ends with its own error."""
        self._closing.set()
        if self._board is not None:
            self._board.publish_failure()

    def explain(self, error: BaseException) -> RunError | None:
        """Return the RunError for a timeout or a lost connection in a gloo collective; None for a different error.

        After a timeout, the RunError names the ranks that are behind. After a lost connection, it names these ranks
        only if this rank has waited for longer than the limit of its phase.
        """
        if not isinstance(error, RuntimeError):
            return None
        # The message begins with gloo's source location in brackets, and may end with advice.
        text = re.sub(r"^\[[^]]*\] ", "", str(error).partition("\n")[0]).partition(". This is typically caused by")[0]
        if any(words in text for words in _TIMED_OUT):
            key = "timeout_seconds" if self.is_warm else "init_timeout_seconds"
            return RunError(f"a collective took longer than comm.{key}: {text}\n{self._describe_hang()}")
        if any(words in text for words in _CONNECTION_LOST):
            reason = f"rank {self._ranks.rank} lost the connection to another rank, which has ended: {text}"
            return RunError(f"{reason}\n{self._describe_hang()}" if self._is_late(self._now) else reason)
        return None

    def _describe_hang(self) -> str:
        """Return a text that names the ranks that are behind. With a run folder, also write the flight record, and name
        the files with details. Without hang detection, only return a text that says so."""
        if self._board is None:
            return "comm.hang_seconds = 0 disables hang detection, so the rank that is behind is unknown"
        behind = ranks_behind(self._board, self._now)
        if self._folder is None:
            return behind
        dump_flight_recorder(self._folder)
        records = f"{self._folder / FOLDER} (stacks of all threads) and {self._folder / FLIGHT_RECORDER} (collectives)"
        return f"{behind}. See {records}"

    def _is_late(self, now: ProgressPoint) -> bool:
        return 0 < now.limit_s <= time.monotonic() - now.since

    def _watch(self) -> None:
        """Publish this rank's progress and check the limit, in the watchdog thread. If this rank hangs after the run
        has failed on another rank, end this process."""
        shortest, longest = _CHECK_INTERVAL_S
        pause = min(max(self._limit_s / _CHECKS_PER_LIMIT, shortest), longest)
        board = ProgressBoard(self._ranks)
        reported: ProgressPoint | None = None
        while True:
            is_closing = self._closing.wait(pause)
            now = self._now
            if reported is not None and now.sequence != reported.sequence:
                _log.info("this rank continues after a hang of %.0f s %s", now.since - reported.since, reported)
                reported = None
            if is_closing:
                return
            if reported is None:  # otherwise `_report` has published `now`
                board.publish(now)
            # If the main thread holds the GIL, this thread cannot run. The timer of faulthandler does not need the GIL.
            faulthandler.dump_traceback_later(now.limit_s + 2 * pause, file=_STDERR)
            if self._is_late(now) and board.has_failed() and not self._closing.is_set():
                _log.info("the run failed on another rank and this rank hangs %s, so this rank ends", now)
                exit_immediately(FAILED)  # torchrun would kill this rank only after 30 s
            if self._is_late(now) and reported is None:
                reported = now
                self._report(now, board, pause)

    def _report(self, now: ProgressPoint, board: ProgressBoard, pause: float) -> None:
        """Write the stacks and, with a run folder, the flight record. Log the ranks that are behind: at level WARNING
        on rank 0, and at level INFO on other ranks."""
        board.publish(_with_collectives(now))
        self._closing.wait(2 * pause)  # until the other ranks have published
        level = logging.WARNING if self._ranks.is_rank_0 else logging.INFO
        where = "standard error" if self._folder is None else self._folder / FOLDER
        behind = ranks_behind(board, self._now)
        _log.log(level, "no progress for %.0f s: %s; stacks of all threads: %s", now.limit_s, behind, where)
        if self._folder is None:
            faulthandler.dump_traceback(file=_STDERR)
        else:
            with suppress(OSError):
                path = self._folder / FOLDER / f"rank_{self._ranks.rank}.txt"
                path.parent.mkdir(exist_ok=True)
                with path.open("a", encoding="utf-8") as file:
                    file.write(
                        f"{time.strftime('%Y-%m-%d %H:%M:%S')}, {now} for {time.monotonic() - now.since:.0f} s:\n"
                    )
                    file.flush()
                    faulthandler.dump_traceback(file)
                    file.write("\n")
            dump_flight_recorder(self._folder)


def ranks_behind(board: ProgressBoard, now: ProgressPoint) -> str:
    """Publish `now`, the progress of this rank. Return a clause that names the ranks that are behind, or says that no
    rank is behind, or that the progress of other ranks is unknown."""
    own = _with_collectives(now)
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
    is_are, it = ("is", "it") if len(behind) == 1 else ("are", "they")
    if least.sequence < most.sequence:
        first = [rank for rank, point in enumerate(known) if point.sequence == most.sequence]
        while_first = f"while {ranks_listed(first)} {'is' if len(first) == 1 else 'are'} {most}"
        return f"{ranks_listed(behind)} {is_are} behind: {it} {is_are} {least} {while_first}"
    counts = f"{it} started {least.collectives} collectives, and other ranks up to {most.collectives}"
    return f"all ranks are {least}; {ranks_listed(behind)} {is_are} behind: {counts}"


def _with_collectives(point: ProgressPoint) -> ProgressPoint:
    """Return `point` with the number of started collectives, if it can be read."""
    try:
        return replace(point, collectives=collectives_started())
    except (RuntimeError, ValueError):  # the report of a hang must not raise another error
        return point
