"""The parts of a step's time: which part the device, or on a CPU the host, works on at every moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch.profiler import record_function

_OTHER = "other"


class Parts(Protocol):
    """Something that counts time by part."""

    def part(self, name: str) -> AbstractContextManager[None]:
        """Count the time of a block under a part. Inside of another part, the time counts only under the inner one."""

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Name a block, such as a microbatch, in a profile."""


class Uncounted:
    """Counts nothing: the parts of a traced step."""

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that does nothing."""
        return nullcontext()

    def part(self, name: str) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()


UNCOUNTED = Uncounted()


class Timeline:
    """The time of a rank, divided into parts. A moment belongs to the innermost part that it lies in, so the parts add
    up to the whole time.

    On CUDA an event in the current stream marks each change of parts. A part is then the time that the stream spends
    on it, with the time in which the stream waits: for data, or for a collective. Nothing waits for the device until
    `take`. An event costs about a microsecond.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter):
        self._on_cuda = device.type == "cuda"
        self._clock = clock
        self._part = _OTHER
        self.failed_part: str | None = None
        """The innermost part that an error has left; None without an error."""

        self.is_profiled = False
        """True while a profile is made, in which the blocks have names."""

        self._is_whole = False
        """True in a block whose inner parts do not count."""

        self.last_unit = ""
        """The path of the FSDP2 unit that was used last."""

        self._marks: list[tuple[Any, str]] = []
        """The moments at which parts began, with their names: events, or times of the host's clock."""

        self._unused: list[Any] = []
        self._mark()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time of the block under a part. Backward may call this method in a thread of autograd, while the
        thread of the step waits."""
        before = self._part
        self._enter(name)
        try:
            with self.named(name):
                yield
        except BaseException:
            self.failed_part = self.failed_part or name
            raise
        finally:
            self._enter(before)

    @contextmanager
    def whole(self, name: str) -> Iterator[None]:
        """Count the time of the block under a part, with the time of all parts inside of it."""
        with self.part(name):
            self._is_whole = True
            try:
                yield
            finally:
                self._is_whole = False

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Name a block in a profile, if one is made."""
        return record_function(name) if self.is_profiled else nullcontext()

    def _enter(self, name: str) -> None:
        if name != self._part and not self._is_whole:
            self._part = name
            self._mark()

    def _mark(self) -> None:
        if not self._on_cuda:
            self._marks.append((self._clock(), self._part))
            return
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((event, self._part))

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
