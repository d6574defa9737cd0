"""The collectives of a rank in one step: their number, their bytes and the links that they use. This module does not
import torch.

A replay of a step (`plan.memory`) counts the step's traffic: the collectives of FSDP2 units, and of tensor, context,
pipeline and expert parallelism. The small collectives of BatchNorm statistics, target counts, gradient clipping and
metrics are not counted.

`collectives_of_unit` derives the number of a unit's collectives without a replay. That number is exact if the unit runs
in every forward, and if its parameters get gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from titan_launch.config.axes import EXPERT, MODEL_AXES, REPLICATE, Axis
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.plan.layout import Layout
from titan_launch.plan.replica_shards import ExchangedUnit, exchanged_unit
from titan_launch.plan.types import ModelPlan, TensorInfo, Unit, parameters_by_unit, sharded_dim


@dataclass(frozen=True)
class Collectives:
    """Numbers of calls of FSDP2's collectives."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0

    @property
    def total(self) -> int:
        """Number of all calls."""
        return self.all_gathers + self.reduce_scatters + self.all_reduces

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Collectives)))

    def __str__(self) -> str:
        counts = {
            "all-gather": self.all_gathers,
            "reduce-scatter": self.reduce_scatters,
            "all-reduce": self.all_reduces,
        }
        named = (f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)
        return " + ".join(named) or "none"


@dataclass(frozen=True)
class Exchange:
    """Communication of one rank along an axis of model parallelism."""

    calls: int = 0

    sent_bytes: int = 0
    """Bytes that the rank sends, if collectives use rings."""

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.calls + other.calls, self.sent_bytes + other.sent_bytes)


