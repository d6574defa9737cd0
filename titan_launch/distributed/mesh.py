"""The DeviceMesh, which arranges all ranks in a grid with named axes, and the process groups of its axes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_launch.config.axes import EXPERT, GRID, PIPELINE, REPLICATE, Axis
from titan_launch.distributed.collectives import replace_gloo_all_gather
from titan_launch.distributed.torch_private import clear_mesh_caches
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import Unit

_EXPERT_SHARD = "expert_shard"


@dataclass(frozen=True)
class Mesh:
    """The grid of all ranks.

    The axes are, outermost first (an axis of degree 1 is not part of the mesh, except dp_shard):

        pp            layers are divided              sends activations and their gradients, for each microbatch
        dp_replicate  replicas of the model (HSDP)    all-reduces gradients, or exchanges them with a sharded optimizer
        dp_shard      parameters are sharded          all-gathers parameters, reduce-scatters gradients, unit by unit
        cp            sequences are divided           exchanges keys and values in every attention
        tp            matrices are divided            sums or gathers activations, at least four times per block

    Inner axes have more traffic. The numbers of the ranks along an inner axis are close, so that these ranks are on the
    same node if possible. Combinations of axes:

        dp_replicate x dp_shard         ranks with different samples
        dp_shard x cp                   ranks over which FSDP2 shards the parameters
        dp_replicate x dp_shard x cp    `data_group`: ranks with different tokens and the same parameters. Targets are
                                        counted, and BatchNorm's statistics are pooled, over this group.

    With expert parallelism, the parameters of experts are on a second grid of the same ranks. The second grid replaces
    the axes dp_shard and cp by two other axes, which divide the same ranks in another way:

        expert_shard  parts of the experts are sharded  all-gathers and reduce-scatters the parameters of experts
        ep            the experts are divided           exchanges tokens, four times per layer
    """

    layout: Layout
    ranks: DeviceMesh
    expert_ranks: DeviceMesh | None = None
    """The second grid; None without expert parallelism."""

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 2-D (replicate, shard) for HSDP, otherwise 1-D (shard).

        With context parallelism, dp_shard and cp together are the shard axis, and the first access is collective over
        all ranks. If the optimizer is sharded over the replicas, the mesh is 1-D also for HSDP: the optimizer then
        reduces the gradients over the replicas, and FSDP2 does not.
        """
        within = [axis.short for axis in GRID if axis.is_within_shards]
        names = [name for name in self.ranks.mesh_dim_names or () if name in within]
        shard, sharded = "_".join(names), self.ranks[tuple(names)]
        if len(names) > 1:
            sharded = sharded._flatten(shard)
        return self.ranks[REPLICATE.short, shard] if self.layout.fsdp_replicas > 1 else sharded

    def shards_of(self, unit: Unit) -> DeviceMesh:
        """Return the mesh with which `fully_shard` wraps a unit: the mesh `fsdp`. For a unit of divided experts (expert
        parallelism), the shard axis has only the ranks that hold the same experts."""
        if not unit.is_divided:
            return self.fsdp
        assert self.expert_ranks is not None, "divided experts need the second grid"
        if self.layout.fsdp_replicas > 1:
            return self.expert_ranks[REPLICATE.short, _EXPERT_SHARD]
        return self.expert_ranks[_EXPERT_SHARD]

    def along(self, *axes: Axis) -> DeviceMesh | None:
        """Return this rank's submesh along an axis, or along several axes together, without axes of degree 1. None if
        all degrees are 1."""
        own = [axis for axis in axes if self.layout.degree(axis) > 1]
        grid = self.ranks if all(axis.is_factor for axis in own) else self.expert_ranks
        return grid[tuple(axis.short for axis in own)] if own and grid is not None else None

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The process group of the pipeline axis; None if the degree is 1."""
        pipeline = self.along(PIPELINE)
        return None if pipeline is None else pipeline.get_group()

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The process group of this rank and of the ranks that have other tokens but the same parameters. None is the
        default group, with all ranks. The first access is collective over all ranks."""
        if self.layout.token_ranks == self.layout.world_size:
            return None
        return _own_group(self._data_ranks(), dist.distributed_c10d.default_pg_timeout, "data")

    def statistics_group(self, timeout_seconds: int) -> dist.ProcessGroup:
        """Create a second process group of the ranks of `data_group`, for collectives within forward and backward.

        In FSDP2's NCCL group, these collectives would wait for the all-gathers that FSDP2 has prefetched. This call is
        collective over all ranks.
        """
        return _own_group(self._data_ranks(), timedelta(seconds=timeout_seconds), "batchnorm statistics")

    def _data_ranks(self) -> list[list[int]]:
        """Return the data groups of all ranks, each as a list of ranks."""
        copies, per_stage = self.layout.token_copies, self.layout.ranks_per_stage
        firsts = (stage + copy for stage in range(0, self.layout.world_size, per_stage) for copy in range(copies))
        return [[first + copies * index for index in range(self.layout.token_ranks)] for first in firsts]


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Build the mesh of all ranks of the default process group. Also call `clear_mesh_caches` and
    `replace_gloo_all_gather`. Collective over all ranks."""
    clear_mesh_caches()
    replace_gloo_all_gather()

    def grid(shards: dict[str, int]) -> DeviceMesh:
        axes: dict[str, int] = {}
        for axis in GRID:
            axes |= shards if axis.is_within_shards else {axis.short: layout.degree(axis)}
        axes = {name: degree for name, degree in axes.items() if degree > 1 or name == next(iter(shards))}
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    ranks, experts = grid({axis.short: layout.degree(axis) for axis in GRID if axis.is_within_shards}), None
    if (parts := layout.degree(EXPERT)) > 1:
        experts = grid({_EXPERT_SHARD: layout.parameter_shards // parts, EXPERT.short: parts})
    return Mesh(layout, ranks, experts)


def _own_group(groups: list[list[int]], timeout: timedelta, description: str) -> dist.ProcessGroup:
    """Create disjoint process groups, and return the group that contains this rank. Collective over all ranks."""
    made = [dist.new_group(ranks, timeout=timeout, group_desc=description) for ranks in groups]
    own = next(index for index, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return made[own]
