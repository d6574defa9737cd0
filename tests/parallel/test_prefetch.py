"""Backward all-gathers the blocks as early with precision rules as without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed import join_fake_group, run_ranks
from tests.train.jobs import TINY_ARGS
from titan_launch.config.job import JobConfig
from titan_launch.distributed.mesh import build_mesh
from titan_launch.models.build import build_model
from titan_launch.plan.layout import plan_layout
from titan_launch.train.model import plan_precision, shard_model

SMALL = 2000
"""Number of elements: more than all norms together, less than a block."""


class LargeGathers(TorchDispatchMode):
    """A dispatch mode that records every large all-gather."""

    def __init__(self, events: list[str]):
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "allgather" in func.__name__ and args[0].numel() > SMALL:
            self.events.append("gather")
        return func(*args, **(kwargs or {}))


def backward_events(rules: list[dict[str, Any]], keeps: bool) -> list[str]:
    """Return the order in which backward all-gathers blocks and starts to compute in them, among 4 fake ranks."""
    join_fake_group(4)
    config = JobConfig.model_validate(
        {
            "model": {"args": {**TINY_ARGS, "n_layers": 4}},
            "training": {"seq_len": 16},
            "precision": {"rules": rules},
            "parallelism": {"fsdp_reshard_after_forward": "default" if keeps else "always"},
        }
    )
    built = build_model(config.model, 16)
    layout = plan_layout(config.parallelism, config.training, 4)
    plan = plan_precision(config, built)
    model = shard_model(config, built, plan, build_mesh(layout, "cpu")).to_empty(device="cpu")
    events: list[str] = []
    for path in ("output", *built.blocks):
        entered = model.get_submodule(path if path == "output" else f"{path}.feed_forward.w2")
        entered.register_forward_hook(begins_backward(events, path))
    loss = model(torch.zeros(1, 4, dtype=torch.int64)).sum()
    with LargeGathers(events):
        loss.backward()
    return events


def begins_backward(events: list[str], path: str) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(lambda grad: events.append(path))

    return hook


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("unit_per", ["model", "block", "module"])
def test_backward_all_gathers_the_next_block_before_it_computes_the_current_one(unit_per: str, keeps: bool) -> None:
    rule = {"type": "RMSNorm", "param_dtype": "float32", "unit_per": unit_per}
    plain = run_ranks(backward_events, 1, [], keeps)[0]
    assert plain[-7:] == ["gather", "layers.3", "gather", "layers.2", "gather", "layers.1", "layers.0"]
    assert run_ranks(backward_events, 1, [rule], keeps)[0] == plain
