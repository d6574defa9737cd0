"""Active memory of one rank in an optimizer step, counted while the step is replayed or traced. This module does not
import torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from titan_launch.config.optimizers import ALGORITHMS, GroupSizes, has_master
from titan_launch.config.sections.training import EMAConfig, OptimizerConfig, TrainingConfig
from titan_launch.core.torch_release import KEEPS_WORKSPACES
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.layout import Layout
from titan_launch.plan.param_groups import is_mixed
from titan_launch.plan.replica_shards import ExchangedUnit


class Category(IntEnum):
    """A kind of memory. The ledger counts the bytes of each category."""

    PARAMETERS = 0
    """Sharded parameters in the storage dtype."""

    OPTIMIZER = 1
    """Optimizer state."""

    GRADIENTS = 2
    """Sharded gradients after the reduce-scatter, also before the all-reduce between replicas (HSDP)."""

    UNSHARDED_GRADIENTS = 3
    """Unsharded gradients of this microbatch, and in the mode `deferred` also of all earlier microbatches."""

    UNSHARDED_PARAMETERS = 4
    """Unsharded parameters in the compute dtype."""

    ALL_GATHER = 5
    """Input and output buffers of all-gathers, before the parameters are copied out."""

    REDUCE_SCATTER = 6
    """Buffers of reduce-scatters and all-reduces."""

    ACTIVATIONS = 7
    """Tensors that forward and activation checkpointing allocate: temporaries, and tensors saved for backward."""

    BACKWARD = 8
    """Tensors that backward allocates, mostly gradients of activations."""

    INPUTS = 9
    """All tensors of the microbatch, such as token ids and targets."""

    BUFFERS = 10
    """The model's buffers."""

    OPTIMIZER_TEMPORARIES = 11
    """Temporary tensors of the optimizer's update."""

    EMA = 12
    """Moving average of the weights."""

    OFFLOADED = 13
    """Saved tensors in host memory (activation offloading)."""

    WORKSPACE = 14
    """Workspaces of cuBLAS (`Footprint.with_workspace`)."""

    @property
    def label(self) -> str:
        """Name in tables: `unsharded gradients`."""
        return self.name.lower().replace("_", " ")


MICROBATCHES = 4
"""Largest number of microbatches in a replay, a trace or a trial without pipeline parallelism. Memory is the same from
the third microbatch to the last but one."""

SMALLEST_OFFLOADED = 1 << 16
"""Bytes of the smallest storage that activation offloading copies to the host. The copy of a smaller storage takes
longer to start than to run."""

_STREAMS = {Category.ALL_GATHER: 1, Category.GRADIENTS: 2}
"""Index of the CUDA stream that allocates a category. Other categories are in stream 0, the compute stream. CUDA's
caching allocator does not share memory between streams."""

_STREAM_OF = tuple(_STREAMS.get(category, 0) for category in Category)


class StepPoint(NamedTuple):
    """A point of a step: microbatch, phase and module."""

    microbatch: int
    """Index from 0. The optimizer's update has the index of the last microbatch."""

    phase: str
    """`forward`, `loss`, `backward` or `optimizer`; `step` if a run measures a whole step at once."""

    unit: str
    """Path of the module that runs: a block, or a module beside the blocks, such as `tok_embeddings` or `output`.
    Empty: the whole model."""

    def __str__(self) -> str:
        if self.phase == "optimizer":
            return "optimizer update"
        module = f" of {self.unit}" if self.unit else ""
        return f"{self.phase}{module} in microbatch {self.microbatch + 1}"


class Peak(NamedTuple):
    """The memory at one point of a step: a local maximum, the highest of all local maxima, or the memory during a
    matrix product."""

    total: float
    """Bytes of all categories."""

    by_category: tuple[float, ...]
    """Bytes of each `Category` at the peak. Their sum is `total`."""

    by_stream: tuple[float, ...]
    """Peak bytes of each CUDA stream (`_STREAMS`) since memory was last freed; in `Footprint.peaks`, over the whole
    point. The streams may reach their peaks at different times."""

    in_product: bool = False
    """True if this is the memory during a matrix product. Such an entry need not be a local maximum."""


