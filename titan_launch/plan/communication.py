"""Collectives of a rank in one step: number, bytes and links. No torch.

FSDP2's collectives follow from the units and are computed here. Collectives of tensor, context and pipeline parallelism
are counted in a trace.

The numbers are exact if every unit runs in every forward, as in the models of this package, and if every trained
parameter gets a gradient. Only the collectives of units count. BatchNorm's statistics, the target count, clipping and
metrics have collectives of their own, of a few numbers each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from typing import Any

from titan_launch.config.sections.base import DTYPE_BYTES
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan, TensorInfo, Unit, parameters_by_unit


@dataclass(frozen=True)
class Collectives:
    """How many calls of each kind."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.all_gathers + self.reduce_scatters + self.all_reduces

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(
            self.all_gathers + other.all_gathers,
            self.reduce_scatters + other.reduce_scatters,
            self.all_reduces + other.all_reduces,
        )

    def __str__(self) -> str:
        counts = {"AG": self.all_gathers, "RS": self.reduce_scatters, "AR": self.all_reduces}
        return " + ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"


@dataclass(frozen=True)
class Exchange:
    """What the ranks along an axis exchange that share the work on the same samples, as one of them sends it."""

    calls: int = 0

    sent_bytes: int = 0
    """What the rank sends, if collectives go round in rings."""

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.calls + other.calls, self.sent_bytes + other.sent_bytes)


@dataclass(frozen=True)
class Traffic:
    """Calls, and the bytes of their buffers as one rank sees them."""

    collectives: Collectives = field(default_factory=Collectives)

    all_gather_bytes: int = 0
    """Of what is received: whole parameters in the compute dtype, padded."""

    reduce_scatter_bytes: int = 0
    """Of what is sent: whole gradients in the reduce dtype, padded."""

    all_reduce_bytes: int = 0
    """Of what is reduced in place: sharded gradients in the reduce dtype, padded (HSDP)."""

    tensor: Exchange = field(default_factory=Exchange)
    """Along the tensor axis: activations that are gathered, summed and scattered."""

    context: Exchange = field(default_factory=Exchange)
    """Along the context axis: keys and values, and their gradients."""

    pipeline: Exchange = field(default_factory=Exchange)
    """Along the pipeline axis: activations to the next stage, gradients to the one before."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.collectives + other.collectives,
            self.all_gather_bytes + other.all_gather_bytes,
            self.reduce_scatter_bytes + other.reduce_scatter_bytes,
            self.all_reduce_bytes + other.all_reduce_bytes,
            self.tensor + other.tensor,
            self.context + other.context,
            self.pipeline + other.pipeline,
        )


def on_line(a: Traffic, b: Traffic, factor: float) -> Traffic:
    """`a + factor * (b - a)`, in whole calls and bytes."""
    return Traffic(*(_on_line(getattr(a, f.name), getattr(b, f.name), factor) for f in fields(Traffic)))


def _on_line(a: Any, b: Any, factor: float) -> Any:
    if isinstance(a, int):
        return round(a + factor * (b - a))
    return type(a)(*(_on_line(getattr(a, f.name), getattr(b, f.name), factor) for f in fields(a)))


def collectives_of_unit(unit: Unit, layout: Layout) -> Collectives:
    """What a unit communicates in one forward and backward, its gradients included.

    An all-gather before forward, another before backward if the parameters are freed in between and backward reads
    them; a reduce-scatter of the gradients, and an all-reduce of the shards between replicas (HSDP). Nothing among one
    rank.
    """
    if not unit.num_parameters:
        return Collectives()
    is_sharded, is_replicated = layout.parameter_shards > 1, layout.replicate > 1
    return Collectives(
        all_gathers=unit.num_gathers * is_sharded,
        reduce_scatters=int(unit.is_trained and is_sharded),
        all_reduces=int(unit.is_trained and is_replicated),
    )


def collectives_of_microbatch(units: Iterable[Unit], layout: Layout) -> Collectives:
    """The same of all units together."""
    return sum((collectives_of_unit(unit, layout) for unit in units), start=Collectives())


def collectives_of_step(units: Iterable[Unit], layout: Layout, accumulation: GradientAccumulationConfig) -> Collectives:
    """What all units communicate in a step of `layout.num_microbatches`, under an accumulation strategy."""
    return _times(collectives_of_microbatch(units, layout), layout, accumulation)


def traffic_of_step(plan: ModelPlan, layout: Layout, accumulation: GradientAccumulationConfig) -> Traffic:
    """The same with bytes. The plan's units must be those for `accumulation`, which decides about their resharding."""
    return sum(
        (
            _traffic_of_unit(unit, parameters, layout, accumulation)
            for unit, parameters in zip(plan.units, parameters_by_unit(plan.inventory, plan.units), strict=True)
        ),
        start=Traffic(),
    )


