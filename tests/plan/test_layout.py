"""The division of ranks and batches."""

from __future__ import annotations

from typing import Any

import pytest

from titan_launch.config.axes import AXES, MODEL_AXES
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.training import TrainingConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.communication import Exchange, Traffic
from titan_launch.plan.layout import Layout, plan_layout, smallest_world_size


def layout(
    world_size: int, replicate: int = 1, shard: int = -1, local: Any = 2, batch: int | None = None, **degrees: int
) -> Layout:
    parallelism = ParallelismConfig(
        data_parallel_replicate_degree=replicate,
        data_parallel_shard_degree=shard,
        **{f"{axis}_parallel_degree": degree for axis, degree in degrees.items()},
    )
    training = TrainingConfig(local_batch_size=local, global_batch_size=batch)
    return plan_layout(parallelism, training, world_size)


def test_every_axis_has_a_key_and_a_degree_and_those_of_model_parallelism_have_traffic() -> None:
    degrees = {axis.name: getattr(ParallelismConfig(), axis.key[1]) for axis in AXES.values()}
    assert degrees == dict.fromkeys(degrees, 1) | {"shard": -1}
    assert all(layout(1).degree(axis) == 1 for axis in AXES.values())
    assert all(Traffic().along(axis) == Exchange() for axis in MODEL_AXES)


def test_the_shard_axis_takes_the_rest_of_the_ranks() -> None:
    assert (layout(8).replicate, layout(8).shard) == (1, 8)
    assert (layout(8, replicate=2).replicate, layout(8, replicate=2).shard) == (2, 4)
    assert layout(8, replicate=8).shard == 1


def test_microbatches_follow_from_the_batch() -> None:
    assert layout(4).num_microbatches == 1 and layout(4).global_batch_size == 8
    assert layout(4, batch=32).num_microbatches == 4
    assert layout(1, batch=32).num_microbatches == 16


def test_ranks_that_share_samples_do_not_count_for_the_batch() -> None:
    shared = layout(32, tensor=2, context=2, pipeline=2, batch=16)
    assert (shared.shard, shared.num_microbatches, shared.world_size) == (4, 2, 32)
    assert (shared.parameter_shards, shared.model_parallel) == (8, 8)


def test_a_rank_has_a_data_parallel_index_and_a_pipeline_index() -> None:
    shared = layout(16, batch=16, replicate=2, tensor=2, pipeline=2)
    assert [shared.data_rank(rank) for rank in range(16)] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert [shared.pipeline_rank(rank) for rank in range(16)] == [0] * 8 + [1] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 3, "batch": 8}, "global_batch_size: not a multiple of 6 .* nearest: 6 or 12"),
        ({"world_size": 8, "batch": 4}, "nearest: 16"),
        (
            {"world_size": 3, "replicate": 2},
            "data_parallel_replicate_degree: does not divide the number of ranks of this run, 3",
        ),
        ({"world_size": 4, "shard": 2}, "data_parallel_shard_degree: .* makes 2 ranks, but this run has 4"),
        ({"world_size": 2, "replicate": 2, "shard": 2}, "makes 4 ranks, but this run has 2"),
        ({"world_size": 8, "tensor": 3}, "tensor_parallel_degree: does not divide the number of ranks of this run, 8"),
        (
            {"world_size": 8, "tensor": 4, "pipeline": 3},
            r"tensor_parallel_degree: with the other degrees makes 3 x 4 = 12, which does not divide .* this run, 8",
        ),
        (
            {"world_size": 8, "tensor": 2, "shard": 2},
            r"data_parallel_shard_degree: with tensor_parallel_degree \(2\) makes 4 ranks, but this run has 8",
        ),
        ({"world_size": 8, "context": 2, "batch": 12}, "not a multiple of 8 .* x 4 data-parallel ranks"),
        (
            {"world_size": 4, "batch": 6, "local": "auto"},
            "not a multiple of 4 = 1 sample x 4 data-parallel ranks; nearest",
        ),
    ],
)
def test_a_division_with_a_remainder_is_one_error(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(**arguments)


def test_expert_parallelism_divides_the_ranks_that_share_parameters() -> None:
    shared = layout(32, replicate=2, tensor=2, context=2, batch=16, expert=4)
    assert (shared.expert, shared.shard, shared.parameter_shards, shared.world_size) == (4, 4, 8, 32)
    assert smallest_world_size(ParallelismConfig(expert_parallel_degree=6, context_parallel_degree=4)) == 12
    with pytest.raises(ConfigError, match=r"expert_parallel_degree: must divide data_parallel_shard_degree \(4\)"):
        layout(4, expert=3)
