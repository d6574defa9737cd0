"""Measurements of the speeds of this machine, with all ranks at work at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from statistics import fmean, median
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from titan_launch import __version__
from titan_launch.core.files import MIB
from titan_launch.distributed.collectives import all_gather_single, on_all_ranks, reduce_scatter_single
from titan_launch.distributed.process_group import Ranks
from titan_launch.plan.speeds import CollectiveKind, Measured, MeasuredCollective, Points

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REPETITIONS = 5
"""Repetitions of a measurement, of which the median counts."""

_KEPT_BYTES = 31 * MIB
"""Bytes of a host tensor that is created and freed first. glibc then keeps the memory of freed tensors up to this size
(mallopt(3), M_MMAP_THRESHOLD), as it does in a CPU run for all sizes."""

_UNITS = 8
"""FSDP2 units of the stack that `_unit_seconds` measures."""


@dataclass(frozen=True)
class Scope:
    """Sizes of the measured operations, and the time that each measurement takes."""

    sizes: tuple[int, ...]
    """Rows, inner sizes and columns of products, the smallest first."""

    attention: tuple[int, int, int, int]
    """Batch, heads, tokens and width of a head."""

    images: tuple[int, int, int]
    """Batch, channels, and height and width of the input of the convolution. The output has the same shape."""

    result_bytes: tuple[int, ...]
    """Bytes of a float32 result of elementwise operations, the smallest first."""

    message_bytes: tuple[int, ...]
    """Bytes of the whole buffer of a collective, the smallest first."""

    budget_seconds: float
    """Seconds of each measurement. A slower operation is called twice, and the second call counts."""


def scope_of(device: torch.device) -> Scope:
    """Return what is measured on a device: measurements of about 20 seconds without collectives."""
    numbers = tuple(4096 * 8**power for power in range(5))  # 4 KiB to 16 MiB
    if device.type == "cpu":
        return Scope((16, 64, 256, 1024), (1, 4, 512, 64), (8, 32, 32), numbers, numbers, 0.12)
    return Scope(
        sizes=(64, 256, 1024, 4096, 8192),
        attention=(2, 16, 4096, 128),
        images=(32, 128, 56),
        result_bytes=(*numbers, 64 * MIB),
        message_bytes=(*numbers, 128 * MIB, 256 * MIB),
        budget_seconds=0.04,
    )


def measure(ranks: Ranks, scope: Scope, tell: Callable[[str], None]) -> Measured:
    """Measure the speeds of the ranks' devices. Collective over all ranks of the default process group.

    Threads are those of the process, as in training: torchrun gives a rank one thread if it starts several ranks.
    `tell` gets a line before each group of measurements, on rank 0.
    """

    def say(text: str) -> None:
        if ranks.is_rank_0:
            tell(text)

    torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    watch = _Stopwatch(ranks.device, scope.budget_seconds)
    say(f"products: {2 * len(scope.sizes) ** 3} shapes and dtypes")
    products = {name: _products(watch, scope.sizes, dtype) for name, dtype in _DTYPES.items()}
    say("attention, convolution and elementwise operations")
    attention = {name: _attention(watch, scope.attention, dtype) for name, dtype in _DTYPES.items()}
    convolution = {name: _convolution(watch, scope.images, dtype) for name, dtype in _DTYPES.items()}
    memory = tuple(_memory(watch, num_bytes // 4) for num_bytes in scope.result_bytes)
    say("hooks of FSDP2 units")
    unit_seconds = _unit_seconds(watch, ranks.world_size)
    return Measured(
        device="cpu" if ranks.device.type == "cpu" else torch.cuda.get_device_name(),
        ranks=ranks.world_size,
        versions={"torch": str(torch.__version__), "titan_launch": __version__},
        created=date.today().isoformat(),
        sizes=scope.sizes,
        products=products,
        attention=attention,
        convolution=convolution,
        memory=memory,
        collectives=tuple(_collectives(watch, ranks, scope.message_bytes, say)),
        unit_seconds=unit_seconds,
    )


class _Stopwatch:
    """A clock of operations that all ranks start at the same time. Its methods are collective over all ranks."""

    def __init__(self, device: torch.device, budget_seconds: float):
        self.device = device
        self._budget = budget_seconds

    def mean_seconds(self, call: Callable[[], object]) -> float:
        """Return the mean over the ranks of the median seconds of a call."""
        return self._over_ranks(self._median(call), dist.ReduceOp.SUM) / dist.get_world_size()

    def longest_seconds(self, call: Callable[[], object]) -> float:
        """Return the maximum over the ranks of the median seconds of a call."""
        return self._over_ranks(self._median(call), dist.ReduceOp.MAX)

    def is_supported(self, call: Callable[[], object]) -> bool:
        """Return True if a call succeeds on all ranks."""
        try:
            self._elapsed(call, 1)
            failed = 0.0
        except RuntimeError:  # that of a backend without this collective
            failed = 1.0
        return self._over_ranks(failed, dist.ReduceOp.MAX) == 0

    def _median(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call on this rank, after a warm-up. The number of calls is the same on all
        ranks, because calls may be collective."""
        self._elapsed(call, 1)
        seconds = self._elapsed(call, 1)
        affordable = int(self._budget / self._over_ranks(seconds, dist.ReduceOp.MAX))
        if affordable < 2:
            return seconds
        repetitions = min(_REPETITIONS, affordable)
        calls = affordable // repetitions
        return median(self._elapsed(call, calls) / calls for _ in range(repetitions))

    def _elapsed(self, call: Callable[[], object], calls: int) -> float:
        """Return the seconds of a number of calls. On a GPU they are queued, and the end of the last one counts."""
        dist.barrier()
        self._synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        self._synchronize()
        return time.perf_counter() - begin

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _over_ranks(self, value: float, operation: dist.ReduceOp.RedOpType) -> float:
        reduced = torch.tensor(value, dtype=torch.float64)  # on the CPU: gloo
        dist.all_reduce(reduced, operation)
        return reduced.item()


