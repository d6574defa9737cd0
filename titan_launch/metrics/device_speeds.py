"""Measurements of the speeds of this machine, with all ranks at work at the same time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from itertools import cycle, product
from statistics import fmean, median
from typing import get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_launch import __version__
from titan_launch.config.axes import CollectiveKind
from titan_launch.core.files import MIB
from titan_launch.core.process import usable_cores
from titan_launch.distributed.collectives import all_gather_single, on_all_ranks, reduce_scatter_single
from titan_launch.distributed.process_group import Ranks
from titan_launch.plan.communication import ring_crossings
from titan_launch.plan.speeds import Measured, MeasuredAttention, MeasuredCollective, Points

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_REPETITIONS = 5
"""Largest number of repetitions of a measurement. The result is the median of the repetitions."""

_KEPT_BYTES = 31 * MIB
"""Bytes of a host tensor that is created and freed before the measurements. After that, glibc keeps the memory of freed
tensors up to this size (mallopt(3), M_MMAP_THRESHOLD). In a CPU run, `cpu/allocator.py` has the same effect."""

_OLD_BYTES = 64 * MIB
"""Smallest size in bytes of the tensors that matrix products and elementwise operations read. It exceeds the cache of
a core. Each call reads the next part of its tensors, so the part is not in that cache, as in training."""

_MOST_OLD = 4096
"""Largest number of parts that `_in_turn` takes from a tensor."""

_MODULES = 32
"""Number of modules in the stack that `_operation_seconds` measures."""

_UNITS = 8
"""Number of linear layers, each an FSDP2 unit, in the stack that `_unit_seconds` measures."""


@dataclass(frozen=True)
class Scope:
    """Sizes of the measured operations, and the time that each measurement takes."""

    sizes: tuple[int, ...]
    """Sizes in ascending order. Matrix products are measured for every combination of rows, inner size and columns
    from these sizes."""

    heads: tuple[int, int]
    """Batch size and number of heads, for attention."""

    widths: tuple[int, ...]
    """Widths of an attention head, in ascending order."""

    tokens: tuple[int, ...]
    """Lengths of the sequences for attention, in ascending order."""

    images: tuple[int, int, int]
    """Batch size, channels, and side of the square images that are the input of the convolution. The output has the
    same shape."""

    result_bytes: tuple[int, ...]
    """Bytes of a float32 result of elementwise operations, in ascending order."""

    message_bytes: tuple[int, ...]
    """Bytes of the whole buffer of a collective, in ascending order."""

    budget_seconds: float
    """Approximate seconds of each measurement. If an operation takes more than half of this time, it is called only
    twice, and the second call counts."""


def scope_of(device: torch.device) -> Scope:
    """Return the scope for a device. Its measurements take about 20 seconds, without those of collectives."""
    numbers = tuple(4096 * 8**power for power in range(5))  # 4 KiB to 16 MiB
    if device.type == "cpu":
        return Scope((16, 64, 256, 1024), (2, 4), (32, 64, 128), (32, 128, 512), (8, 32, 32), numbers, numbers, 0.12)
    return Scope(
        sizes=(64, 256, 1024, 4096, 8192),
        heads=(2, 16),
        widths=(64, 128),
        tokens=(512, 2048, 8192),
        images=(32, 128, 56),
        result_bytes=(*numbers, 64 * MIB),
        message_bytes=(*numbers, 128 * MIB, 256 * MIB),
        budget_seconds=0.04,
    )


def measure(ranks: Ranks, scope: Scope, tell: Callable[[str], None]) -> Measured:
    """Measure the speeds of the ranks' devices. Collective over all ranks of the default process group.

    Operations on a CPU use the threads of the process, as in training. (torchrun gives each of several ranks one
    thread, unless OMP_NUM_THREADS is set.) `tell`: function that rank 0 calls with a line of text before each group of
    measurements.
    """

    def say(text: str) -> None:
        if ranks.is_rank_0:
            tell(text)

    torch.empty(_KEPT_BYTES, dtype=torch.uint8)
    watch = _Stopwatch(ranks.device, scope.budget_seconds)
    say(f"measuring matrix products: {2 * len(scope.sizes) ** 3} combinations of shapes and dtypes")
    products = {name: _products(watch, scope.sizes, dtype) for name, dtype in _DTYPES.items()}
    say("measuring attention, convolution and elementwise operations")
    attention = tuple(_attention(watch, scope, *each) for each in product(_DTYPES, scope.widths))
    convolution = {name: _convolution(watch, scope.images, dtype) for name, dtype in _DTYPES.items()}
    memory = tuple(_memory(watch, num_bytes // 4) for num_bytes in scope.result_bytes)
    collectives = tuple(_collectives(watch, ranks, scope.message_bytes, say))
    say("measuring host overhead: modules, FSDP2 units, DTensors, pipelines")
    unit_seconds, parameter_seconds = _unit_seconds(watch, ranks.world_size)
    operation_seconds = max(0.0, _operation_seconds(watch) - memory[0][1])
    exchange_seconds = _exchange_seconds(watch) if ranks.world_size > 1 else 0.0
    sends = [c.points[0][1] for c in collectives if (c.kind, c.ranks) == ("send", ranks.world_size)]
    stage_seconds = max(0.0, _stage_seconds(watch) - 2 * sends[0]) if sends else 0.0
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
        collectives=collectives,
        unit_seconds=unit_seconds,
        parameter_seconds=parameter_seconds,
        operation_seconds=operation_seconds,
        exchange_seconds=exchange_seconds,
        stage_seconds=stage_seconds,
        ranks_per_core=_ranks_per_core(ranks),
    )


class _Stopwatch:
    """Clock for operations that all ranks start at the same time. Its methods are collective over all ranks."""

    def __init__(self, device: torch.device, budget_seconds: float):
        self.device = device
        self._budget = budget_seconds

    def mean_seconds(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call, averaged over the ranks."""
        return self._over_ranks(self._median(call), dist.ReduceOp.SUM) / dist.get_world_size()

    def longest_seconds(self, call: Callable[[], object]) -> float:
        """Return the median seconds of a call on the slowest rank."""
        return self._over_ranks(self._median(call), dist.ReduceOp.MAX)

    def is_supported(self, call: Callable[[], object]) -> bool:
        """Return True if a call succeeds on all ranks."""
        try:
            self._elapsed(call, 1)
            failed = 0.0
        except RuntimeError:  # the backend does not have this collective
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
        """Return the total seconds of `calls` calls. On a GPU the calls are queued, and the time ends when the device
        has finished the last call."""
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
        reduced = torch.tensor(value, dtype=torch.float64)  # on the CPU, so gloo reduces it
        dist.all_reduce(reduced, operation)
        return reduced.item()


