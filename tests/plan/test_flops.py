"""FLOPs of activation checkpointing, against those that torch counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.train.jobs import TINY_ARGS
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.models.build import build_model
from titan_launch.models.loss import cross_entropy_sum
from titan_launch.parallel.activation_checkpoint import checkpoint_activations
from titan_launch.plan.module_selection import checkpointed_modules
from titan_launch.plan.step_time import flops_of_model
from titan_launch.plan.types import Inventory

SEQ_LEN, LAYERS, DIM = 16, 4, TINY_ARGS["dim"]
FULL = {"mode": "full"}
MODES = [{"mode": "none"}, FULL, {"mode": "selective"}, {"mode": "selective", "selective_ac_option": 2}]


def counted_matmuls(checkpointing: ActivationCheckpointConfig) -> int:
    """FLOPs of a forward and backward without attention's, which torch counts on a CPU from 2.15 on only."""
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


def test_of_other_models_only_whole_checkpointed_blocks_are_estimated() -> None:
    flops = flops_of_model(ModelConfig(name="a.b:c"), 1, ("a", "b", "c", "d"), 300)
    assert not flops.is_exact
    estimates = [flops.total_per_sample(ActivationCheckpointConfig.model_validate(mode)) for mode in MODES]
    assert estimates == [300, 400, None, 350]


def test_a_model_that_does_not_say_its_flops_has_none() -> None:
    flops = flops_of_model(ModelConfig(name="a.b:c"), 1, ("a",))
    assert flops.total_per_sample(ActivationCheckpointConfig()) is None