def _products(
    watch: _Stopwatch, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the FLOP/s of matrix products by rows, inner size and columns."""
    left, right = (torch.randn(sizes[-1] ** 2, dtype=dtype, device=watch.device) for _ in range(2))

    def rate(rows: int, inner: int, columns: int) -> float:
        x, y = left[: rows * inner].view(rows, inner), right[: inner * columns].view(inner, columns)
        return 2 * rows * inner * columns / watch.mean_seconds(lambda: x @ y)

    return tuple(tuple(tuple(rate(rows, inner, columns) for columns in sizes) for inner in sizes) for rows in sizes)


def _attention(watch: _Stopwatch, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[float, float]:
    """Return the FLOP/s of causal attention, forward and backward. All pairs of tokens count (`train/flops.py`)."""
    batch, heads, tokens, width = shape
    flops = 4 * batch * heads * tokens**2 * width
    q, k, v = (torch.randn(shape, dtype=dtype, device=watch.device, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    out = forward()
    gradient = torch.ones_like(out)
    backward = watch.mean_seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True))
    return flops / watch.mean_seconds(forward), 2 * flops / backward


def _convolution(watch: _Stopwatch, images: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the FLOP/s of the forward of a 3x3 convolution."""
    batch, channels, side = images
    x = torch.randn(batch, channels, side, side, dtype=dtype, device=watch.device)
    weight = torch.randn(channels, channels, 3, 3, dtype=dtype, device=watch.device)
    return 2 * x.numel() * channels * 9 / watch.mean_seconds(lambda: F.conv2d(x, weight, padding=1))


def _memory(watch: _Stopwatch, elements: int) -> tuple[float, float]:
    """Return the means (bytes that are read and written, seconds) of three elementwise operations on float32 tensors:
    a sum of two tensors, an activation function, and a cast to bfloat16."""
    x, y = (torch.randn(elements, device=watch.device) for _ in range(2))
    calls: tuple[Callable[[], Tensor], ...] = (lambda: x + y, lambda: F.silu(x), lambda: x.to(torch.bfloat16))
    bytes_per_element = (12, 8, 6)
    return elements * fmean(bytes_per_element), fmean(watch.mean_seconds(call) for call in calls)


def _unit_seconds(watch: _Stopwatch, world_size: int) -> float:
    """Return the seconds that FSDP2's hooks of a unit take in a forward and a backward, without collectives."""
    alone = init_device_mesh(watch.device.type, (world_size, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    x = torch.ones(8, 8, device=watch.device)

    def seconds(is_sharded: bool) -> float:
        stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_UNITS))).to(watch.device)
        for module in (*stack, stack) if is_sharded else ():
            fully_shard(module, mesh=alone)

        def step() -> None:
            stack(x).sum().backward()
            stack.zero_grad()

        return watch.mean_seconds(step)

    return max(0.0, seconds(True) - seconds(False)) / _UNITS