def _products(
    watch: _Stopwatch, sizes: tuple[int, ...], dtype: torch.dtype
) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Return the FLOP/s of matrix products, indexed by rows, inner size and columns.

    Each value comes from the mean time of three products, as in forward and backward of a linear layer: `x @ y`,
    `x @ y.T` and `x.T @ y`.
    """
    numel = max(sizes[-1] ** 2, _OLD_BYTES // dtype.itemsize)
    left, right = (torch.randn(numel, dtype=dtype, device=watch.device) for _ in range(2))

    def rate(rows: int, inner: int, columns: int) -> float:
        xs, ys = _in_turn(left, rows * inner), _in_turn(right, inner * columns)
        forms: tuple[Callable[[], Tensor], ...] = (
            lambda: next(xs).view(rows, inner) @ next(ys).view(inner, columns),
            lambda: next(xs).view(rows, inner) @ next(ys).view(columns, inner).T,
            lambda: next(xs).view(inner, rows).T @ next(ys).view(inner, columns),
        )
        return 2 * rows * inner * columns / fmean(watch.mean_seconds(form) for form in forms)

    return tuple(tuple(tuple(rate(rows, inner, columns) for columns in sizes) for inner in sizes) for rows in sizes)


def _in_turn(numbers: Tensor, elements: int) -> Iterator[Tensor]:
    """Return an endless iterator over parts of `numbers` that have `elements` elements each. The iterator cycles
    through at most `_MOST_OLD` parts."""
    count = min(_MOST_OLD, numbers.numel() // elements)
    return cycle(numbers[: count * elements].split(elements))


def _attention(watch: _Stopwatch, scope: Scope, dtype: str, width: int) -> MeasuredAttention:
    """Measure the FLOP/s of forward and backward of causal attention. FLOPs are counted as in `train/flops.py`: every
    pair of tokens counts. Queries, keys and values have the strides of a linear layer's output."""
    batch, heads = scope.heads
    forwards, backwards = list[tuple[float, float]](), list[tuple[float, float]]()
    for tokens in scope.tokens:
        flops = 4.0 * batch * heads * tokens**2 * width
        shape = (batch, tokens, heads, width)
        qkv = [torch.randn(shape, dtype=_DTYPES[dtype], device=watch.device, requires_grad=True) for _ in range(3)]
        q, k, v = (x.transpose(1, 2) for x in qkv)

        def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        out = forward()
        backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        forwards.append((tokens, flops / watch.mean_seconds(forward)))
        backwards.append((tokens, 2 * flops / watch.mean_seconds(backward)))
    return MeasuredAttention(dtype, width, tuple(forwards), tuple(backwards))


