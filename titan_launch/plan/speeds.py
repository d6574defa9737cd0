"""Speeds of a device: seconds of a model's operations, and of collectives. This module does not import torch.

`titan-launch measure-device` measures the speeds of a machine. Without measurements, the speeds are those of the data
sheet, multiplied by the share that large operations reach. A matrix product then takes the time of its FLOPs or the
time to move its bytes, whichever is longer. Attention and convolutions take the time of their FLOPs. Elementwise
operations take the time to move their bytes. `OPERATION_SECONDS` is added to each operation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

from titan_launch.config.axes import CollectiveKind
from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.core.errors import config_error

if TYPE_CHECKING:
    from titan_launch.plan.communication import Ring

T = TypeVar("T")

Kernels = Literal["cuda", "cpu"]
"""The device family. It decides which tensors each operation saves for backward."""

HostWork = Literal["unit", "parameter", "operation", "exchange", "stage"]
"""Kinds of work of the host, which is the CPU that starts operations. `Measured` has the seconds of each kind, such as
`unit_seconds`."""

Points = tuple[tuple[float, float], ...]
"""Pairs (bytes, seconds), or for attention (tokens, FLOP/s), in ascending order."""


class Work(NamedTuple):
    """Several operations of the same kind and sizes, such as matrix products. Collectives are not included."""

    kind: Literal["product", "convolution", "attention", "attention_backward", "memory"]

    dtype: str
    """Dtype of the inputs; empty for `memory`."""

    sizes: tuple[int, ...]
    """Sizes of one operation, by kind:

    - `product`: (matrix products in the batch, rows, inner size, columns)
    - `convolution`: (FLOPs,)
    - `attention` and `attention_backward`: (FLOPs of all pairs of tokens, number of keys, width of a head, 1 if causal
      else 0). Causal attention computes only half of the pairs.
    - `memory`, for all other operations: (bytes that the operation reads and writes,)
    """

    times: int = 1
    """Number of the operations."""


@dataclass(frozen=True)
class MeasuredAttention:
    """FLOP/s of causal attention, by the number of tokens of a sequence. All pairs of tokens count, though causal
    attention computes only half of the pairs."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    dtype: str
    width: int
    """Width of a head."""

    forward: Points
    backward: Points


@dataclass(frozen=True)
class MeasuredCollective:
    """Measured seconds of one kind of collective in a group of `ranks` ranks."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    kind: CollectiveKind
    ranks: int
    crossings: int
    """Number of hops of the group's ring that lead to another node."""

    points: Points
    """Pairs (bytes that a rank sends, seconds). The bytes are computed as if the collective used a ring."""


