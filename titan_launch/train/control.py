"""What all ranks do after a step, where only some of them know."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from titan_launch.train.signals import StopRequest


class Control:
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
