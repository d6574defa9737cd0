"""The DeviceMesh, which arranges all ranks in a grid with named axes, and the process groups of its axes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_launch.distributed.collectives import replace_gloo_all_gather
from titan_launch.distributed.torch_private import clear_mesh_caches
from titan_launch.plan.layout import Layout

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = "pp", "dp_replicate", "dp_shard", "cp", "tp"
EXPERT_SHARD, EXPERT = "expert_shard", "expert"
"""Names of the axes that replace dp_shard and cp in the second grid, which is for the parameters of experts."""


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
    the axes dp_shard and cp by two other axes, and divides the ranks of dp_shard x cp anew:

        expert_shard  parts of the experts are sharded  all-gathers and reduce-scatters the parameters of experts
        expert        the experts are divided           exchanges tokens, four times per layer
    """

    layout: Layout
    ranks: DeviceMesh
    expert_ranks: DeviceMesh | None = None
    """The second grid; None without expert parallelism."""

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The mesh for `fully_shard`: 2-D (replicate, shard) for HSDP, otherwise 1-D (shard).

        With context parallelism, dp_shard and cp together are the shard axis, and the first access is collective over
        all ranks. If the optimizer is sharded over the replicas, the mesh is 1-D also for HSDP, because the optimizer,
        not FSDP2, reduces the gradients over the replicas.
        """
        shard, sharded = SHARD, self.ranks[SHARD]
        if self.layout.context > 1:
            shard = f"{SHARD}_{CONTEXT}"
            sharded = self.ranks[SHARD, CONTEXT]._flatten(shard)
        return self.ranks[REPLICATE, shard] if self.layout.fsdp_replicas > 1 else sharded

    @property
    def expert_fsdp(self) -> DeviceMesh | None:
        """The mesh for `fully_shard` of experts that are divided over ranks: 2-D or 1-D, as `fsdp`. None without expert
        parallelism."""
        if self.expert_ranks is None:
            return None
        if self.layout.fsdp_replicas > 1:
            return self.expert_ranks[REPLICATE, EXPERT_SHARD]
        return self.expert_ranks[EXPERT_SHARD]

    @property
    def replicate(self) -> DeviceMesh | None:
        """The ranks, one in each replica of the model, that hold the same shards; None if there is one replica."""
        return self._axis(REPLICATE)

    @property
    def expert(self) -> DeviceMesh | None:
        """The ranks that divide the experts; None if the degree is 1."""
        return None if self.expert_ranks is None else self.expert_ranks[EXPERT]

    @property
    def within_experts(self) -> DeviceMesh | None:
        """The ranks that together hold the parameters of experts before FSDP2 shards them: the mesh (expert, tp), or
        only the one of these axes whose degree exceeds 1. None if both degrees are 1."""
        if self.expert_ranks is None:
            return self.tensor
        return self.expert_ranks[EXPERT, TENSOR] if self.layout.tensor > 1 else self.expert_ranks[EXPERT]

    @property
    def tensor(self) -> DeviceMesh | None:
        """The ranks that divide each matrix; None if the degree is 1."""
        return self._axis(TENSOR)

    @property
    def context(self) -> DeviceMesh | None:
        """The ranks that divide each sequence; None if the degree is 1."""
        return self._axis(CONTEXT)

    @property
    def pipeline(self) -> DeviceMesh | None:
        """The ranks that divide the layers; None if the degree is 1."""
        return self._axis(PIPELINE)

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The process group of the pipeline axis; None if the degree is 1."""
        return None if self.pipeline is None else self.pipeline.get_group()

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The process group of this rank and of the ranks that have other tokens but the same parameters. None is the
        default group, with all ranks. The first access is collective over all ranks."""
        if self.layout.tensor == self.layout.pipeline == 1:
            return None
        return _own_group(self._data_ranks(), dist.distributed_c10d.default_pg_timeout, "data")

    def statistics_group(self, timeout_seconds: int) -> dist.ProcessGroup:
        """Create a second process group of the ranks of `data_group`, for collectives within forward and backward.

        In FSDP2's NCCL group, these collectives would wait for the all-gathers that FSDP2 has prefetched. This call is
        collective over all ranks.
        """
        return _own_group(self._data_ranks(), timedelta(seconds=timeout_seconds), "batchnorm statistics")

    def _axis(self, name: str) -> DeviceMesh | None:
        return self.ranks[name] if name in (self.ranks.mesh_dim_names or ()) else None

    def _data_ranks(self) -> list[list[int]]:
        """Return the data groups of all ranks, each as a list of ranks."""
        layout, inner, outer = self.layout, self.layout.tensor, self.layout.ranks_per_stage
        return [
            [stage * outer + index * inner + part for index in range(outer // inner)]
            for stage in range(layout.pipeline)
            for part in range(inner)
        ]


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """Build the mesh of all ranks of the default process group. Also call `clear_mesh_caches` and
    `replace_gloo_all_gather`. Collective over all ranks."""
    clear_mesh_caches()
    replace_gloo_all_gather()

    def grid(divided: dict[str, int], kept: str) -> DeviceMesh:
        axes = {PIPELINE: layout.pipeline, REPLICATE: layout.replicate, **divided, TENSOR: layout.tensor}
        axes = {name: degree for name, degree in axes.items() if degree > 1 or name == kept}
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    ranks, experts = grid({SHARD: layout.shard, CONTEXT: layout.context}, SHARD), None
    if layout.expert > 1:
        experts = grid({EXPERT_SHARD: layout.parameter_shards // layout.expert, EXPERT: layout.expert}, EXPERT_SHARD)
    return Mesh(layout, ranks, experts)


def _own_group(groups: list[list[int]], timeout: timedelta, description: str) -> dist.ProcessGroup:
    """Create disjoint process groups, and return the group that contains this rank. Collective over all ranks."""
    made = [dist.new_group(ranks, timeout=timeout, group_desc=description) for ranks in groups]
    own = next(index for index, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return made[own]