def _collectives(
    watch: _Stopwatch, ranks: Ranks, message_bytes: tuple[int, ...], say: Callable[[str], None]
) -> Iterator[MeasuredCollective]:
    """Yield the collectives of groups of consecutive ranks, all of which communicate at the same time. The sizes of
    groups are the powers of two that divide the world size, and the world size."""
    world_size, first_on_host = ranks.world_size, on_all_ranks(lambda: ranks.first_on_host)
    sizes = {1 << power for power in range(1, world_size.bit_length())} | {world_size}
    for size in sorted(size for size in sizes if size > 1 and world_size % size == 0):
        say(f"collectives of {size} ranks")
        group, _ = dist.new_subgroups(size)
        hosts = [{*first_on_host[first : first + size]} for first in range(0, world_size, size)]
        crosses_nodes = any(len(own) > 1 for own in hosts)
        for kind in get_args(CollectiveKind):
            if points := _points(watch, kind, group, message_bytes):
                yield MeasuredCollective(kind, size, crosses_nodes, points)
        dist.destroy_process_group(group)


def _points(
    watch: _Stopwatch, kind: CollectiveKind, group: dist.ProcessGroup, message_bytes: tuple[int, ...]
) -> Points:
    """Return (bytes that a rank sends if collectives use rings, seconds) for each size of the whole buffer. No points
    if the backend does not have the collective."""
    size = group.size()
    shares = {"all_reduce": 2 * (size - 1) / size, "send": 1.0}
    share, points = shares.get(kind, (size - 1) / size), list[tuple[float, float]]()
    for num_bytes in message_bytes:
        elements = num_bytes // 4 // size * size
        whole, other = (torch.zeros(elements, device=watch.device) for _ in range(2))
        call = _call(kind, group, whole, other)
        if not points and not watch.is_supported(call):
            return ()
        points.append((4 * elements * share, watch.longest_seconds(call)))
    return tuple(points)


def _call(kind: CollectiveKind, group: dist.ProcessGroup, whole: Tensor, other: Tensor) -> Callable[[], object]:
    """Return a function that calls a collective. `whole` and `other`: buffers of the same size."""
    part = other[: other.numel() // group.size()]

    def send_to_next() -> None:
        """Send to the next rank of the group, and receive from the previous one."""
        rank, size = group.rank(), group.size()
        sent = dist.P2POp(dist.isend, whole, group=group, group_peer=(rank + 1) % size)
        received = dist.P2POp(dist.irecv, other, group=group, group_peer=(rank - 1) % size)
        for work in dist.batch_isend_irecv([sent, received]):
            work.wait()

    calls: dict[CollectiveKind, Callable[[], object]] = {
        "all_gather": lambda: all_gather_single(whole, part, group),
        "reduce_scatter": lambda: reduce_scatter_single(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": send_to_next,
    }
    return calls[kind]
