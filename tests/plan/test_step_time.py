"""Step times, and the FLOPs of activation checkpointing against those that PyTorch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.train.jobs import TINY_ARGS
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, ParallelismConfig
from titan_launch.models.build import build_model
from titan_launch.models.loss import cross_entropy_sum
from titan_launch.parallel.activation_checkpoint import checkpoint_activations
from titan_launch.plan.communication import LinkTraffic
from titan_launch.plan.hardware import hardware_of
from titan_launch.plan.layout import Layout
from titan_launch.plan.module_selection import checkpointed_modules
from titan_launch.plan.step_time import StepTime, bubble_share, estimate_step_time, flops_of_model
from titan_launch.plan.types import Inventory

SEQ_LEN, LAYERS, DIM = 16, 4, TINY_ARGS["dim"]
FULL = {"mode": "full"}
MODES = [{"mode": "none"}, FULL, {"mode": "selective"}, {"mode": "selective", "selective_ac_option": 2}]


def counted_matmuls(checkpointing: ActivationCheckpointConfig) -> int:
    """Return the FLOPs of a forward and backward without attention, which torch counts on a CPU only from 2.15 on."""
    built = build_model(ModelConfig(args={**TINY_ARGS, "n_layers": LAYERS}), SEQ_LEN)
    model = built.module.to_empty(device="cpu")
    checkpoint_activations(model, checkpointed_modules(Inventory((), built.blocks), checkpointing), checkpointing)
    tokens = torch.zeros(1, SEQ_LEN, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        cross_entropy_sum(model(tokens), tokens).backward()
    counts = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
    assert all(op == "aten.mm" or op.startswith("aten._scaled_dot_product") for op in counts)
    return counts["aten.mm"]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_llamas_matrix_products_are_those_that_torch_counts(mode: dict[str, Any]) -> None:
    checkpointing = ActivationCheckpointConfig.model_validate(mode)
    blocks = tuple(f"layers.{i}" for i in range(LAYERS))
    flops = flops_of_model(ModelConfig(args={**TINY_ARGS, "n_layers": LAYERS}), SEQ_LEN, blocks)
    attention = 4 * DIM * SEQ_LEN * SEQ_LEN  # of one block's forward
    keeps_products = checkpointing.selective_ac_option == "op" and mode != FULL
    num_checkpointed = 0 if keeps_products else len(checkpointed_modules(Inventory((), blocks), checkpointing))
    total = flops.total_per_sample(checkpointing)
    assert total is not None and flops.is_exact
    assert total - attention * (3 * LAYERS + num_checkpointed) == counted_matmuls(checkpointing)


def test_flops_of_a_users_model_are_estimated_only_if_whole_blocks_are_checkpointed() -> None:
    flops = flops_of_model(ModelConfig(name="a.b:c"), 1, ("a", "b", "c", "d"), 300)
    assert not flops.is_exact
    estimates = [flops.total_per_sample(ActivationCheckpointConfig.model_validate(mode)) for mode in MODES]
    assert estimates == [300, 400, None, 350]


def test_a_model_without_a_flop_count_has_no_estimate() -> None:
    flops = flops_of_model(ModelConfig(name="a.b:c"), 1, ("a",))
    assert flops.total_per_sample(ActivationCheckpointConfig()) is None


def test_a_step_takes_between_the_longer_of_computation_and_communication_and_their_sum() -> None:
    fast = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb", "mfu": 0.5}}), 8)
    time = estimate_step_time(6 * 989 * 10**12, LinkTraffic(within=450e9, across=100e9), fast)
    assert time == StepTime(compute=12, communication=2)  # at half the peak; the slower link counts
    assert time.interval == (12, 14)


def test_unknown_hardware_gives_no_interval() -> None:
    nothing = hardware_of(JobConfig(), 4)
    assert estimate_step_time(10, LinkTraffic(0, 0), nothing) == StepTime(None, 0.0)
    assert estimate_step_time(10, LinkTraffic(1, 0), nothing).communication is None
    assert StepTime(None, 1.0).interval is None


def test_a_pipeline_waits_while_it_fills_and_empties() -> None:
    def share(schedule: str) -> float:
        layout = Layout(replicate=1, shard=1, local_batch_size=1, num_microbatches=8, pipeline=4)
        keys = {"pipeline_parallel_degree": 4, "pipeline_parallel_schedule": schedule}
        return bubble_share(ParallelismConfig.model_validate(keys), layout)

    assert [share(name) for name in ("1F1B", "Interleaved1F1B", "ZBVZeroBubble")] == [3 / 8, 3 / 16, 0]
    h100 = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb", "mfu": 0.5}}), 8)
    time = estimate_step_time(989 * 10**12, LinkTraffic(0, 0), h100, share("1F1B"))
    assert (time.compute, time.bubble, time.interval) == (2.75, 0.75, (2.75, 2.75))


def test_steps_whose_intervals_overlap_tie() -> None:
    assert StepTime(10, 2).ties_with(StepTime(11, 0.5)) and StepTime(11, 0.5).ties_with(StepTime(10, 2))
    assert not StepTime(10, 0.5).ties_with(StepTime(11, 0.5))
    assert StepTime(None, 1).ties_with(StepTime(10, 1))


@pytest.mark.parametrize("published", [5762, 6667])
def test_published_speeds_of_llama_8b_are_met_within_15_percent(published: int) -> None:
    """TorchTitan published tokens per second and GPU on 8 H100, eager and compiled, with 2 sequences of 8192 and
    selective activation checkpointing by operation."""
    blocks = tuple(f"layers.{i}" for i in range(32))
    flops = flops_of_model(ModelConfig(flavor="8B"), 8192, blocks)
    per_sample = flops.total_per_sample(ActivationCheckpointConfig(mode="selective"))
    h100 = hardware_of(JobConfig.model_validate({"planner": {"device": "h100-80gb"}}), 8)
    assert per_sample is not None
    compute = estimate_step_time(2 * per_sample, LinkTraffic(0, 0), h100).compute
    assert compute is not None and 2 * 8192 / compute == pytest.approx(published, rel=0.15)