@dataclass(frozen=True)
class Measured:
    """Measurements of `titan-launch measure-device`. All ranks of the machine were measured at the same time."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    device: str
    """`cpu`, or the name that the driver reports."""

    ranks: int
    versions: Mapping[str, str]
    created: str
    sizes: tuple[int, ...]
    """Sizes of the measured matrix products: rows, inner size and columns each take all of these values."""

    products: Mapping[str, tuple[tuple[tuple[float, ...], ...], ...]]
    """FLOP/s of matrix products by dtype. `products["float32"][i][j][k]`: the rate for `sizes[i]` rows, inner size
    `sizes[j]` and `sizes[k]` columns."""

    attention: tuple[MeasuredAttention, ...]

    convolution: Mapping[str, float]
    """FLOP/s of convolutions by dtype."""

    memory: Points
    """Pairs (bytes that an elementwise operation reads and writes, its seconds)."""

    collectives: tuple[MeasuredCollective, ...]

    unit_seconds: float
    """Seconds that the host takes for the FSDP2 hooks of one unit, in a forward and a backward."""

    parameter_seconds: float
    """Seconds that the host takes to clip the gradient of one parameter and to update the parameter."""

    operation_seconds: float
    """Seconds that the host takes in modules and autograd for one operation of a model. The operation itself is not
    included."""

    exchange_seconds: float
    """Seconds that the host takes in DTensor for one collective of tensor parallelism. The collective itself is not
    included."""

    stage_seconds: float
    """Seconds that the host takes in PyTorch's pipeline schedule for one stage and microbatch. The operations and the
    sends of the stage are not included."""

    ranks_per_core: float
    """Number of ranks that share a CPU core; 1 if each rank has at least one core for itself."""

    @property
    def kernels(self) -> Kernels:
        return "cpu" if self.device == "cpu" else "cuda"

    def dumps(self) -> str:
        import json  # imported here, because checks of a job file import this module

        return json.dumps(asdict(self), indent=1)


def read_measured(path: str) -> Measured:
    """Return the measurements in the file `planner.speeds`. Raises ConfigError for a file that cannot be read, and for
    invalid or incomplete measurements."""
    from pydantic import TypeAdapter  # imported here, because checks of a job file import this module

    from titan_launch.core.files import read_regular
    from titan_launch.core.json_files import JsonError, parse_as, reason_of

    try:
        measured = parse_as(TypeAdapter(Measured), read_regular(Path(path), most_bytes=1 << 22))
    except (OSError, JsonError) as error:
        reason = f"cannot be read ({reason_of(error)}); create the file with titan-launch measure-device"
        raise config_error(("planner", "speeds"), reason, path) from None
    if problem := _problem(measured):
        raise config_error(("planner", "speeds"), f"{problem}; measure the device again", path)
    return measured


def _problem(measured: Measured) -> str | None:
    """Return the first reason why the measurements are not valid; None if they are valid."""
    sizes = measured.sizes
    if len(sizes) < 2 or list(sizes) != sorted({*sizes}) or sizes[0] < 1:
        return "sizes: must be two or more different numbers of at least 1, the smallest first"
    attention = {one.dtype for one in measured.attention}
    by_dtype = {"products": measured.products, "attention": attention, "convolution": measured.convolution}
    if missing := [name for name, dtypes in by_dtype.items() if "float32" not in dtypes]:
        return f"{missing[0]}: float32 is missing"
    for dtype, rates in measured.products.items():
        rows = [row for plane in rates for row in plane]
        is_cube = len(rates) == len(sizes) and all(len(part) == len(sizes) for part in (*rates, *rows))
        if not is_cube or not all(rate > 0 for row in rows for rate in row):
            return f"products.{dtype}: needs a positive number for each combination of sizes"
    curves = [("memory", measured.memory), *((f"collectives.{c.kind}", c.points) for c in measured.collectives)]
    curves += [
        (f"attention.{one.dtype}", points) for one in measured.attention for points in (one.forward, one.backward)
    ]
    for name, points in curves:
        if not points or list(points) != sorted(points) or not all(x > 0 and y > 0 for x, y in points):
            return f"{name}: needs pairs of positive numbers, the smallest first"
    if not all(rate > 0 for rate in measured.convolution.values()):
        return "convolution: needs positive numbers"
    if measured.ranks < 1 or not all(c.ranks > 1 and 0 <= c.crossings <= c.ranks for c in measured.collectives):
        return "ranks: must be at least 1, and at least 2 in `collectives`, with 0 to `ranks` crossings"
    if measured.ranks_per_core < 1:
        return "ranks_per_core: must be at least 1"
    for what in get_args(HostWork):
        if getattr(measured, f"{what}_seconds") < 0:
            return f"{what}_seconds: must not be negative"
    return None


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a group."""

    bytes_per_s: float
    base_seconds: float
    """Seconds until the first byte is sent."""

    hop_seconds: float
    """Seconds of each hop in a ring."""


_LINKS = {"within": (0.8, 8.4e-6, 3.4e-6), "across": (0.93, 8.4e-6, 14e-6)}
"""For links `within` and `across` nodes: share of the bandwidth that large collectives reach, base seconds, and seconds
of a hop. The share within a node comes from 8 x H200 (361 GB/s, ml-engineering, network/README.md). The share across
nodes comes from NDR adapters (46 to 48 GB/s, nccl-tests issue 290). The seconds come from NCCL's model of rings with
the protocol Simple (src/graph/tuning.cc)."""


def link_of(kind: str, gb_per_s: float | None) -> Link:
    """Return the link of a kind: `within` a node or `across` nodes. `gb_per_s`: bandwidth by the data sheet or the job.
    None: unknown. An unknown bandwidth counts as infinite, and `Speeds.knows` returns False if the link was not
    measured."""
    share, base, hop = _LINKS[kind]
    return Link(math.inf if gb_per_s is None else 1e9 * gb_per_s * share, base, hop)


