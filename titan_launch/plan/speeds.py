"""Speeds of a device: seconds of the operations on a tape, and of collectives. No torch.

Without measurements, an operation takes as long as the slower of its FLOPs and its bytes (a roofline), at the share of
the data sheet's figures that large operations reach. `titan-launch measure-device` measures the speeds of a machine.
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

from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.core.errors import config_error

if TYPE_CHECKING:
    from titan_launch.plan.communication import Ring

T = TypeVar("T")

Kernels = Literal["cuda", "cpu"]
"""The device family. It decides which tensors each operation saves for backward."""

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]

OF_AXIS: Mapping[str, tuple[CollectiveKind, ...]] = {
    "tensor": ("all_gather", "reduce_scatter"),
    "context": ("all_gather", "reduce_scatter"),
    "expert": ("all_to_all",),
    "pipeline": ("send",),
}
"""The collectives along an axis, which it calls equally often."""

Points = tuple[tuple[float, float], ...]
"""Pairs (bytes, seconds), or of attention (tokens, FLOP/s), the smallest first."""


class Work(NamedTuple):
    """Equal operations that compute."""

    kind: Literal["product", "convolution", "attention", "attention_backward", "memory"]

    dtype: str
    """Of the inputs; empty for `memory`."""

    sizes: tuple[int, ...]
    """product: (products, rows, inner size, columns). convolution: (FLOPs,). attention: (FLOPs, keys, width of a head,
    1 if it is causal, so that half of the pairs which count are computed). memory, which is every other operation:
    (bytes that it reads and writes,)."""

    times: int = 1


@dataclass(frozen=True)
class MeasuredAttention:
    """FLOP/s of causal attention by the tokens of a sequence. Every pair of tokens counts."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    dtype: str
    width: int
    """Of a head."""

    forward: Points
    backward: Points


@dataclass(frozen=True)
class MeasuredCollective:
    """Seconds of a collective of a number of ranks."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    kind: CollectiveKind
    ranks: int
    crossings: int
    """Hops of the group's ring that lead to other nodes."""

    points: Points
    """By the bytes that a rank sends, if collectives use rings."""


@dataclass(frozen=True)
class Measured:
    """Measurements of `titan-launch measure-device`. All ranks of the machine work at the same time."""

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    device: str
    """`cpu`, or the name that the driver reports."""

    ranks: int
    versions: Mapping[str, str]
    created: str
    sizes: tuple[int, ...]
    """Rows, inner sizes and columns of the measured products."""

    products: Mapping[str, tuple[tuple[tuple[float, ...], ...], ...]]
    """FLOP/s of products by dtype, rows, inner size and columns."""

    attention: tuple[MeasuredAttention, ...]

    convolution: Mapping[str, float]
    """FLOP/s of convolutions by dtype."""

    memory: Points
    """Seconds of an elementwise operation, by the bytes that it reads and writes."""

    collectives: tuple[MeasuredCollective, ...]

    unit_seconds: float
    """Seconds that FSDP2's hooks of a unit take in a forward and a backward."""

    parameter_seconds: float
    """Seconds that the host takes for a parameter in clipping and update."""

    operation_seconds: float
    """Seconds that the host takes for an operation of a model, beside the operation: modules and autograd."""

    exchange_seconds: float
    """Seconds that the host takes for a collective of tensor parallelism, beside the collective: DTensor."""

    @property
    def kernels(self) -> Kernels:
        """The device family."""
        return "cpu" if self.device == "cpu" else "cuda"

    def dumps(self) -> str:
        """Return the measurements as JSON."""
        import json  # imported here, because checks of a job file import this module

        return json.dumps(asdict(self), indent=1)


