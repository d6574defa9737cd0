"""The mesh of ranks, and the process groups for each purpose."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.distributed import join_fake_group, run_ranks
from titan_launch.config.axes import CONTEXT, MODEL_AXES, PIPELINE, REPLICATE, TENSOR
from titan_launch.distributed.mesh import build_mesh
from titan_launch.plan.layout import Layout


def layout(**degrees: int) -> Layout:
    return Layout(**{"replicate": 1, "shard": 1, "local_batch_size": 1, "num_microbatches": 1, **degrees})


def ranks_of(mesh: Any) -> list[int] | None:
    return None if mesh is None else mesh.mesh.flatten().tolist()


def groups_of_rank_0() -> dict[str, list[int] | None]:
    join_fake_group(32)
    grid = layout(replicate=2, shard=2, context=2, tensor=2, pipeline=2, expert=4)
    mesh = build_mesh(grid, "cpu")
    for axis in (*MODEL_AXES, REPLICATE):
        stride = grid.stride(axis)
        assert ranks_of(mesh.along(axis)) == list(range(0, stride * grid.degree(axis), stride)), (
            "as the planner assumes"
        )
    data, statistics = mesh.data_group, mesh.statistics_group(60)
    assert data is not None and mesh.fsdp.ndim == 2
    return {
        "fsdp": ranks_of(mesh.fsdp),
        **{axis.name: ranks_of(mesh.along(axis)) for axis in (TENSOR, CONTEXT, PIPELINE)},
        "data": dist.get_process_group_ranks(data),
        "statistics": dist.get_process_group_ranks(statistics),
    }


def test_the_tensor_axis_is_innermost_and_the_pipeline_outermost() -> None:
    different_tokens = [0, 2, 4, 6, 8, 10, 12, 14]
    (groups,) = run_ranks(groups_of_rank_0, 1)
    assert groups == {
        "fsdp": different_tokens,
        "tensor": [0, 1],
        "context": [0, 2],
        "pipeline": [0, 16],
        "data": different_tokens,
        "statistics": different_tokens,
    }


def axes_of_data_parallel_ranks() -> tuple[Any, Any, list[int] | None, list[int] | None]:
    join_fake_group(4)
    sharded, replicated = build_mesh(layout(shard=4), "cpu"), build_mesh(layout(replicate=4), "cpu")
    assert sharded.data_group is None and replicated.data_group is None, "None means the default group"
    tensor, pipeline = (ranks_of(sharded.along(axis)) for axis in (TENSOR, PIPELINE))
    return sharded.fsdp.mesh_dim_names, replicated.fsdp.mesh.shape, tensor, pipeline


def test_without_model_parallelism_the_mesh_has_only_data_parallel_axes() -> None:
    assert run_ranks(axes_of_data_parallel_ranks, 1) == [(("dp_shard",), (4, 1), None, None)]


def sum_over_data_group() -> int:
    import torch

    mesh = build_mesh(layout(shard=2, tensor=2), "cpu")
    value = torch.tensor(10 ** dist.get_rank())
    dist.all_reduce(value, group=mesh.data_group)
    return int(value)


def test_the_data_group_has_all_ranks_with_different_tokens() -> None:
    assert run_ranks(sum_over_data_group, 4) == [101, 1010, 101, 1010]
