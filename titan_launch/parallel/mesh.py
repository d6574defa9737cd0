"""The DeviceMesh: the ranks as a grid with named axes."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_launch.plan.layout import Layout

REPLICATE = "dp_replicate"
SHARD = "dp_shard"


def build_mesh(layout: Layout, device_type: str) -> DeviceMesh:
    """The grid (replicate, shard), shard innermost: neighbouring ranks, which share a node, shard together."""
    return init_device_mesh(device_type, (layout.replicate, layout.shard), mesh_dim_names=(REPLICATE, SHARD))


def fsdp_mesh(mesh: DeviceMesh, layout: Layout) -> DeviceMesh:
    """The axes that `fully_shard` takes: both for HSDP, the shard axis alone without replicas."""
    return mesh[REPLICATE, SHARD] if layout.replicate > 1 else mesh[SHARD]


def statistics_group(timeout_seconds: int) -> dist.ProcessGroup:
    """Another group of all data-parallel ranks, for collectives in the middle of forward and backward; collective.

    On NCCL these would queue, in FSDP2's group, behind the all-gathers of blocks to come that it has begun.
    """
    return dist.new_group(timeout=timedelta(seconds=timeout_seconds), group_desc="batchnorm statistics")