def read_measured(path: str) -> Measured:
    """Return the measurements in the file of `planner.speeds`. Raises ConfigError for a file that cannot be read, and
    for measurements that are incomplete."""
    from pydantic import TypeAdapter  # imported here, because checks of a job file import this module

    from titan_launch.core.files import read_regular
    from titan_launch.core.json_files import JsonError, parse_as, reason_of

    try:
        measured = parse_as(TypeAdapter(Measured), read_regular(Path(path), _MOST_BYTES))
    except (OSError, JsonError) as error:
        reason = f"cannot be read ({reason_of(error)}); titan-launch measure-device writes such a file"
        raise config_error(("planner", "speeds"), reason, path) from None
    if problem := _problem(measured):
        raise config_error(("planner", "speeds"), f"{problem}; measure the device again", path)
    return measured


_MOST_BYTES = 1 << 22


def _problem(measured: Measured) -> str | None:
    """Return what is wrong with measurements; None if nothing is."""
    sizes = measured.sizes
    if len(sizes) < 2 or list(sizes) != sorted({*sizes}) or sizes[0] < 1:
        return "sizes: must be two or more numbers, the smallest first"
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
        return "ranks: must be at least 1, and 2 in a collective, with at most as many crossings"
    for name in ("unit_seconds", "parameter_seconds", "operation_seconds", "exchange_seconds"):
        if getattr(measured, name) < 0:
            return f"{name}: must not be negative"
    return None


@dataclass(frozen=True)
class Link:
    """The connection between the ranks of a group."""

    bytes_per_s: float
    base_seconds: float
    """Seconds before the first byte."""

    hop_seconds: float
    """Seconds of each step of a ring."""


_LINKS = {"within": (0.8, 8.4e-6, 3.4e-6), "across": (0.93, 8.4e-6, 14e-6)}
"""Share of the bandwidth that large collectives reach, base seconds, and seconds of a hop. The share within a node is
that of 8 x H200 (361 GB/s, ml-engineering, network/README.md), across nodes that of NDR adapters (46 to 48 GB/s,
nccl-tests issue 290). Seconds are NCCL's own, for rings with the protocol Simple (src/graph/tuning.cc)."""


def link_of(kind: str, gb_per_s: float | None) -> Link:
    """Return the link `within` or `across` nodes of a data sheet's bandwidth. None: the bandwidth is not known, and the
    link is not used."""
    share, base, hop = _LINKS[kind]
    return Link(math.inf if gb_per_s is None else 1e9 * gb_per_s * share, base, hop)


