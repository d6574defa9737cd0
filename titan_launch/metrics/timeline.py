"""Times of the parts of a step, such as `forward` and `communication`. On a CPU, the host's clock measures them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import record_function

from titan_launch.metrics.tags import OTHER


class StepClock:
    """Interface of a clock that counts the time of each part of a step, such as `forward`. This base class counts
    nothing; traced steps use it."""

    def begin(self, part: str) -> None:
        """Count time under a part, from now until the next call."""

    def group(self, name: str) -> None:
        """In profiles, put all parts until the next call into a range called `name`, such as that of a microbatch. The
        name "" begins no range."""


UNCOUNTED = StepClock()


class Timeline(StepClock):
    """The time of a rank, divided into parts. A moment belongs to the innermost part that it lies in, so the parts add
    up to the whole time.

    On CUDA an event in the current stream marks each change of parts. The time of a part is then a time of the stream.
    It includes waits of the stream for data or for a collective. The host waits for the device only in `take`. An event
    costs about a microsecond.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self.device = device
        self.clock = clock
        self._on_cuda = device.type == "cuda"
        self.part = OTHER
        """The part under which time counts now. After an error, it is the part in which the error occurred."""

        self.is_profiled = False
        """True while a profile is recorded. Only then do parts and groups enter named ranges of the profiler."""

        self._group_range: AbstractContextManager[Any] = nullcontext()
        self._part_range: AbstractContextManager[Any] = nullcontext()
        self._is_whole = False
        """True while a `with` block of `whole` runs. Changes of the part then do not count."""

        self.last_unit = ""
        """The path of the FSDP2 unit that was used last."""

        self._marks: list[tuple[Any, str]] = []
        """(moment, name) for each part that has begun. A moment is a CUDA event, or a time of the host's clock."""

        self._unused: list[Any] = []
        self._mark()

    def begin(self, part: str) -> None:
        self._enter(part)
        self._part_range = self._renamed(self._part_range, "" if part == OTHER else part)

    def group(self, name: str) -> None:
        self._part_range = self._renamed(self._part_range, "")
        self._group_range = self._renamed(self._group_range, name)

    @contextmanager
    def inner(self, part: str) -> Iterator[None]:
        """Count the time of the `with` block under a part. After the block, time counts under the previous part again.
        Backward may call this method in a thread of autograd, while the thread of the step waits."""
        before = self.part
        self._enter(part)
        with self._named(part):
            yield
        self._enter(before)

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Count the whole time of the `with` block under one part, even if the block begins other parts."""
        with self.inner(name):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    def _named(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name) if name and self.is_profiled else nullcontext()

    def _renamed(self, before: AbstractContextManager[Any], name: str) -> AbstractContextManager[Any]:
        """End the range `before` of a profile, and begin and return a range called `name`."""
        before.__exit__(None, None, None)
        after = self._named(name)
        after.__enter__()
        return after

    def _enter(self, part: str) -> None:
        if part != self.part and not self._is_whole:
            self.part = part
            self._mark()

    def _mark(self) -> None:
        if not self._on_cuda:
            self._marks.append((self.clock(), self.part))
            return
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, self.part))

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, and start again from zero.

        On CUDA the host waits for the device.
        """
        self._mark()
        marks, self._marks = self._marks, self._marks[-1:]
        if self._on_cuda:
            marks[-1][0].synchronize()
        seconds: dict[str, float] = {}
        for (start, name), (end, _) in pairwise(marks):
            elapsed = start.elapsed_time(end) / 1000 if self._on_cuda else end - start
            seconds[name] = seconds.get(name, 0.0) + elapsed
        if self._on_cuda:
            self._unused += [event for event, _ in marks[:-1]]
        return seconds
