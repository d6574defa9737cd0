"""What ranks agree on after each step: signals that ask the run to end, and checkpoints that are due by the clock."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from titan_launch.core.process import exit_immediately, is_announced
from titan_launch.core.signals import AGENT_PID, RESTART_SIGNAL, STOP_SIGNALS, is_orphan, signal_name, signals_handled

_log = logging.getLogger(__name__)

_AGENT_POLL_S = 0.5


class StopRequest:
    """A signal that has arrived on this rank."""

    def __init__(self) -> None:
        self.signal = 0
        """The number of the signal, or 0."""

        self._is_built = threading.Event()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals until the end of the block: the first asks the run to end after its step, and a later one ends
        this process at once, with 128 + its number.

        Until the run is built, nothing can be saved, and a rank may wait for ranks that will never come. So this
        process ends at once when its agent has ended, and when SIGTERM comes after a rank of this host has failed.
        """
        with signals_handled(self._on_signal, (*STOP_SIGNALS, RESTART_SIGNAL)):
            if AGENT_PID in os.environ:
                threading.Thread(target=self._watch_agent, name="agent-watch", daemon=True).start()
            yield

    def mark_run_built(self) -> None:
        """Have a signal end the run after its step from now on."""
        self._is_built.set()

    def _watch_agent(self) -> None:
        while not self._is_built.wait(_AGENT_POLL_S):
            if is_orphan():
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    os.write(2, b"error: the process that started the ranks has ended before the first step\n")
                exit_immediately(128 + signal.SIGTERM)

    def _on_signal(self, number: int, is_repeated: bool) -> None:
        name = signal_name(number)
        if not is_repeated:
            self.signal = number
            if number == RESTART_SIGNAL:
                _log.info("a new host joined: all ranks end after this step and are restarted with it")
            elif number != signal.SIGTERM or not is_announced():  # the agent's SIGTERM after a failure is not news
                _log.info("%s: the run ends after this step; a second signal ends it at once", name)
            elif not self._is_built.is_set():
                exit_immediately(128 + number)
            return
        if os.environ.get("RANK", "0") == "0":  # not by print: the main thread may hold the stream's lock for ever
            os.write(2, f"error: ended at once by a second signal, {name}\n".encode())
        exit_immediately(128 + number)


class StepCoordinator:
    """Asks, after every step, what no rank may decide alone: whether to save now, and whether to stop.

    One all-reduce of two numbers, on the host: it waits for the other hosts, not for the devices. The default group has
    gloo for tensors on the CPU, beside NCCL.
    """

    def __init__(self, stop: StopRequest, interval_minutes: float | None, clock: Callable[[], float] = time.monotonic):
        """`interval_minutes`: how often a checkpoint is due by the clock, or None where it is not."""
        self._stop = stop
        self._interval_s = None if interval_minutes is None else interval_minutes * 60
        self._clock = clock
        self._last_save = clock()
        self.stop_signal = 0
        """The signal that ends the run after this step, or 0."""

        self.save_is_due = False
        """Whether the time between two checkpoints is over on any rank."""

    def agree(self) -> None:
        """Bring `stop_signal` and `save_is_due` up to date, the same on all ranks; collective."""
        waited = self._clock() - self._last_save
        is_due = self._interval_s is not None and waited >= self._interval_s
        flags = torch.tensor([self._stop.signal, int(is_due)], dtype=torch.int64)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        self.stop_signal, due = flags.tolist()
        self.save_is_due = bool(due)

    def saved(self) -> None:
        """A checkpoint was begun: the time to the next one starts."""
        self._last_save = self._clock()
        self.save_is_due = False