@dataclass(frozen=True)
class Speeds(ABC):
    """Speeds of a device and of the links between its ranks."""

    source: str
    """In words."""

    within: Link
    across: Link

    overlaps: bool = True
    """False if FSDP2's collectives use the cores that compute."""

    _known: dict[Work, float] = field(default_factory=dict, compare=False, repr=False)

    # Operations

    def seconds(self, work: Work) -> float:
        """Return the seconds of all operations of a tape's event."""
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
        """Return a time that these operations do not fall below, if more rows make them more efficient."""
        if work.kind == "product":
            return work.times * 2 * math.prod(work.sizes) / self._best_rate(work.dtype)
        if work.kind == "memory":
            return work.times * work.sizes[0] / self._best_memory
        return self._least_of_flops(work)

    def of_work(self, work: Mapping[Work, int], microbatches: int) -> tuple[float, float]:
        """Return the seconds and the least seconds of operations in a number of microbatches, with the host's. `work`:
        numbers of single operations."""
        host = 0.0 if self.overlaps else self.host_seconds("operation")
        seconds = sum(times * (self.seconds(one) + host) for one, times in work.items())
        least = sum(times * self.least_seconds(one) for one, times in work.items())
        return microbatches * seconds, microbatches * least

    @abstractmethod
    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds of an elementwise operation that reads and writes a number of bytes."""

    @abstractmethod
    def host_seconds(self, what: Literal["unit", "parameter", "operation", "exchange"]) -> float:
        """Return the seconds of the host for an FSDP2 unit, a parameter, an operation, or a collective of tensor
        parallelism. On a GPU they overlap with computation."""

    @property
    @abstractmethod
    def most_flops_per_s(self) -> float:
        """FLOP/s of the fastest operations."""

    @property
    @abstractmethod
    def _best_memory(self) -> float:
        """Bytes per second of the most efficient elementwise operation."""

    @abstractmethod
    def _best_rate(self, dtype: str) -> float:
        """Return the largest FLOP/s of a product."""

    @abstractmethod
    def _of_product(self, work: Work) -> float: ...

    @abstractmethod
    def _of_flops(self, work: Work, flops: float) -> float:
        """Return the seconds of attention or of a convolution, which computes a number of FLOPs."""

    @abstractmethod
    def _least_of_flops(self, work: Work) -> float: ...

    # Collectives

    def collective_seconds(self, kind: CollectiveKind, ring: Ring, sent_bytes: float) -> float:
        """Return the seconds of a collective in which a rank sends `sent_bytes`, if collectives use rings."""
        hops = ring.size - 1 if kind in ("all_gather", "reduce_scatter") else math.log2(max(2, ring.size))
        share = _crossing_share(kind, ring)
        seconds = [
            sent_bytes * part / link.bytes_per_s + hops * part * link.hop_seconds
            for part, link in ((1 - share, self.within), (share, self.across))
        ]
        base = (self.across if ring.crossings else self.within).base_seconds
        return base + max(seconds)

    def least_collective_seconds(self, kinds: Sequence[CollectiveKind], ring: Ring, sent_bytes: float) -> float:
        """Return a time that the mean of these collectives does not fall below if more bytes are sent at a time."""
        return sent_bytes * sum(self._least_per_byte(kind, ring) for kind in kinds) / len(kinds)

    def _least_per_byte(self, kind: CollectiveKind, ring: Ring) -> float:
        share = _crossing_share(kind, ring)
        return max((1 - share) / self.within.bytes_per_s, share / self.across.bytes_per_s)

    def knows(self, rings: Iterable[Ring]) -> bool:
        """Return True if the speed of each link between the ranks of rings is measured, or known from elsewhere."""
        return all(self._knows(ring) for ring in rings if ring.size > 1)

    def _knows(self, ring: Ring) -> bool:
        used = [self.within] * (ring.crossings < ring.size) + [self.across] * (ring.crossings > 0)
        return all(link.bytes_per_s < math.inf for link in used)


@dataclass(frozen=True, kw_only=True)
class DataSheetSpeeds(Speeds):
    """Speeds of the figures of a data sheet, at the shares of them that large operations reach."""

    flops_per_s: Mapping[str, float]
    """FLOP/s of large products by dtype."""

    shares: Mapping[str, float]
    """FLOP/s of the other kinds of work in proportion to that of large products."""

    memory_bytes_per_s: float
    """Bandwidth of large elementwise operations."""

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds of an elementwise operation that reads and writes a number of bytes."""
        return OPERATION_SECONDS + num_bytes / self.memory_bytes_per_s

    def host_seconds(self, what: Literal["unit", "parameter", "operation", "exchange"]) -> float:
        """Return 0: the work of the host is not known."""
        return 0.0

    @property
    def most_flops_per_s(self) -> float:
        """FLOP/s of the fastest operations."""
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
        return self.seconds(work)


OPERATION_SECONDS = 4e-6
"""Seconds of the smallest operation on a GPU."""