@dataclass(frozen=True)
class Traffic:
    """Communication of one rank: calls and buffer bytes of FSDP2's collectives, and exchanges of model parallelism."""

    collectives: Collectives = field(default_factory=Collectives)

    all_gather_bytes: int = 0
    """Bytes of the output buffers: unsharded parameters in the compute dtype, padded."""

    reduce_scatter_bytes: int = 0
    """Bytes of the input buffers: unsharded gradients in the reduce dtype, padded."""

    all_reduce_bytes: int = 0
    """Bytes reduced in place: sharded gradients in the reduce dtype, padded (HSDP)."""

    tensor: Exchange = field(default_factory=Exchange)
    """Tensor parallelism: all-gathers, all-reduces and reduce-scatters of activations."""

    context: Exchange = field(default_factory=Exchange)
    """Context parallelism: keys and values, and their gradients."""

    pipeline: Exchange = field(default_factory=Exchange)
    """Pipeline parallelism: activations to the next stage, gradients to the previous stage."""

    expert: Exchange = field(default_factory=Exchange)
    """Expert parallelism: all-to-alls of tokens and results, and their gradients (`plan.experts`)."""

    expert_all_gather_bytes: int = 0
    """Part of `all_gather_bytes` for units that expert parallelism divides (`Unit.is_divided`). Such a unit has fewer
    shards."""

    expert_reduce_scatter_bytes: int = 0
    """Part of `reduce_scatter_bytes` for units that expert parallelism divides."""

    replica_all_gather_bytes: int = 0
    """Part of `all_gather_bytes` that is gathered between replicas, if the optimizer is sharded over them
    (`parallelism.shard_optimizer_over_replicas`): updated parameters in the storage dtype."""

    replica_reduce_scatter_bytes: int = 0
    """Part of `reduce_scatter_bytes` that is reduced between replicas, if the optimizer is sharded over them."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Traffic)))

    def along(self, axis: Axis) -> Exchange:
        """Return the communication along an axis of model parallelism."""
        exchange: Exchange = getattr(self, axis.name)
        return exchange


def on_line(a: Traffic, b: Traffic, factor: float) -> Traffic:
    """Return `a + factor * (b - a)`, rounded to whole calls and bytes."""
    return Traffic(*(_on_line(getattr(a, f.name), getattr(b, f.name), factor) for f in fields(Traffic)))


def _on_line(a: Any, b: Any, factor: float) -> Any:
    if isinstance(a, int):
        return round(a + factor * (b - a))
    return type(a)(*(_on_line(getattr(a, f.name), getattr(b, f.name), factor) for f in fields(a)))


def traffic_of_microbatches(seen: Sequence[Traffic], num_microbatches: int) -> Traffic:
    """Return the traffic of a whole step. `seen`: the traffic of each of the first microbatches, then the traffic of
    the last microbatch. Each microbatch in between has the traffic `seen[-2]`."""
    total = sum(seen, start=Traffic())
    unseen = num_microbatches - len(seen)
    return on_line(total, total + seen[-2], unseen) if unseen else total


def collectives_of_unit(unit: Unit, layout: Layout) -> Collectives:
    """Return the numbers of collectives of an FSDP2 unit in one forward and backward.

    FSDP2 all-gathers the parameters before forward. If forward reshards the parameters and backward reads them, FSDP2
    all-gathers them again before backward. If the unit is trained, FSDP2 reduce-scatters the gradients, and all-reduces
    their shards between replicas (HSDP). With one shard, there are neither all-gathers nor reduce-scatters.
    """
    if not unit.num_parameters:
        return Collectives()
    is_sharded, is_replicated = layout.shards_of(unit) > 1, layout.fsdp_replicas > 1
    is_reduced = unit.gradient_dtype is not None
    return Collectives(
        all_gathers=unit.num_gathers * is_sharded,
        reduce_scatters=int(is_reduced and is_sharded),
        all_reduces=int(is_reduced and is_replicated),
    )


def collectives_of_microbatch(units: Iterable[Unit], layout: Layout) -> Collectives:
    """Return the numbers of collectives of all units in one forward and backward."""
    return sum((collectives_of_unit(unit, layout) for unit in units), start=Collectives())


def collectives_of_step(units: Iterable[Unit], layout: Layout, accumulation: GradientAccumulationConfig) -> Collectives:
    """Return the numbers of collectives of all units in a step of `layout.num_microbatches` microbatches.

    `accumulation`: the mode, which decides how often gradients are reduced and parameters all-gathered. If the
    optimizer is sharded over replicas, each trained unit has one more reduce-scatter and one more all-gather per step.
    """
    units = list(units)
    one, every = collectives_of_microbatch(units, layout), layout.num_microbatches
    is_exchanged = layout.optimizer_replicas > 1
    exchanges = sum(is_exchanged and unit.gradient_dtype is not None for unit in units)
    return Collectives(
        one.all_gathers * (1 if accumulation.keep_params_unsharded else every) + exchanges,
        one.reduce_scatters * (every if accumulation.row.reduce_scatters_each else 1) + exchanges,
        one.all_reduces * (every if accumulation.row.all_reduces_each else 1),
    )


def exchanged_units(plan: ModelPlan, layout: Layout) -> dict[Unit, ExchangedUnit]:
    """Return the units whose gradients and parameters a sharded optimizer exchanges between the replicas, with the
    sizes of the exchange. Return an empty dict if the optimizer is not sharded over replicas."""
    found: dict[Unit, ExchangedUnit] = {}
    if layout.optimizer_replicas == 1:
        return found
    for unit, parameters in zip(plan.units, parameters_by_unit(plan.inventory, plan.units), strict=True):
        if unit.gradient_dtype is not None:
            shapes = [shard_shape(parameter, unit, layout) for parameter in parameters if parameter.requires_grad]
            found[unit] = exchanged_unit(unit, shapes, layout.optimizer_replicas)
    return found


def traffic_of_replicas(units: Iterable[ExchangedUnit], replicas: int) -> Traffic:
    """Return the traffic of a step between the replicas over which the optimizer is sharded."""
    units = list(units)
    gathered, scattered = sum(unit.chunks for unit in units), sum(unit.reduced for unit in units)
    return Traffic(
        Collectives(all_gathers=len(units), reduce_scatters=len(units)),
        all_gather_bytes=replicas * gathered,
        reduce_scatter_bytes=replicas * scattered,
        replica_all_gather_bytes=replicas * gathered,
        replica_reduce_scatter_bytes=replicas * scattered,
    )


def padded_numel(parameter: TensorInfo, unit: Unit, layout: Layout) -> int:
    """Return the number of elements of a parameter after expert parallelism (`Unit.part`), including padding: FSDP2
    pads the first dim to a multiple of the number of shards. FSDP2 does not pad some parameters of experts (see
    `sharded_dim`)."""
    return prod(shard_shape(parameter, unit, layout)) * layout.shards_of(unit)


def shard_shape(parameter: TensorInfo, unit: Unit, layout: Layout) -> tuple[int, ...]:
    """Return the shape of the largest shard of a unit's parameter."""
    shape, shards = [*unit.part(parameter.shape)], layout.shards_of(unit)
    dim = sharded_dim(shape, shards, parameter.is_stacked) if parameter.numel else 0
    shape[dim] = -(-shape[dim] // shards)
    return tuple(shape)


@dataclass(frozen=True)
class LinkTraffic:
    """Bytes that one rank sends in a step, by kind of link. The rank receives the same number of bytes."""

    within: float
    """Bytes to ranks on its own node."""

    across: float
    """Bytes to ranks on other nodes."""

    experts_within: float = 0.0
    """Part of `within` that expert parallelism sends."""

    experts_across: float = 0.0
    """Part of `across` that expert parallelism sends."""

    @property
    def total(self) -> float:
        """Bytes over both kinds of links."""
        return self.within + self.across


def link_traffic_of_step(traffic: Traffic, layout: Layout, gpus_per_node: int) -> LinkTraffic:
    """Return the bytes that one rank sends in a step, if collectives use rings.

    In a ring of n ranks, each rank sends B (n-1)/n for an all-gather or a reduce-scatter of a buffer of B bytes, and
    twice that for an all-reduce. The ring follows the order of ranks (see `titan_launch.plan.layout.Layout`). Each node
    has `gpus_per_node` consecutive ranks.

    If k of the n hops lead to another node, k/n of the bytes of each rank count as sent to other nodes. The reason is
    that NCCL builds one ring per rank of a node, and each ring leaves the node at a different rank. If the groups of an
    axis have different numbers of such hops, the largest number counts. Traffic between pipeline stages is divided into
    own-node and other-node bytes by the same rule.

    In the all-to-alls of expert parallelism, each rank sends equal parts to all other ranks of its group. The result
    describes the rank that has the most ranks of its group on other nodes.
    """
    rings = rings_of(layout, gpus_per_node)
    of_experts = traffic.expert_all_gather_bytes + traffic.expert_reduce_scatter_bytes
    of_replicas = traffic.replica_all_gather_bytes + traffic.replica_reduce_scatter_bytes
    of_others = traffic.all_gather_bytes + traffic.reduce_scatter_bytes - of_experts - of_replicas
    sent = (
        (of_others * rings.shards.sent, rings.shards),
        (of_experts * rings.expert_shards.sent, rings.expert_shards),
        ((2 * traffic.all_reduce_bytes + of_replicas) * rings.replicas.sent, rings.replicas),
        *((Fraction(traffic.along(axis).sent_bytes), rings.along[axis.name]) for axis in MODEL_AXES),
    )
    across = sum(num_bytes * ring.across for num_bytes, ring in sent)
    within = sum(num_bytes for num_bytes, _ in sent) - across
    experts = traffic.along(EXPERT).sent_bytes
    experts_across = experts * rings.along[EXPERT.name].across
    return LinkTraffic(float(within), float(across), float(experts - experts_across), float(experts_across))


@dataclass(frozen=True)
class Ring:
    """A group of ranks that communicate in a ring, or by all-to-alls."""

    size: int
    crossings: int
    """For a ring: number of hops that lead to another node. For all-to-alls: the largest number of ranks on other nodes
    to which a rank sends. (In an all-to-all, a rank sends equal parts to all other ranks.)"""

    is_all_to_all: bool = False

    @property
    def sent(self) -> Fraction:
        """Fraction of a buffer that a rank sends in an all-gather, a reduce-scatter or an all-to-all."""
        return Fraction(self.size - 1, self.size)

    @cached_property
    def across(self) -> Fraction:
        """Fraction of the sent bytes that goes to other nodes."""
        return Fraction(self.crossings, max(1, self.size - self.is_all_to_all))


class Rings(NamedTuple):
    """The groups of ranks that communicate. If groups of one kind differ, the group with the most crossings stands for
    all of them."""

    shards: Ring
    expert_shards: Ring
    """The ranks over which FSDP2 shards units that expert parallelism divides (`Unit.is_divided`)."""

    replicas: Ring
    along: Mapping[str, Ring]
    """The group of each axis of model parallelism, by the name of the axis."""

    @property
    def every(self) -> tuple[Ring, ...]:
        """All groups."""
        return self.shards, self.expert_shards, self.replicas, *self.along.values()

    def shards_of(self, unit: Unit) -> Ring:
        """Return the group of ranks over which FSDP2 shards the parameters of a unit."""
        return self.expert_shards if unit.is_divided else self.shards


@lru_cache
def rings_of(layout: Layout, gpus_per_node: int) -> Rings:
    """Return the rings of a layout, on nodes of `gpus_per_node` consecutive ranks."""

    def ring(stride: int, size: int) -> Ring:
        return Ring(size, _most_crossings(layout.world_size, stride, size, gpus_per_node))

    def along(axis: Axis) -> Ring:
        stride, size = layout.stride(axis), layout.degree(axis)
        if "all_to_all" not in axis.sends:
            return ring(stride, size)
        return Ring(size, _most_on_other_nodes(layout.world_size, stride, size, gpus_per_node), is_all_to_all=True)

    innermost, parts = layout.stride(EXPERT), layout.degree(EXPERT)
    return Rings(
        shards=ring(innermost, layout.parameter_shards),
        expert_shards=ring(innermost * parts, layout.parameter_shards // parts),
        replicas=ring(layout.stride(REPLICATE), layout.replicate),
        along={axis.name: along(axis) for axis in MODEL_AXES},
    )


def _most_crossings(world_size: int, stride: int, size: int, gpus_per_node: int) -> int:
    """Return the number of hops between nodes in the group with the most such hops. A group is a ring of `size` ranks,
    `stride` apart."""
    groups = _groups(world_size, stride, size)
    return max(ring_crossings([rank // gpus_per_node for rank in group]) for group in groups)


def _most_on_other_nodes(world_size: int, stride: int, size: int, gpus_per_node: int) -> int:
    """Return the largest number of ranks on other nodes to which a rank sends in an all-to-all of its group."""
    nodes = (Counter(rank // gpus_per_node for rank in group) for group in _groups(world_size, stride, size))
    return max(size - min(on_node.values()) for on_node in nodes)


def _groups(world_size: int, stride: int, size: int) -> Iterator[range]:
    """Yield the groups of an axis: `size` ranks each, `stride` apart."""
    starts = (rank for rank in range(world_size) if rank // stride % size == 0)
    return (range(start, start + stride * size, stride) for start in starts)


def ring_crossings(nodes: Sequence[int]) -> int:
    """Return the number of hops between nodes in a ring of ranks. `nodes`: the node of each rank. The ring closes with
    a hop from the last rank to the first."""
    return sum(here != there for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True))
