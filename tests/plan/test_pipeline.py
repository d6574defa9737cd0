"""The division of a model into pipeline stages, and the part of its plan on each stage."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.training import TrainingConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.torch_release import CAN_SHARE_UNITS, MIXES_DTYPES_IN_UNIT
from titan_launch.models.blocks import find_pipeline_order
from titan_launch.models.build import build_model, take_inventory
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.pipeline import balance, counts_to_run, parts_on_rank, plan_stages, representative_ranks
from titan_launch.plan.report.unit_table import describe_units, format_plan
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.train.model import inspect_model


def job(
    layers: int = 5, rules: tuple[dict[str, Any], ...] = (), placement: str = "auto", **parallelism: Any
) -> JobConfig:
    args = {"dim": 32, "n_layers": layers, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}
    return JobConfig.model_validate(
        {
            "model": {"args": args},
            "precision": {"rules": list(rules), "placement": placement},
            "gradient_accumulation": {"keep_params_unsharded": False},
            "parallelism": {"pipeline_parallel_degree": 2, **parallelism},
        }
    )


def plan(config: JobConfig) -> ModelPlan:
    return plan_job(config, inspect_model(config, build_model(config.model, 16)))


@cache
def llama(layers: int, **args: Any) -> Inventory:
    config = job(layers)
    return inspect_model(config, build_model(ModelConfig(args={**config.model.args, **args}), 16))


def cuts(inventory: Inventory, **parallelism: Any) -> list[tuple[str, ...]]:
    return [stage.modules for stage in plan_stages(inventory, ParallelismConfig.model_validate(parallelism))]


def test_balance_minimizes_the_cost_of_the_largest_stage() -> None:
    assert balance([1, 1, 1, 1], 2) == (2,)
    assert balance([1, 1, 1, 4], 2) == (3,)
    assert balance([5, 1, 1, 1, 1], 3) == (1, 3)
    assert balance([1, 1, 1, 1, 1], 2) in ((2,), (3,))
    assert balance([9, 1, 1, 1, 1, 1, 1], 3) == (1, 4)  # the most even of the cuts whose largest part is 9
    assert balance([3, 1, 2], 3) == (1, 2)


def test_stages_are_as_equal_as_whole_layers_allow() -> None:
    """The cost of a stage includes the output matrix and not the embedding. A norm follows the layer before it."""
    first, last = cuts(llama(5), pipeline_parallel_degree=2)
    assert first == ("tok_embeddings", "layers.0", "layers.1", "layers.2")
    assert last == ("layers.3", "layers.4", "norm", "output")
    large_output = cuts(llama(6, vocab_size=4000), pipeline_parallel_degree=3)
    # The stages have 2 layers, 3 layers, and 1 layer with the output.
    assert [len(part) for part in large_output] == [3, 3, 3]


def test_the_rank_with_the_largest_matrices_is_predicted_too() -> None:
    """3 layers with the embedding have more parameters than 4 layers, but 4 layers take longer."""
    whole = plan_job(job(9, pipeline_parallel_degree=3), llama(9, vocab_size=300))
    assert [len(stage.modules) for stage in whole.stages] == [4, 4, 4]
    assert representative_ranks(whole, with_times=True) == [0, 1, 2]
    assert representative_ranks(whole, with_times=False) == [0, 2]


def test_stages_begin_at_the_split_points_of_the_job() -> None:
    parts = cuts(
        llama(3),
        pipeline_parallel_degree=2,
        pipeline_parallel_schedule="Interleaved1F1B",
        pipeline_parallel_split_points=["layers.0", "layers.2", "norm"],
    )
    assert parts == [("tok_embeddings",), ("layers.0", "layers.1"), ("layers.2",), ("norm", "output")]


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("1F1B", [0, 1, 2]), ("Interleaved1F1B", [0, 1, 2, 0, 1, 2]), ("ZBVZeroBubble", [0, 1, 2, 2, 1, 0])],
)
def test_stages_are_assigned_in_a_loop_or_in_a_v(schedule: str, ranks: list[int]) -> None:
    parallelism = ParallelismConfig.model_validate(
        {"pipeline_parallel_degree": 3, "pipeline_parallel_schedule": schedule}
    )
    assert [stage.rank for stage in plan_stages(llama(6), parallelism)] == ranks


@pytest.mark.parametrize(
    ("inventory", "parallelism", "problem"),
    [
        (
            llama(2),
            {"pipeline_parallel_degree": 3},
            "makes 3 stages, but the model has only 2 layers; set pipeline_parallel_degree to at most 2",
        ),
        (
            llama(3),
            {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
            "makes 4 stages (2 per rank), but the model has only 3 layers; set pipeline_parallel_degree to at most 1",
        ),
        (
            llama(3),
            {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ["layer.1"]},
            'split_points.0: is not a module of the model\'s pipeline_order; did you mean "layers.1"?',
        ),
        (
            llama(3),
            {"pipeline_parallel_degree": 3, "pipeline_parallel_split_points": ["layers.2", "layers.1"]},
            "split_points.1: does not come after",
        ),
        (
            llama(3),
            {"pipeline_parallel_degree": 2, "pipeline_parallel_split_points": ["tok_embeddings"]},
            "split_points.0: already begins the first stage, so it cannot be a split point; name a later module",
        ),
        (
            llama(3, tie_embeddings=True),
            {"pipeline_parallel_degree": 2},
            "output and tok_embeddings share a parameter (tied), and would be on the stages 1 and 0",
        ),
        (
            replace(llama(3), pipeline_order=()),
            {"pipeline_parallel_degree": 2},
            "the order of the model's modules is unknown",
        ),
        (
            replace(llama(3), pipeline_order=llama(3).pipeline_order[:-1]),
            {"pipeline_parallel_degree": 2},
            "would drop output.weight, which no module of the model's pipeline_order contains",
        ),
    ],
)
def test_a_model_that_cannot_be_divided_is_an_error(
    inventory: Inventory, parallelism: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_stages(inventory, ParallelismConfig.model_validate(parallelism))
    assert problem in str(caught.value)


def test_a_pipeline_order_may_only_name_modules_that_run_once() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    assert find_pipeline_order(model, ("layers.*",)) == ("layers.0",)
    for pipeline_order, problem in (
        (("layers",), "a container"),
        (("layers.1",), "no module"),
        (("layers.*",) * 2, "twice"),
    ):
        with pytest.raises(ConfigError, match=problem):
            find_pipeline_order(model, pipeline_order)


@pytest.mark.parametrize("placement", ["own_unit", "in_place"])
def test_the_pipeline_stages_of_a_plan_cover_the_model(placement: str) -> None:
    """Each module and parameter is on one stage. A unit over several stages has a part on each, with its own dtype, and
    so has a rule in place."""
    if placement == "in_place" and not MIXES_DTYPES_IN_UNIT:
        pytest.skip("before torch 2.15 every rule has units of its own")
    rules = ({"type": "RMSNorm", "param_dtype": "float32"},)
    whole = plan(job(rules=rules, placement=placement, pipeline_parallel_schedule="Interleaved1F1B"))
    parts = [part for rank in range(2) for part in parts_on_rank(whole, rank)]
    assert len(parts) == 4
    owned = [m.path for part in parts for m in part.inventory.modules if m.parameters]
    assert sorted(owned) == sorted(m.path for m in whole.inventory.modules if m.parameters)
    assert sum(unit.num_parameters for part in parts for unit in part.units) == whole.inventory.num_parameters
    for part in parts:
        assert {path: unit.compute_dtype for path, unit in part.unit_of.items()} == {
            path: whole.unit_of[path].compute_dtype for path in part.unit_of
        }
    shared = next(unit for unit in whole.boundaries if unit.reason == "precision.rules.0")
    assert (shared in whole.in_place) == (placement == "in_place")
    assert [part.units[-1].policy.cast_forward_inputs for part in parts] == [True, False, False, False]
    if not CAN_SHARE_UNITS:
        return
    assert len([unit for part in parts for unit in part.boundaries if unit.reason == shared.reason]) == 4
    (row,) = [row for row in describe_units(whole, layout(job()), str) if row["reason"] == shared.reason]
    assert row["stages"] == [0, 1, 2, 3]


class Shared(nn.Module):
    """A model whose layers share a module with a buffer, which runs first in the first layer."""

    def __init__(self) -> None:
        super().__init__()
        scale = nn.BatchNorm1d(4, affine=False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), scale) for _ in range(2))


def test_a_shared_module_has_another_first_path_on_a_later_stage() -> None:
    with torch.device("meta"):
        model = Shared()
    pipeline_order = ("layers.0", "layers.1")
    whole = plan_job(job(), take_inventory(model, pipeline_order, pipeline_order=pipeline_order))
    (last,) = parts_on_rank(whole, 1)
    assert last.inventory.by_path["layers.1.1"].same_as is None
    assert {"layers.1.1.running_mean", "layers.1.1.running_var"} == last.buffer_dtypes.keys()


def test_a_second_name_of_a_module_outside_of_the_pipeline_order_is_an_error() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.alias = model[1]
    inventory = take_inventory(model, ("0", "1"), pipeline_order=("0", "1"))
    with pytest.raises(ConfigError, match=r"alias and 1 are the same module, and no module .* contains alias; remove"):
        plan_stages(inventory, job().parallelism)


def layout(config: JobConfig) -> Any:
    return plan_layout(config.parallelism, TrainingConfig(local_batch_size=1, global_batch_size=8), 4)


def test_the_text_of_a_plan_describes_the_pipeline_stages() -> None:
    text = format_plan(job(), plan(job()), layout(job()), str)
    assert "pipeline: schedule 1F1B, 2 stages on 2 x 2 ranks" in text
    assert "pipeline stage 1 (ranks 2 to 3): layers.3 .. output, " in text


@pytest.mark.parametrize(
    ("schedule", "microbatches", "counts"),
    [
        ("GPipe", 9, (9,)),
        ("1F1B", 9, (6, 7)),
        ("Interleaved1F1B", 25, (15, 20)),
        ("Interleaved1F1B", 24, (18, 24)),  # 4 rounds, each of 6 microbatches instead of 5
    ],
)
def test_the_planned_steps_of_a_pipeline_have_whole_rounds(
    schedule: str, microbatches: int, counts: tuple[int, ...]
) -> None:
    parallelism = ParallelismConfig.model_validate({"pipeline_parallel_schedule": schedule})
    grid = Layout(1, 1, local_batch_size=1, num_microbatches=microbatches, pipeline=5)
    assert counts_to_run(parallelism, grid) == counts


@pytest.mark.parametrize(
    ("schedule", "microbatches", "fits"),
    [
        ("1F1B", 2, False),
        ("1F1B", 3, True),
        ("GPipe", 1, True),
        ("Interleaved1F1B", 7, False),
        ("Interleaved1F1B", 2, True),
        ("InterleavedZeroBubble", 6, True),
        ("ZBVZeroBubble", 1, True),
    ],
)
def test_the_number_of_microbatches_must_fit_the_schedule(schedule: str, microbatches: int, fits: bool) -> None:
    parallelism = ParallelismConfig.model_validate(
        {"pipeline_parallel_degree": 3, "pipeline_parallel_schedule": schedule}
    )
    training = TrainingConfig(local_batch_size=2, global_batch_size=2 * microbatches)
    if fits:
        assert plan_layout(parallelism, training, 3).num_microbatches == microbatches
    else:
        with pytest.raises(ConfigError, match="global_batch_size: makes"):
            plan_layout(parallelism, training, 3)