@dataclass(frozen=True, kw_only=True)
class MeasuredSpeeds(Speeds):
    """Measured speeds. Links without a measurement have those of a data sheet, or of the job."""

    measured: Measured

    def memory_seconds(self, num_bytes: float) -> float:
        """Return the seconds of an elementwise operation that reads and writes a number of bytes."""
        return _on_curve(self.measured.memory, num_bytes)

    def host_seconds(self, what: Literal["unit", "parameter", "operation", "exchange"]) -> float:
        """Return the measured seconds of the host."""
        return float(getattr(self.measured, f"{what}_seconds"))

    @cached_property
    def most_flops_per_s(self) -> float:
        """FLOP/s of the fastest operations."""
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
        # Products of a batch run one after another, or fill the device together, as more rows do.
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
        """Return the seconds of a collective in which a rank sends `sent_bytes`, if collectives use rings."""
        if (nearest := self._nearest(kind, ring)) is None:
            return super().collective_seconds(kind, ring, sent_bytes)
        measured_share = nearest.crossings / nearest.ranks
        more = _crossing_share(kind, ring) / measured_share if measured_share else 1.0
        return _on_curve(nearest.points, sent_bytes) * max(1.0, more)

    def _least_per_byte(self, kind: CollectiveKind, ring: Ring) -> float:
        if (nearest := self._nearest(kind, ring)) is None:
            return super()._least_per_byte(kind, ring)
        return min(seconds / num_bytes for num_bytes, seconds in nearest.points)

    def _knows(self, ring: Ring) -> bool:
        return any(self._nearest(kind, ring) for kind in get_args(CollectiveKind)) or super()._knows(ring)

    def _nearest(self, kind: CollectiveKind, ring: Ring) -> MeasuredCollective | None:
        """Return the measured collective that is nearest to that of a ring. A kind that the backend does not have takes
        as long as another one."""
        alike = [c for c in self.measured.collectives if (c.crossings > 0) == (ring.crossings > 0)]
        alike = [c for c in alike if c.kind == kind] or alike
        return min(alike, key=lambda c: abs(math.log(c.ranks / ring.size)), default=None)


def _crossing_share(kind: CollectiveKind, ring: Ring) -> float:
    """Return the share of the sent bytes that goes to other nodes. In an all-to-all, a rank sends as much to each other
    rank of its group, and `Ring.crossings` are those on other nodes (`plan.communication.Rings.expert`)."""
    return ring.crossings / max(1, ring.size - (kind == "all_to_all"))


def _of_dtype(table: Mapping[str, T], dtype: str) -> T:
    """Return the speed of a dtype, or of the one that stands for it."""
    alike = {"float16": "bfloat16"}
    return next(table[name] for name in (dtype, alike.get(dtype, ""), "float32") if name in table)


def _on_grid(sizes: Sequence[int], rates: Sequence[Sequence[Sequence[float]]], at: Sequence[int]) -> float:
    """Return a rate between those of a grid, by linear interpolation of logarithms. Beyond the grid, its border
    counts."""
    places = [_place(sizes, min(max(size, sizes[0]), sizes[-1])) for size in at]
    total = 0.0
    for corner in range(8):
        weight, rate = 1.0, rates
        for axis, (index, share) in enumerate(places):
            upper = corner >> axis & 1
            weight *= share if upper else 1 - share
            rate = rate[index + upper]  # type: ignore[assignment]
        total += weight * math.log(rate)  # type: ignore[arg-type]
    return math.exp(total)


def _place(sizes: Sequence[int], size: float) -> tuple[int, float]:
    """Return the interval of a size, and its place there between 0 and 1."""
    index = min(max(bisect_left(sizes, size) - 1, 0), len(sizes) - 2)
    low, high = sizes[index], sizes[index + 1]
    return index, math.log(size / low) / math.log(high / low)


def _on_curve(points: Points, num_bytes: float) -> float:
    """Return the seconds between those of a curve. Fewer bytes take as long as the fewest; more bytes, proportionally
    longer than the most."""
    last, _ = points[-1]
    return _between(points, num_bytes) * max(1.0, num_bytes / last)


def _between(points: Sequence[tuple[float, float]], size: float) -> float:
    """Return the value between those of a curve, by linear interpolation of logarithms; beyond it, that of its end."""
    if size <= points[0][0]:
        return points[0][1]
    if size >= points[-1][0]:
        return points[-1][1]
    index = bisect_left(points, (size,))
    (x, low), (y, high) = points[index - 1], points[index]
    return low * (high / low) ** (math.log(size / x) / math.log(y / x))
