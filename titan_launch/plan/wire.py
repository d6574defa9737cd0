"""What of a rank's traffic goes over which links. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from titan_launch.plan.layout import Layout
from titan_launch.plan.traffic import Traffic


@dataclass(frozen=True)
class Wire:
    """Bytes that one rank sends (and receives as many)."""

    within: float
    """To ranks on its own node."""

    across: float
    """To ranks on other nodes."""

    @property
    def total(self) -> float:
        """Both."""
        return self.within + self.across


def wire_bytes(traffic: Traffic, layout: Layout, gpus_per_node: int) -> Wire:
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
    return Wire(within=float(total - across), across=float(across))


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