def _convolution(watch: _Stopwatch, images: tuple[int, int, int], dtype: torch.dtype) -> float:
    """Return the FLOP/s of the forward of a 3x3 convolution."""
    batch, channels, side = images
    x = torch.randn(batch, channels, side, side, dtype=dtype, device=watch.device)
    weight = torch.randn(channels, channels, 3, 3, dtype=dtype, device=watch.device)
    return 2 * x.numel() * channels * 9 / watch.mean_seconds(lambda: F.conv2d(x, weight, padding=1))


def _memory(watch: _Stopwatch, elements: int) -> tuple[float, float]:
    """Return (bytes that are read and written, seconds), each as the mean of three elementwise operations on float32
    tensors: a sum of two tensors, an activation function, and a cast to bfloat16."""
    parts = _in_turn(torch.randn(max(_OLD_BYTES // 4, elements), device=watch.device), elements)
    calls: tuple[Callable[[], Tensor], ...] = (
        lambda: next(parts) + next(parts),
        lambda: F.silu(next(parts)),
        lambda: next(parts).to(torch.bfloat16),
    )
    bytes_per_element = (12, 8, 6)
    return elements * fmean(bytes_per_element), fmean(watch.mean_seconds(call) for call in calls)


def _step_of(stack: nn.Module, x: Tensor) -> Callable[[], None]:
    """Return a function that runs forward and backward of `stack` on `x`."""

    def step() -> None:
        stack.zero_grad()  # not at the end, because `_unit_seconds` needs the gradients of the last call
        stack(x).sum().backward()

    return step


def _unit_seconds(watch: _Stopwatch, world_size: int) -> tuple[float, float]:
    """Return two times in seconds. The first is the time of FSDP2's hooks of one unit in a forward and a backward,
    without collectives. The second is the time of gradient clipping and the optimizer's update for one sharded
    parameter."""
    # A mesh of one rank, on which FSDP2 runs no collectives.
    alone = init_device_mesh(watch.device.type, (world_size, 1), mesh_dim_names=("ranks", "alone"))["alone"]
    x = torch.ones(8, 8, device=watch.device)

    def stack_of(is_sharded: bool) -> nn.Sequential:
        stack = nn.Sequential(*(nn.Linear(8, 8) for _ in range(_UNITS))).to(watch.device)
        for module in (*stack, stack) if is_sharded else ():
            fully_shard(module, mesh=alone)
        return stack

    sharded, plain = stack_of(True), stack_of(False)
    hooks = max(0.0, watch.mean_seconds(_step_of(sharded, x)) - watch.mean_seconds(_step_of(plain, x))) / _UNITS
    parameters = list(sharded.parameters())
    optimizer = torch.optim.AdamW(parameters, fused=True)

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return hooks, watch.mean_seconds(update) / len(parameters)


class _Scaled(nn.Module):
    """A module of two operations in forward and three in backward."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024, device=device))

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x * self.weight)


def _operation_seconds(watch: _Stopwatch) -> float:
    """Return the mean seconds of a small operation in forward or backward, with the time of modules and autograd."""
    modules = [_Scaled(watch.device) for _ in range(_MODULES)]
    x = torch.ones(1024, device=watch.device, requires_grad=True)
    return watch.mean_seconds(_step_of(nn.Sequential(*modules), x)) / (5 * _MODULES)


def _exchange_seconds(watch: _Stopwatch) -> float:
    """Return the seconds that the host takes for DTensor in one collective of tensor parallelism.

    Pairs of small linear layers run forward and backward with tensor parallelism: an all-gather before and a
    reduce-scatter after each pair. Two times are subtracted: that of the same layers without tensor parallelism, and
    that of the collectives without DTensor.
    """
    mesh = init_device_mesh(watch.device.type, (dist.get_world_size(),))
    ranks, width = mesh.size(), 8
    x = torch.ones(1, ranks, width, device=watch.device)

    def seconds(is_parallel: bool) -> float:
        pairs = [nn.Sequential(nn.Linear(width, ranks * width), nn.Linear(ranks * width, width)) for _ in range(4)]
        for pair in pairs if is_parallel else ():
            styles = {"0": ColwiseParallel(input_layouts=Shard(1)), "1": RowwiseParallel(output_layouts=Shard(1))}
            parallelize_module(pair.to(watch.device), mesh, styles)
        stack = nn.Sequential(*pairs).to(watch.device)
        return watch.longest_seconds(_step_of(stack, x[:, :1] if is_parallel else x))

    part, whole = x[0, :1].contiguous(), x[0].clone()
    gather = watch.longest_seconds(lambda: all_gather_single(whole, part))
    scatter = watch.longest_seconds(lambda: reduce_scatter_single(part, whole))
    # Each of the four pairs has two all-gathers and two reduce-scatters, one in forward and one in backward.
    return max(0.0, (seconds(True) - seconds(False)) / 16 - (gather + scatter) / 2)


def _stage_seconds(watch: _Stopwatch) -> float:
    """Return the seconds that a microbatch takes in a stage of a pipeline over all ranks: PyTorch's schedule, a send in
    forward, and a send in backward.

    The module of a stage is a small layer, whose time is subtracted. Steps with n and with 3 n microbatches on n ranks
    are measured. Only the difference between their times counts, so that the bubble does not count.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def seconds(num_microbatches: int) -> float:
        stage = PipelineStage(nn.Linear(8, 8).to(watch.device), rank, ranks, watch.device)
        schedule = Schedule1F1B(stage, num_microbatches, loss_fn=lambda output, target: output.sum())
        x = torch.ones(num_microbatches, 8, device=watch.device)

        def step() -> None:
            schedule.step(*[x] * (rank == 0), target=x if rank == ranks - 1 else None)

        return watch.longest_seconds(step)

    module, x = nn.Linear(8, 8).to(watch.device), torch.ones(1, 8, device=watch.device)
    return (seconds(3 * ranks) - seconds(ranks)) / (2 * ranks) - watch.mean_seconds(_step_of(module, x))


def _ranks_per_core(ranks: Ranks) -> float:
    """Return the number of threads per core, but at least 1, on the host with the most ranks. All threads of the ranks
    count, and all cores that this process may use. Return 1 on a GPU."""
    if ranks.device.type != "cpu":
        return 1.0
    threads = torch.get_num_threads() * max(Counter(on_all_ranks(lambda: ranks.first_on_host)).values())
    return max(1.0, threads / usable_cores())


def _collectives(
    watch: _Stopwatch, ranks: Ranks, message_bytes: tuple[int, ...], say: Callable[[str], None]
) -> Iterator[MeasuredCollective]:
    """Yield the measurements of each collective for each group size. A group has consecutive ranks. Skip collectives
    that the backend does not have.

    All groups of a size communicate at the same time. The sizes are the powers of two that divide the world size, and
    the world size itself.
    """
    world_size, first_on_host = ranks.world_size, on_all_ranks(lambda: ranks.first_on_host)
    sizes = {1 << power for power in range(1, world_size.bit_length())} | {world_size}
    for size in sorted(size for size in sizes if size > 1 and world_size % size == 0):
        say(f"measuring collectives of {size} ranks")
        group, _ = dist.new_subgroups(size)
        hosts = [first_on_host[first : first + size] for first in range(0, world_size, size)]
        crossings = max(map(ring_crossings, hosts))
        for kind in get_args(CollectiveKind):
            if points := _points(watch, kind, group, message_bytes):
                yield MeasuredCollective(kind, size, crossings, points)
        dist.destroy_process_group(group)


def _points(
    watch: _Stopwatch, kind: CollectiveKind, group: dist.ProcessGroup, message_bytes: tuple[int, ...]
) -> Points:
    """Return a pair (bytes, seconds) for each size of the whole buffer. The bytes are those that a rank sends in
    a ring algorithm. Return no pairs if the backend does not have the collective."""
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