class Ledger:
    """Live bytes by category, with all local maxima at every point of a step.

    ledger.enter(StepPoint(0, "forward", "layers.0"))
    ledger.allocate(4096, Category.ACTIVATIONS)
    ledger.free(4096, Category.ACTIVATIONS)
    footprint = ledger.footprint()
    """

    def __init__(self, on_host: Collection[Category] = ()) -> None:
        """`on_host`: categories in host memory (see the function `on_host`). Only the peak of their sum is counted."""
        self.on_host = frozenset(on_host)
        self._host = self._host_peak = 0
        self.live = [0] * len(Category)
        self.total = 0
        self._streams = [0, 0, 0]
        self._stream_peaks = [0, 0, 0]
        self._is_rising = False
        self._maxima: dict[StepPoint, list[Peak]] = {}
        self._maxima_here: list[Peak] = []

    def allocate(self, num_bytes: int, category: Category) -> None:
        if category in self.on_host:
            self._host += num_bytes
            self._host_peak = max(self._host_peak, self._host)
            return
        stream = _STREAM_OF[category]
        streams = self._streams
        if not self._is_rising:
            self._is_rising = True
            self._stream_peaks = list(streams)
        self.live[category] += num_bytes
        self.total += num_bytes
        streams[stream] += num_bytes
        if streams[stream] > self._stream_peaks[stream]:
            self._stream_peaks[stream] = streams[stream]

    def free(self, num_bytes: int, category: Category) -> None:
        if category in self.on_host:
            self._host -= num_bytes
            return
        self._end_rise()
        self.live[category] -= num_bytes
        self.total -= num_bytes
        self._streams[_STREAM_OF[category]] -= num_bytes

    def move(self, num_bytes: int, old: Category, new: Category) -> None:
        """Count bytes under another category, and in the stream of that category. This is a simplification: in PyTorch,
        memory stays with the stream that allocated it."""
        if {old, new} & self.on_host:
            self.free(num_bytes, old)
            self.allocate(num_bytes, new)
        elif old != new:
            self._streams[_STREAM_OF[old]] -= num_bytes
            self.live[old] -= num_bytes
            self.total -= num_bytes
            self.allocate(num_bytes, new)

    def enter(self, point: StepPoint) -> None:
        """Begin a point of the step. Later maxima of memory belong to this point."""
        self._end_rise()
        self._maxima_here = self._maxima.setdefault(point, [])
        self._stream_peaks = list(self._streams)
        self._is_rising = True

    def product(self) -> None:
        """Note the memory during a matrix product, after its result has been allocated."""
        self._maxima_here.append(Peak(self.total, tuple(self.live), tuple(self._stream_peaks), in_product=True))

    def footprint(self) -> Footprint:
        """Return the maxima of all points so far."""
        self._end_rise()
        maxima = {point: tuple(maxima) for point, maxima in self._maxima.items()}
        return Footprint(maxima, host_bytes=self._host_peak)

    def _end_rise(self) -> None:
        """Note a local maximum if memory has risen since the last maximum. Called before memory is freed, and at the
        end of a point."""
        if self._is_rising:
            self._is_rising = False
            self._maxima_here.append(Peak(self.total, tuple(self.live), tuple(self._stream_peaks)))


@dataclass(frozen=True)
class Footprint:
    """Active memory of one rank in a step. The allocator reserves more (`plan.report.modes.estimate_reserved`)."""

    maxima: Mapping[StepPoint, Sequence[Peak]]
    """The entries of every point, in order: local maxima of memory, and the memory during matrix products."""

    pipeline_rank: int | None = None
    """Pipeline rank; None without pipeline parallelism."""

    host_bytes: int = 0
    """Peak bytes of the tensors that CPU offload and activation offloading keep in host memory."""

    def with_workspace(self, num_bytes: int) -> Footprint:
        """Return the footprint plus the workspaces of cuBLAS, `num_bytes` each, which PyTorch allocates. Before torch
        2.15 two workspaces always exist. From 2.15 on, each matrix product allocates a workspace and frees it."""

        def grown(peak: Peak) -> Peak:
            if KEEPS_WORKSPACES:  # one for the thread of forward, and one for the thread of backward
                return _grown(peak, 2 * num_bytes, Category.WORKSPACE)
            return _grown(peak, num_bytes, Category.WORKSPACE) if peak.in_product else peak

        maxima = {point: [grown(peak) for peak in maxima] for point, maxima in self.maxima.items()}
        return replace(self, maxima=maxima)

    @cached_property
    def peaks(self) -> Mapping[StepPoint, Peak]:
        """The peak at every point of the step."""
        return {point: _highest(maxima) for point, maxima in self.maxima.items()}

    @property
    def peak_point(self) -> StepPoint:
        """Point of the step with the peak memory."""
        return max(self.peaks, key=lambda point: self.peaks[point].total)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the step in bytes."""
        return round(self.peaks[self.peak_point].total)

    @property
    def by_category(self) -> dict[Category, int]:
        """Bytes of each category at the peak, without empty categories."""
        at_peak = zip(Category, self.peaks[self.peak_point].by_category, strict=True)
        return {category: round(held) for category, held in at_peak if round(held)}

    @property
    def stream_bytes(self) -> int:
        """Sum of the peaks of all streams: the smallest number of bytes that PyTorch's CUDA allocator must reserve."""
        return round(sum(max(peak.by_stream[stream] for peak in self.peaks.values()) for stream in range(3)))

    def by_phase(self) -> dict[str, int]:
        """Return the peak memory in bytes of each phase: forward, loss, backward, optimizer."""
        phases: dict[str, int] = {}
        for point, peak in self.peaks.items():
            phases[point.phase] = max(phases.get(point.phase, 0), round(peak.total))
        return phases