@dataclass(frozen=True)
class Speeds(ABC):
    """Speeds of a device and of the links between its ranks."""

    source: str
    """Source of the speeds, in words."""

    within: Link
    across: Link

    overlaps: bool = True
    """True if FSDP2's collectives overlap with computation; False on CPUs, where both use the same cores."""

    _known: dict[Work, float] = field(default_factory=dict, compare=False, repr=False)

    # Operations

    def seconds(self, work: Work) -> float:
        """Return the seconds of all `work.times` operations."""
        found = self._known.get(work)
        if found is None:
            found = self._known[work] = work.times * self._of_one(work)
        return found

    def _of_one(self, work: Work) -> float:
        if work.kind == "memory":
            return self.memory_seconds(work.sizes[0])
        if work.kind == "product":
            return self._of_product(work)
        computed = 1 if work.kind == "convolution" else 2 - work.sizes[3]
        return self._of_flops(work, float(computed * work.sizes[0]))

    def least_seconds(self, work: Work) -> float:
        """Return a lower bound of the seconds of all `work.times` operations. The bound holds even if larger
        microbatches make the operations more efficient."""
        if work.kind == "product":
            return work.times * 2 * math.prod(work.sizes) / self._best_rate(work.dtype)
        if work.kind == "memory":
            return work.times * work.sizes[0] / self._best_memory
        return self._least_of_flops(work)

    def of_work(self, work: Mapping[Work, int], microbatches: int) -> tuple[float, float]:
        """Return the seconds of the operations in `microbatches` microbatches, and a lower bound (see `least_seconds`).
        On CPUs, the first number includes the work of the host. `work`: the operations of a microbatch, each with its
        number of occurrences."""
        host = 0.0 if self.overlaps else self.host_seconds("operation")
        seconds = sum(times * (self.seconds(one) + host) for one, times in work.items())
        least = sum(times * self.least_seconds(one) for one, times in work.items())
        return microbatches * seconds, microbatches * least

    @abstractmethod
    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds of an elementwise operation that reads and writes a number of bytes."""

    @abstractmethod
    def host_seconds(self, what: HostWork) -> float:
        """Return the seconds of the host for one piece of work, such as for one FSDP2 unit (`Measured.unit_seconds`).
        On a GPU, the work of the host overlaps with computation."""

    def idle_share(self, bubble_share: float) -> float:
        """Return the time that the bubble of a pipeline adds to a step, divided by the computation time of a rank.
        `bubble_share`: the same quotient if no ranks share a CPU core."""
        return bubble_share

    @property
    @abstractmethod
    def most_flops_per_s(self) -> float:
        """FLOP/s of the fastest operations."""

    @property
    @abstractmethod
    def _best_memory(self) -> float:
        """Bytes per second of the fastest elementwise operation."""

    @abstractmethod
    def _best_rate(self, dtype: str) -> float:
        """Return the largest FLOP/s of products in a dtype."""

    @abstractmethod
    def _of_product(self, work: Work) -> float: ...

    @abstractmethod
    def _of_flops(self, work: Work, flops: float) -> float:
        """Return the seconds of attention or of a convolution that computes `flops` FLOPs."""

    @abstractmethod
    def _least_of_flops(self, work: Work) -> float: ...

    # Collectives

    def collective_seconds(self, kind: CollectiveKind, ring: Ring, sent_bytes: float) -> float:
        """Return the seconds of a collective. `sent_bytes`: bytes that a rank sends, if collectives use rings."""
        hops = ring.size - 1 if kind in ("all_gather", "reduce_scatter") else math.log2(max(2, ring.size))
        share = float(ring.across)
        seconds = [
            sent_bytes * part / link.bytes_per_s + hops * part * link.hop_seconds
            for part, link in ((1 - share, self.within), (share, self.across))
        ]
        base = (self.across if ring.crossings else self.within).base_seconds
        return base + max(seconds)

    def least_collective_seconds(self, kinds: Sequence[CollectiveKind], ring: Ring, sent_bytes: float) -> float:
        """Return a lower bound of the seconds of one collective, averaged over `kinds`. The bound holds even if larger
        messages make collectives more efficient. `sent_bytes`: bytes that a rank sends in the collective."""
        return sent_bytes * sum(self._least_per_byte(kind, ring) for kind in kinds) / len(kinds)

    def _least_per_byte(self, kind: CollectiveKind, ring: Ring) -> float:
        share = float(ring.across)
        return max((1 - share) / self.within.bytes_per_s, share / self.across.bytes_per_s)

    def knows(self, rings: Iterable[Ring]) -> bool:
        """Return True if the speed of each link between the ranks of `rings` is known, whether measured or given."""
        return all(self._knows(ring) for ring in rings if ring.size > 1)

    def _knows(self, ring: Ring) -> bool:
        used = [self.within] * (ring.crossings < ring.size) + [self.across] * (ring.crossings > 0)
        return all(link.bytes_per_s < math.inf for link in used)


@dataclass(frozen=True, kw_only=True)
class DataSheetSpeeds(Speeds):
    """Speeds of a data sheet, each multiplied by the fraction that large operations reach (0.85 for memory)."""

    flops_per_s: Mapping[str, float]
    """FLOP/s of large matrix products by dtype."""

    shares: Mapping[str, float]
    """FLOP/s of each other kind of work, divided by the FLOP/s of large matrix products."""

    memory_bytes_per_s: float
    """Bandwidth that large elementwise operations reach, in bytes per second."""

    def memory_seconds(self, num_bytes: float) -> float:
        return OPERATION_SECONDS + num_bytes / self.memory_bytes_per_s

    def host_seconds(self, what: HostWork) -> float:
        return 0.0  # not known

    @property
    def most_flops_per_s(self) -> float:
        return max(self.flops_per_s.values()) * max([1.0, *self.shares.values()])

    @property
    def _best_memory(self) -> float:
        return self.memory_bytes_per_s

    def _best_rate(self, dtype: str) -> float:
        return _of_dtype(self.flops_per_s, dtype)

    def _of_product(self, work: Work) -> float:
        products, rows, inner, columns = work.sizes
        moved = products * (rows * inner + inner * columns + rows * columns) * DTYPE_BYTES.get(work.dtype, 4)
        by_flops = 2.0 * math.prod(work.sizes) / self._best_rate(work.dtype)
        return OPERATION_SECONDS + max(by_flops, moved / self.memory_bytes_per_s)

    def _of_flops(self, work: Work, flops: float) -> float:
        return OPERATION_SECONDS + flops / (self._best_rate(work.dtype) * self.shares.get(work.kind, 1.0))

    def _least_of_flops(self, work: Work) -> float:
        return self.seconds(work) - work.times * OPERATION_SECONDS


OPERATION_SECONDS = 4e-6
"""Seconds of the smallest operation on a GPU."""


def no_speeds() -> Speeds:
    """Return placeholder speeds for a replay whose predicted times are not used."""
    within, across = link_of("within", None), link_of("across", None)
    return DataSheetSpeeds("unknown", within, across, flops_per_s={"float32": 1}, shares={}, memory_bytes_per_s=1)


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeeds(Speeds):
    """Measured speeds. A link without a measurement has the bandwidth of the data sheet or of the job."""

    measured: Measured

    def memory_seconds(self, num_bytes: float) -> float:
        return _on_curve(self.measured.memory, num_bytes)

    def host_seconds(self, what: HostWork) -> float:
        return float(getattr(self.measured, f"{what}_seconds"))

    def idle_share(self, bubble_share: float) -> float:
        # While a rank waits, the ranks that share its core are faster, so a core is idle only if all of them wait.
        return max(0.0, (1 + bubble_share) / self.measured.ranks_per_core - 1)

    @cached_property
    def most_flops_per_s(self) -> float:
        rates = [rate for one in self.measured.attention for _, rate in (*one.forward, *one.backward)]
        return max([*rates, *self._best_rates.values(), *self.measured.convolution.values()])

    @cached_property
    def _best_memory(self) -> float:
        return max(num_bytes / seconds for num_bytes, seconds in self.measured.memory)

    def _best_rate(self, dtype: str) -> float:
        return _of_dtype(self._best_rates, dtype)

    @cached_property
    def _best_rates(self) -> dict[str, float]:
        tables = self.measured.products.items()
        return {dtype: max(r for plane in rates for row in plane for r in row) for dtype, rates in tables}

    def _of_product(self, work: Work) -> float:
        products, rows, inner, columns = work.sizes
        # A batch of products counts as one product with more rows.
        at = products * rows, inner, columns
        rate = _on_grid(self.measured.sizes, _of_dtype(self.measured.products, work.dtype), at)
        return 2.0 * math.prod(work.sizes) / rate

    def _of_flops(self, work: Work, flops: float) -> float:
        if work.kind == "convolution":
            return flops / _of_dtype(self.measured.convolution, work.dtype)
        _, keys, width, _ = work.sizes
        measured = _of_dtype(self._attention, work.dtype)
        curves = [(one.width, one.backward if work.kind == "attention_backward" else one.forward) for one in measured]
        return flops / _between([(of_width, _between(points, keys)) for of_width, points in curves], width)

    @cached_property
    def _attention(self) -> dict[str, list[MeasuredAttention]]:
        by_dtype: dict[str, list[MeasuredAttention]] = {}
        for one in sorted(self.measured.attention, key=lambda one: one.width):
            by_dtype.setdefault(one.dtype, []).append(one)
        return by_dtype

    def _least_of_flops(self, work: Work) -> float:
        return work.times * work.sizes[0] / self.most_flops_per_s

    def collective_seconds(self, kind: CollectiveKind, ring: Ring, sent_bytes: float) -> float:
        if (nearest := self._nearest(kind, ring)) is None:
            return super().collective_seconds(kind, ring, sent_bytes)
        # A ring that sends a larger share across nodes than the measured one takes proportionally longer.
        measured_share = nearest.crossings / nearest.ranks
        more = float(ring.across) / measured_share if measured_share else 1.0
        return _on_curve(nearest.points, sent_bytes) * max(1.0, more)

    def _least_per_byte(self, kind: CollectiveKind, ring: Ring) -> float:
        if (nearest := self._nearest(kind, ring)) is None:
            return super()._least_per_byte(kind, ring)
        return min(seconds / num_bytes for num_bytes, seconds in nearest.points)

    def _knows(self, ring: Ring) -> bool:
        return any(self._nearest(kind, ring) for kind in get_args(CollectiveKind)) or super()._knows(ring)

    def _nearest(self, kind: CollectiveKind, ring: Ring) -> MeasuredCollective | None:
        """Return the measured collective of this kind with the nearest number of ranks. If the kind was not measured,
        because the backend does not have it, return a collective of another kind. Only collectives on the links of
        `ring` count: within a node, or across nodes. None: nothing was measured on such links."""
        alike = [c for c in self.measured.collectives if (c.crossings > 0) == (ring.crossings > 0)]
        alike = [c for c in alike if c.kind == kind] or alike
        return min(alike, key=lambda c: abs(math.log(c.ranks / ring.size)), default=None)


def _of_dtype(table: Mapping[str, T], dtype: str) -> T:
    """Return the entry of a dtype in a table of speeds. If float16 has no entry, return the entry of bfloat16. If there
    is still no entry, return the entry of float32."""
    alike = {"float16": "bfloat16"}
    return next(table[name] for name in (dtype, alike.get(dtype, ""), "float32") if name in table)


def _on_grid(sizes: Sequence[int], rates: Sequence[Sequence[Sequence[float]]], at: Sequence[int]) -> float:
    """Return the rate at the three sizes `at`: an interpolation in a grid of rates, linear in the logarithms. A size
    beyond the grid counts as the nearest size of the grid."""
    places = []
    for size in at:
        index = min(max(bisect_left(sizes, size) - 1, 0), len(sizes) - 2)
        low, high = sizes[index : index + 2]
        places.append((index, math.log(min(max(size, low), high) / low) / math.log(high / low)))
    total = 0.0
    for corner in range(8):
        weight, rate = 1.0, rates
        for axis, (index, share) in enumerate(places):
            upper = corner >> axis & 1
            weight *= share if upper else 1 - share
            rate = rate[index + upper]  # type: ignore[assignment]
        total += weight * math.log(rate)  # type: ignore[arg-type]
    return math.exp(total)


def _on_curve(points: Points, num_bytes: float) -> float:
    """Return the seconds for `num_bytes`, interpolated between the points of a curve. Below the first point, return its
    seconds. Beyond the last point, the seconds grow in proportion to the bytes."""
    last, _ = points[-1]
    return _between(points, num_bytes) * max(1.0, num_bytes / last)


def _between(points: Sequence[tuple[float, float]], size: float) -> float:
    """Return the value at `size`: an interpolation on a curve, linear in the logarithms. Beyond the curve, return the
    value of its nearest end."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    index = bisect_left(points, (size,))
    (x, low), (y, high) = points[index - 1], points[index]
    return low * (high / low) ** (math.log(size / x) / math.log(y / x))
