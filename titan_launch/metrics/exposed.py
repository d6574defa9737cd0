"""Communication that computation does not hide, from the kernels of a profiled step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


class Kernel(NamedTuple):
    """One kernel, from when to when it ran on the device, in nanoseconds."""

    name: str
    start: int
    end: int

    @property
    def communicates(self) -> bool:
        """Whether it is one of NCCL's."""
        return self.name.startswith(("ncclDevKernel", "ncclKernel"))


@dataclass
class ExposedTime:
    """What was found."""

    seconds: float = 0.0


@contextmanager
def profile_exposed_time(device: torch.device) -> Iterator[ExposedTime]:
    """Profile what runs on a CUDA device until the end of the block, and wait for it there."""
    found = ExposedTime()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield found
        torch.cuda.synchronize(device)
    results = profiler.profiler
    assert results is not None and results.kineto_results is not None, "it has run"
    found.seconds = exposed_seconds(
        Kernel(event.name(), event.start_ns(), event.end_ns())
        for event in results.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    )


def exposed_seconds(kernels: Iterable[Kernel]) -> float:
    """How long a kernel of NCCL ran and no other one did."""
    every = list(kernels)
    computation = [kernel for kernel in every if not kernel.communicates]
    return (_busy_ns(every) - _busy_ns(computation)) / 1e9


def _busy_ns(kernels: Iterable[Kernel]) -> int:
    """How long at least one of them ran."""
    busy, reached = 0, 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0, kernel.end - max(kernel.start, reached))
        reached = max(reached, kernel.end)
    return busy