def extrapolate(shorter: Footprint, longer: Footprint, factor: float) -> Footprint | None:
    """Return the footprint at another depth: `shorter + factor * (longer - shorter)` for each local maximum of memory.
    Return None if the two footprints have different numbers of local maxima at a point.

    Memory at a local maximum is an affine function of the number of repeated blocks. The peak of a step point is not
    affine, because another local maximum may be the highest at another depth. So all local maxima are extrapolated. For
    each point, the result has the highest maximum in a matrix product, and the highest other maximum.

    Blocks at the front and at the back must have the same names at all depths. Points that only one of the footprints
    has are skipped. They are in the middle of the model, and their memory is between the memory of the neighbouring
    points.
    """
    maxima = {}
    for point in (point for point in shorter.maxima if point in longer.maxima):
        if len(shorter.maxima[point]) != len(longer.maxima[point]):
            return None
        pairs = list(zip(shorter.maxima[point], longer.maxima[point], strict=True))
        groups = ([pair for pair in pairs if pair[0].in_product is product] for product in (True, False))
        maxima[point] = [_highest_along(group, factor) for group in groups if group]
    return Footprint(maxima, host_bytes=round(_line(shorter.host_bytes, longer.host_bytes, factor)))


def with_growth(footprint: Footprint, longer: Footprint, factor: float) -> Footprint:
    """Return the footprint of a step with more microbatches, extrapolated from the steps `footprint` and `longer`
    with fewer microbatches. `factor`: the result of `pipeline.growth_factor`.

    The peak of each phase is extrapolated linearly, and its growth is added to every maximum of that phase in the first
    footprint. The growth counts as activations.
    """
    before, after = footprint.by_phase(), longer.by_phase()
    growth = {phase: factor * (after[phase] - peak) for phase, peak in before.items()}
    return Footprint(
        {
            point: [_grown(x, growth[point.phase], Category.ACTIVATIONS) for x in maxima]
            for point, maxima in footprint.maxima.items()
        },
        host_bytes=round(_line(footprint.host_bytes, longer.host_bytes, factor)),
    )


def _grown(peak: Peak, num_bytes: float, category: Category) -> Peak:
    """Return a peak with `num_bytes` more of a category."""
    held, streams = list(peak.by_category), list(peak.by_stream)
    held[category] += num_bytes
    streams[_STREAM_OF[category]] += num_bytes
    return Peak(peak.total + num_bytes, tuple(held), tuple(streams), peak.in_product)


def _highest(maxima: Sequence[Peak]) -> Peak:
    """Return the highest of a point's maxima, with the peak of each stream over all maxima."""
    streams = zip(*(maximum.by_stream for maximum in maxima), strict=True)
    return max(maxima, key=lambda maximum: maximum.total)._replace(by_stream=tuple(map(max, streams)))


