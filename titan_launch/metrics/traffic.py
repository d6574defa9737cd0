"""Counts of FSDP2's collectives, and exposed communication time (communication without computation)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from titan_launch.config.axes import EXPERT
from titan_launch.distributed.torch_private import (
    ALL_GATHER,
    ALL_REDUCE,
    REDUCE_SCATTER,
    CollectiveCallback,
    collectives_watched,
    communication_wrapped,
    parameter_groups,
    sharded_parameters,
)
from titan_launch.metrics.timeline import Timeline
from titan_launch.plan.communication import Collectives, Traffic


class TrafficCount:
    """Counter of this rank's collectives and their bytes. It starts at 0, and `take` resets it to 0."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def take(self) -> Traffic:
        """Return the traffic since the last call, and reset the counter."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    def add(self, traffic: Traffic) -> None:
        self.traffic += traffic


@contextmanager
def count_collectives(
    *models: nn.Module, watch_replicas: Callable[[CollectiveCallback], AbstractContextManager[None]] | None = None
) -> Iterator[TrafficCount]:
    """Count the collectives of models that FSDP2 wraps, on this rank, until the `with` block ends. Yield the counter.

    The count includes all-gathers of parameters, reduce-scatters of gradients, and all-reduces between replicas (HSDP),
    with the bytes that `titan_launch.plan.communication.Traffic` defines. It excludes communication along other mesh
    axes, and the communication of target counts, clipping, BatchNorm statistics and metrics. Counting does not make the
    host wait for the device.

    `watch_replicas`: for an optimizer that is sharded over replicas, the method `ReplicaShards.watched`. The
    collectives of this optimizer count too.
    """
    count = TrafficCount()

    def record(part: str, kind: str, output: Tensor, sent: Tensor) -> None:
        seen = {
            ALL_GATHER: Traffic(Collectives(all_gathers=1), all_gather_bytes=output.nbytes),
            REDUCE_SCATTER: Traffic(Collectives(reduce_scatters=1), reduce_scatter_bytes=sent.nbytes),
            ALL_REDUCE: Traffic(Collectives(all_reduces=1), all_reduce_bytes=output.nbytes),
        }[kind]
        if part:
            bytes_of_part: dict[str, Any] = {
                f"{part}_all_gather_bytes": seen.all_gather_bytes,
                f"{part}_reduce_scatter_bytes": seen.reduce_scatter_bytes,
            }
            seen = replace(seen, **bytes_of_part)
        count.add(seen)

    with ExitStack() as stack:
        if watch_replicas is not None:
            stack.enter_context(watch_replicas(partial(record, "replica")))
        for group in (group for model in models for group in parameter_groups(model)):
            meshes = [p.device_mesh for p in sharded_parameters(group) if isinstance(p, DTensor)]
            is_divided = any(EXPERT.short in (mesh.mesh_dim_names or ()) for mesh in meshes)
            stack.enter_context(collectives_watched(group, partial(record, EXPERT.name if is_divided else "")))
        yield count


@contextmanager
def communication_counted(model: nn.Module, timeline: Timeline) -> Iterator[None]:
    """Count the time of FSDP2's communication as the part `communication` of `timeline` until the `with` block ends.

    On a CPU, this is the time in which the FSDP2 units of `model` communicate, or wait for a collective. On CUDA, it
    is the time in which the compute stream waits for a collective, or copies to and from its buffers. A unit with a
    single rank in its mesh does not communicate.

    Each such wait or communication also sets `timeline.last_unit` to the path of the unit, even with a single rank.
    """

    @contextmanager
    def counted(unit: str, communicates: bool) -> Iterator[None]:
        timeline.last_unit = unit
        with timeline.inner("communication") if communicates else nullcontext():
            yield

    paths = {id(module): path for path, module in model.named_modules()}
    with ExitStack() as stack:
        for group in parameter_groups(model):
            unit = paths.get(id(group.modules[0]), "")
            is_shared = group.mesh_info.mesh.size() > 1
            stack.enter_context(communication_wrapped(group, counted(unit, is_shared)))
        yield


class Kernel(NamedTuple):
    """A kernel, copy or memset that ran on the device. `start` and `end` are times in nanoseconds."""

    name: str
    start: int
    end: int

    @property
    def communicates(self) -> bool:
        """True for a kernel of NCCL."""
        return self.name.startswith(("ncclDevKernel", "ncclKernel"))


@contextmanager
def exposed_time_profiled(device: torch.device, seen: dict[str, float]) -> Iterator[None]:
    """Profile the kernels of a CUDA device until the `with` block ends. Then set `seen["comm/exposed_s"]` to the
    exposed communication time in seconds. The host waits for the device when the block ends."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize(device)
    results = profiler.profiler
    assert results is not None and results.kineto_results is not None, "the profiler has run"
    seen["comm/exposed_s"] = exposed_seconds(
        Kernel(event.name(), event.start_ns(), event.end_ns())
        for event in results.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    )


def exposed_seconds(kernels: Iterable[Kernel]) -> float:
    """Return the seconds in which only NCCL kernels ran."""
    every = list(kernels)
    computation = [kernel for kernel in every if not kernel.communicates]
    return (_busy_ns(every) - _busy_ns(computation)) / 1e9


def _busy_ns(kernels: Iterable[Kernel]) -> int:
    """Return the nanoseconds in which at least one kernel ran."""
    busy, last_end = 0, 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        busy += max(0, kernel.end - max(kernel.start, last_end))
        last_end = max(last_end, kernel.end)
    return busy
