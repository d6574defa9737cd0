"""FSDP2's collectives, counted where FSDP2 calls them, and communication time that computation does not hide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from titan_launch.distributed.torch_private import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    collectives_watched,
    parameter_groups,
)
from titan_launch.plan.communication import Collectives, Traffic


class TrafficCount:
    """What has been communicated so far."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def take(self) -> Traffic:
        """What was communicated since the last call."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    def add(self, traffic: Traffic) -> None:
        """One more collective, or several."""
        self.traffic += traffic


@contextmanager
def count_collectives(model: nn.Module) -> Iterator[TrafficCount]:
    """Count what a wrapped model communicates on this rank until the end of the block; nothing is left on it then.

    Parameters that units gather, gradients that they reduce, and sharded gradients that replicas sum (HSDP) count, with
    the bytes of the buffers that `titan_launch.plan.communication.Traffic` names. What is exchanged along other axes
    (activations, keys and values) does not, nor do the target count, clipping, BatchNorm's statistics and metrics.
    Costs nothing beside the collectives; nothing waits for the device.
    """
    count = TrafficCount()

    def record(kind: str, output: Tensor, sent: Tensor) -> None:
        count.add(_traffic_of(kind, output, sent))

    with ExitStack() as stack:
        for group in parameter_groups(model):
            stack.enter_context(collectives_watched(group, record))
        yield count


def _traffic_of(kind: str, output: Tensor, sent: Tensor) -> Traffic:
    """Return one collective with the bytes of the larger of its buffers."""
    return {
        ALL_GATHER: Traffic(Collectives(all_gathers=1), all_gather_bytes=output.nbytes),
        REDUCE_SCATTER: Traffic(Collectives(reduce_scatters=1), reduce_scatter_bytes=sent.nbytes),
        ALL_REDUCE: Traffic(Collectives(all_reduces=1), all_reduce_bytes=output.nbytes),
    }[kind]


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