def padded_numel(parameter: TensorInfo, shard: int) -> int:
    """Elements of a parameter whose first axis is filled up to a multiple of the shard degree, as FSDP2 does it."""
    rows = parameter.shape[0]
    return parameter.numel // rows * (-(-rows // shard) * shard) if parameter.numel else 0


def _traffic_of_unit(
    unit: Unit, parameters: Sequence[TensorInfo], layout: Layout, accumulation: GradientAccumulationConfig
) -> Traffic:
    calls = _times(collectives_of_unit(unit, layout), layout, accumulation)
    whole = sum(padded_numel(p, layout.parameter_shards) for p in parameters)
    trained = sum(padded_numel(p, layout.parameter_shards) for p in parameters if p.requires_grad)
    gradients = trained * DTYPE_BYTES[unit.reduce_dtype]
    return Traffic(
        calls,
        all_gather_bytes=calls.all_gathers * whole * DTYPE_BYTES[unit.compute_dtype],
        reduce_scatter_bytes=calls.reduce_scatters * gradients,
        all_reduce_bytes=calls.all_reduces * gradients // layout.parameter_shards,
    )


def _times(microbatch: Collectives, layout: Layout, accumulation: GradientAccumulationConfig) -> Collectives:
    """The collectives of a step, from those of a microbatch alone."""
    if accumulation.mode == "auto":
        raise ValueError("the mode is not decided yet: resolve `auto` first (plan.resolution)")
    microbatches = layout.num_microbatches
    gathers = 1 if accumulation.keep_params_unsharded else microbatches
    scatters = 1 if accumulation.mode == "deferred" else microbatches
    reduces = microbatches if accumulation.mode == "immediate" else 1
    return Collectives(
        microbatch.all_gathers * gathers, microbatch.reduce_scatters * scatters, microbatch.all_reduces * reduces
    )


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that one rank sends (and receives as many)."""

    within: float
    """To ranks on its own node."""

    across: float
    """To ranks on other nodes."""

    @property
    def total(self) -> float:
        """Both."""
        return self.within + self.across


def wire_bytes(traffic: Traffic, layout: Layout, gpus_per_node: int) -> LinkTraffic:
    """What one rank sends in a step, if collectives go round in rings.

    In a ring of n ranks each sends B (n-1)/n of an all-gather's or reduce-scatter's buffer of B bytes, and twice that
    of an all-reduce's. The ring follows the order of ranks (see `titan_launch.plan.layout.Layout`), with
    `gpus_per_node` neighbours on a node. Of the n hops k lead to another node, and every rank's share of the bytes is
    taken as k/n: there are as many rings as ranks on a node, and each leaves it through another's link, as NCCL lays
    them. Where groups lie differently on nodes, the one with the most such hops counts. What goes from stage to stage
    of a pipeline counts by the same share.
    """
    shard_stride = layout.tensor
    replica_stride = layout.tensor * layout.parameter_shards

    def ring(stride: int, size: int) -> _Ring:
        return _Ring(size, _most_crossings(layout.world_size, stride, size, gpus_per_node))

    shards = ring(shard_stride, layout.parameter_shards)
    between = ring(replica_stride, layout.replicate)
    sent = (
        ((traffic.all_gather_bytes + traffic.reduce_scatter_bytes) * shards.sent, shards),
        (2 * traffic.all_reduce_bytes * between.sent, between),
        (Fraction(traffic.tensor.sent_bytes), ring(1, layout.tensor)),
        (Fraction(traffic.context.sent_bytes), ring(shard_stride, layout.context)),
        (Fraction(traffic.pipeline.sent_bytes), ring(layout.ranks_per_stage, layout.pipeline)),
    )
    across = sum(num_bytes * ring.across for num_bytes, ring in sent)
    total = sum(num_bytes for num_bytes, _ in sent)
    return LinkTraffic(within=float(total - across), across=float(across))


@dataclass(frozen=True)
class _Ring:
    size: int
    crossings: int

    @property
    def sent(self) -> Fraction:
        """The share of a buffer that a rank sends."""
        return Fraction(self.size - 1, self.size)

    @property
    def across(self) -> Fraction:
        """The share of what is sent that goes to other nodes."""
        return Fraction(self.crossings, self.size)


def _most_crossings(world_size: int, stride: int, size: int, gpus_per_node: int) -> int:
    """Of the groups of `size` ranks that lie `stride` apart, that of the one with the most hops to another node."""
    starts = (rank for rank in range(world_size) if rank // stride % size == 0)
    groups = (range(start, start + stride * size, stride) for start in starts)
    return max(_crossings([rank // gpus_per_node for rank in group]) for group in groups)


def _crossings(nodes: Sequence[int]) -> int:
    """Hops of a ring, the one that closes it included, that lead to another node."""
    return sum(here != there for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