def _highest_along(pairs: Sequence[tuple[Peak, Peak]], factor: float) -> Peak:
    """Return the highest of a point's extrapolated maxima, with the peak of each stream over all maxima."""
    shorter, longer = max(pairs, key=lambda pair: _line(pair[0].total, pair[1].total, factor))
    own = zip(shorter.by_category, longer.by_category, strict=True)
    streams = zip(*(zip(a.by_stream, b.by_stream, strict=True) for a, b in pairs), strict=True)
    return Peak(
        _line(shorter.total, longer.total, factor),
        tuple([_line(x, y, factor) for x, y in own]),
        tuple([max([_line(x, y, factor) for x, y in stream]) for stream in streams]),
        shorter.in_product,
    )


def _line(x: float, y: float, factor: float) -> float:
    return x + factor * (y - x)


HELD = (Category.PARAMETERS, Category.OPTIMIZER, Category.EMA)
"""Categories that a rank holds during the whole run."""


_OF_CPU_OFFLOAD = frozenset({*HELD, Category.GRADIENTS, Category.OPTIMIZER_TEMPORARIES})


def on_host(training: TrainingConfig, kernels: Kernels) -> frozenset[Category]:
    """Return the categories that are in the host memory of a job on GPUs. On a CPU, the set is empty."""
    if kernels != "cuda":
        return frozenset()
    return frozenset({Category.OFFLOADED}) | (_OF_CPU_OFFLOAD if training.enable_cpu_offload else frozenset())


def state_bytes(config: OptimizerConfig, groups: Sequence[GroupSizes]) -> int:
    """Return the bytes of optimizer state tensors and fp32 master weights, without step counters."""
    total = 0
    for settings, shards in groups:
        num_tensors = len(ALGORITHMS[settings.algorithm].state(config))
        for shard in shards:
            master = 4 * shard.num_elements if has_master(config, shard.dtype) else 0
            total += num_tensors * shard.state_size(config) + master
    return total


def ema_bytes(config: EMAConfig, groups: Sequence[GroupSizes]) -> int:
    """Return the bytes of the moving average of the weights in float32; 0 if there is no average. (The update of the
    average is never the peak, because the gradients are freed before the update.)"""
    return 0 if config.decay is None else 4 * sum(shard.num_elements for group in groups for shard in group.shards)


def temporary_bytes(config: OptimizerConfig, groups: Sequence[GroupSizes], ranks: int) -> int:
    """Return the largest number of bytes that an update of the optimizer allocates at once. `ranks`: number of ranks
    over which the optimizer state of a parameter is sharded."""
    by_algorithm: dict[str, list[GroupSizes]] = {}
    for group in groups:
        by_algorithm.setdefault(group.settings.algorithm, []).append(group)
    in_pytorch = [group for group in groups if ALGORITHMS[group.settings.algorithm].pytorch is not None]
    mixed = is_mixed(config, (shard.dtype for group in in_pytorch for shard in group.shards))
    peaks = []
    for name, group_sizes in by_algorithm.items():
        row = ALGORITHMS[name]
        temporaries = row.temporaries if mixed or row.pytorch is None else row.pytorch.temporaries
        peaks.append(temporaries(group_sizes, config, ranks))
    return max(peaks, default=0)


def book_update(
    ledger: Ledger, temporaries: int, units: Iterable[ExchangedUnit], layout: Layout, gradients_left: bool
) -> None:
    """Count the memory of the optimizer's update.

    `temporaries`: result of `temporary_bytes`. `units`: the units whose gradients replicas exchange; empty if the
    optimizer is not sharded over replicas. `gradients_left`: True if the gradients were exchanged during backward;
    False if they are exchanged now (`gradients_leave_early`).
    """
    units, replicas = list(units), layout.optimizer_replicas
    # An exchange begins with the largest unit. Later buffers are smaller, and the gradients of earlier units have been
    # freed, so only the buffer of the largest unit is counted. The number of local maxima then does not depend on the
    # number of units (`extrapolate`).
    if units and not gradients_left:
        _book_briefly(ledger, replicas * max(unit.reduced for unit in units), Category.REDUCE_SCATTER)
        ledger.free(sum(unit.gradients for unit in units), Category.GRADIENTS)
        ledger.allocate(sum(unit.chunks for unit in units), Category.GRADIENTS)
    _book_briefly(ledger, temporaries, Category.OPTIMIZER_TEMPORARIES)
    if units:
        _book_briefly(ledger, replicas * max(unit.chunks for unit in units), Category.ALL_GATHER)


def _book_briefly(ledger: Ledger, num_bytes: int, category: Category) -> None:
    ledger.allocate(num_bytes, category)
    ledger.free(num_bytes, category)
