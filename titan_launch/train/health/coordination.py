"""The decisions of all ranks after each step: whether to stop, and whether to save a checkpoint."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from titan_launch.core.process import exit_immediately, is_announced
from titan_launch.core.signals import (
    AGENT_PID,
    RESTART_SIGNAL,
    SAME_REQUEST_S,
    STOP_SIGNALS,
    is_orphan,
    signal_name,
    signals_handled,
)

_log = logging.getLogger(__name__)


class StopRequest:
    """The signals that ask this rank to end the run."""

    def __init__(self) -> None:
        self.signal = 0
        """Number of the first stop signal. Before a stop signal arrives: RESTART_SIGNAL if it has arrived, else 0."""

        self._is_built = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals until the end of the block. The first signal ends the run after its current step. A second
        stop signal, SAME_REQUEST_S seconds after the first or later, ends this process at once, with status 128 + the
        signal number. RESTART_SIGNAL never ends this process at once, and does nothing after a stop signal.

        Before `mark_run_built` the process also ends at once in two cases: its agent (`launch` or torchrun) ends, or
        SIGTERM arrives after a rank of this host has failed. Nothing can be saved yet, and this rank may be waiting for
        ranks that never start.
        """
        with signals_handled(self._on_signal, (*STOP_SIGNALS, RESTART_SIGNAL)):
            if AGENT_PID in os.environ:
                threading.Thread(target=self._watch_agent, name="agent-watch", daemon=True).start()
            yield

    def mark_run_built(self) -> None:
        """From now on, do not end the process at once if its agent ends, or if SIGTERM arrives after a rank has
        failed."""
        self._is_built.set()

    def _watch_agent(self) -> None:
        while not self._is_built.wait(0.5):  # seconds between two checks
            if is_orphan():
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    os.write(2, b"error: the process that started the ranks has ended before the first step\n")
                exit_immediately(128 + signal.SIGTERM)

    def _on_signal(self, number: int, is_repeated: bool) -> None:
        if number == RESTART_SIGNAL and (self.signal or is_repeated):
            return
        name = signal_name(number)
        if not is_repeated:
            self.signal = number
            if number == RESTART_SIGNAL:
                _log.info("a new host joined: all ranks will restart after this step")
            # After the failure of another rank, SIGTERM is not logged.
            elif number != signal.SIGTERM or not is_announced():
                end = "after this step" if self._is_built.is_set() else "when it is built, before its next step"
                second = f"a second signal, {SAME_REQUEST_S:g} s later or more, ends it at once"
                _log.info("%s: the run ends %s; %s", name, end, second)
            elif not self._is_built.is_set():
                exit_immediately(128 + number)
            return
        if os.environ.get("RANK", "0") == "0":  # os.write, because the main thread may hold the lock of sys.stderr
            lost = "steps after the last complete checkpoint are lost"
            os.write(2, f"error: a second signal ({name}) ended the run at once; {lost}\n".encode())
        exit_immediately(128 + number)


class StepCoordinator:
    """The decisions whether to stop and whether to save a checkpoint, equal on all ranks. After every step, gloo
    all-reduces three integers in a CPU tensor, so the host does not wait for the device."""

    def __init__(self, stop: StopRequest, interval_minutes: float | None, clock: Callable[[], float] = time.monotonic):
        """`interval_minutes`: minutes between two checkpoints; None disables checkpoints by time."""
        self._stop = stop
        self._interval_s = None if interval_minutes is None else interval_minutes * 60
        self._clock = clock
        self._last_save = clock()
        self.stop_signal = 0
        """Number of the signal that ends the run after this step, or 0. If ranks received different signals, this is
        the largest number of a stop signal. It is RESTART_SIGNAL only if no rank received a stop signal."""

        self.save_is_due = False
        """True if `checkpoint.interval_minutes` have passed on any rank since the last save."""

    def agree(self) -> None:
        """Update `stop_signal` and `save_is_due`, equal on all ranks. Collective."""
        import torch  # the command line uses StopRequest before torch is imported
        import torch.distributed as dist

        waited = self._clock() - self._last_save
        is_due = self._interval_s is not None and waited >= self._interval_s
        own = self._stop.signal
        of_kinds = (0, own) if own == RESTART_SIGNAL else (own, 0)
        flags = torch.tensor([*of_kinds, int(is_due)], dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        stop, restart, due = flags.tolist()
        self.stop_signal = stop or restart
        self.save_is_due = bool(due)

    def saved(self) -> None:
        """Restart the interval between two checkpoints. Call this method after a save has begun."""
        self._last_save = self._clock()
        self.save_is_due = False
