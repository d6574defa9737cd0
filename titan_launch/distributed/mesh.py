"""The DeviceMesh: the ranks as a grid with named axes, and the parts of it that something is done over."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_launch.distributed.gloo_all_gather import replace_gloo_all_gather
from titan_launch.distributed.torch_private import clear_mesh_caches
from titan_launch.plan.layout import Layout

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR = "pp", "dp_replicate", "dp_shard", "cp", "tp"


@dataclass(frozen=True)
class Mesh:
    """The grid of all ranks.

    Its axes, outermost first; one of degree 1 is left out, but for dp_shard:

        pp            the layers are divided          activations go to the next rank, once per microbatch
        dp_replicate  replicas of the model (HSDP)    gradients are all-reduced
        dp_shard      the parameters are sharded      all-gathered and reduce-scattered, unit by unit
        cp            the sequence is divided         keys and values travel, in every attention
        tp            the matrices are divided        activations are gathered and summed, four times a block

    The further in, the more is exchanged, and neighbouring ranks share a node. What is done over which axes:

        dp_replicate x dp_shard         data: ranks with samples of their own
        dp_shard x cp                   FSDP2 shards the parameters; with dp_replicate outside it is HSDP
        dp_replicate x dp_shard x cp    `data_group`: ranks with different tokens and the same parameters, over which
                                        targets are counted and BatchNorm's statistics are pooled
    """

    layout: Layout
    ranks: DeviceMesh

    @cached_property
    def fsdp(self) -> DeviceMesh:
        """The axes that `fully_shard` takes: two for HSDP, one without replicas."""
        shard, sharded = SHARD, self.ranks[SHARD]
        if self.layout.context > 1:
            shard = f"{SHARD}_{CONTEXT}"
            sharded = self.ranks[SHARD, CONTEXT]._flatten(shard)
        return self.ranks[REPLICATE, shard] if self.layout.replicate > 1 else sharded

    @property
    def tensor(self) -> DeviceMesh | None:
        """The ranks that share a matrix; None where there is one."""
        return self._axis(TENSOR)

    @property
    def context(self) -> DeviceMesh | None:
        """The ranks that share a sequence; None where there is one."""
        return self._axis(CONTEXT)

    @property
    def pipeline(self) -> DeviceMesh | None:
        """The ranks that share the layers; None where there is one."""
        return self._axis(PIPELINE)

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """The group of these; None where there is one."""
        return None if self.pipeline is None else self.pipeline.get_group()

    @cached_property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks with different tokens and the same parameters as this one; None: all ranks."""
        if self.layout.tensor == self.layout.pipeline == 1:
            return None
        return _own_group(self._data_ranks(), dist.distributed_c10d.default_pg_timeout, "data")

    def statistics_group(self, timeout_seconds: int) -> dist.ProcessGroup:
        """Another group of the ranks of `data_group`, for collectives in the middle of forward and backward;
        collective.

        On NCCL these would queue, in FSDP2's group, behind the all-gathers of blocks to come that it has begun.
        """
        return _own_group(self._data_ranks(), timedelta(seconds=timeout_seconds), "batchnorm statistics")

    def _axis(self, name: str) -> DeviceMesh | None:
        return self.ranks[name] if name in (self.ranks.mesh_dim_names or ()) else None

    def _data_ranks(self) -> list[list[int]]:
        """The ranks of every group that has this rank's `data_group`, or is another one's."""
        layout, inner, outer = self.layout, self.layout.tensor, self.layout.ranks_per_stage
        return [
            [stage * outer + index * inner + part for index in range(outer // inner)]
            for stage in range(layout.pipeline)
            for part in range(inner)
        ]


def build_mesh(layout: Layout, device_type: str) -> Mesh:
    """The grid of the ranks of the default process group; collective."""
    clear_mesh_caches()
    replace_gloo_all_gather()
    axes = {
        PIPELINE: layout.pipeline,
        REPLICATE: layout.replicate,
        SHARD: layout.shard,
        CONTEXT: layout.context,
        TENSOR: layout.tensor,
    }
    axes = {name: degree for name, degree in axes.items() if degree > 1 or name == SHARD}
    return Mesh(layout, init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes)))


def _own_group(groups: list[list[int]], timeout: timedelta, description: str) -> dist.ProcessGroup:
    """The group that this rank is in, of several that have no rank in common; collective."""
    made = [dist.new_group(ranks, timeout=timeout, group_desc=description) for ranks in groups]
    own = next(index for index, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return made[own]
