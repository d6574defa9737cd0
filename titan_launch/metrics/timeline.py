"""The parts of a step's time: which part the device, or on a CPU the host, works on at every moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import record_function

OTHER = "other"
"""The part of the time that belongs to no other part."""


class Parts:
    """Something that counts time by part. This base class counts nothing: the parts of a traced step."""

    def begin(self, part: str) -> None:
        """Count the time from now on under a part, until the next call."""

    def group(self, name: str) -> None:
        """Name the following parts together in a profile, such as those of a microbatch, until the next call. "" names
        nothing."""


UNCOUNTED = Parts()


class Timeline(Parts):
    """The time of a rank, divided into parts. A moment belongs to the innermost part that it lies in, so the parts add
    up to the whole time.

    On CUDA an event in the current stream marks each change of parts. A part is then the time that the stream spends
    on it, with the time in which the stream waits: for data, or for a collective. Nothing waits for the device until
    `take`. An event costs about a microsecond.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self.device = device
        self.clock = clock
        self._on_cuda = device.type == "cuda"
        self.part = OTHER
        """The present part. After an error it is the part that the error has left."""

        self.is_profiled = False
        """True while a profile is made, in which the blocks have names."""

        self._group_range: AbstractContextManager[Any] = nullcontext()
        self._part_range: AbstractContextManager[Any] = nullcontext()
        self._is_whole = False
        """True in a block whose inner parts do not count."""

        self.last_unit = ""
        """The path of the FSDP2 unit that was used last."""

        self._marks: list[tuple[Any, str]] = []
        """The moments at which parts began, with their names: events, or times of the host's clock."""

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
        """Count the time of the block under a part, and then again under the part around it. Backward may call this
        method in a thread of autograd, while the thread of the step waits."""
        before = self.part
        self._enter(part)
        with self._named(part):
            yield
        self._enter(before)

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Count the time of the block under a part, with the time of all parts inside of it."""
        with self.inner(name):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    def _named(self, name: str) -> AbstractContextManager[Any]:
        return record_function(name) if name and self.is_profiled else nullcontext()

    def _renamed(self, before: AbstractContextManager[Any], name: str) -> AbstractContextManager[Any]:
        """End a range of a profile and begin the next one. Return it."""
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
        """Return the seconds of each part since the last call, and begin anew.

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
