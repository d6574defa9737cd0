"""Planned bytes of an optimizer's state and update, compared with measured ones."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.sampling import sampled
from titan_launch.config import optimizers
from titan_launch.config.optimizers import GroupSizes, ShardSize
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.core.patches import replaced
from titan_launch.metrics.memory import track
from titan_launch.models.decoder.mixture_of_experts import Experts
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.optim.groups import group_parameters
from titan_launch.optim.registry import build_optimizer
from titan_launch.plan.memory.ledger import Category, Ledger, StepPoint, state_bytes, temporary_bytes

HEAD = "8"
"""Path of the output layer."""

CASES: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "foreach": ({"implementation": "foreach"}, torch.float32),
    "states in bf16": ({"state_dtype": "bfloat16"}, torch.float32),
    "states in bf16, stochastic": ({"state_dtype": "bfloat16", "rounding": "stochastic"}, torch.float32),
    "states in 8 bits": ({"state_dtype": "int8"}, torch.float32),
    "sgd, states in 8 bits": ({"name": "SGD", "state_dtype": "int8"}, torch.bfloat16),
    "muon, states in 8 bits": ({"name": "Muon", "state_dtype": "int8"}, torch.float32),
    "stochastic": ({"rounding": "stochastic"}, torch.bfloat16),
    "masters": ({"master_weights": True, "state_dtype": "float32"}, torch.bfloat16),
    "muon": ({"name": "Muon"}, torch.float32),
    "muon, stochastic": ({"name": "Muon", "rounding": "stochastic"}, torch.bfloat16),
    "sgd": ({"name": "SGD", "weight_decay": 1e-4}, torch.float32),
    "sgd without momentum": ({"name": "SGD", "sgd": {"momentum": 0.0}, "implementation": "foreach"}, torch.float32),
    "sgd, foreach": ({"name": "SGD", "weight_decay": 1e-4, "implementation": "foreach"}, torch.float32),
    "sgd, for-loop": (
        {"name": "SGD", "weight_decay": 1e-4, "implementation": "for-loop", "sgd": {"nesterov": True}},
        torch.float32,
    ),
    "sgd, stochastic": ({"name": "SGD", "rounding": "stochastic"}, torch.bfloat16),
    "sgd, masters": ({"name": "SGD", "master_weights": True, "state_dtype": "float32"}, torch.bfloat16),
    "muon, masters": ({"name": "Muon", "master_weights": True}, torch.bfloat16),
    "muon, even number of iterations": ({"name": "Muon", "muon": {"ns_steps": 4}}, torch.float32),
}


def measure(
    settings: dict[str, Any], dtype: torch.dtype, shape: tuple[int, ...], stacked: int
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return temporary and state bytes of a step that is not the first: measured, and planned. `stacked`: width of
    experts.

    A step waits until gloo's thread, which may briefly hold a tensor that it has sent, has released it.
    """
    config = OptimizerConfig.model_validate(settings)
    layers = (
        *(nn.Linear(128, 320), nn.Linear(320, 192, bias=False), nn.Linear(192, 256), nn.Linear(256, 256)),
        *(nn.Linear(256, 256) for _ in range(4)),
    )
    experts = Experts(64, ExpertArgs(num_experts=6, top_k=1, hidden_dim=stacked, expert_bias=True), nn.functional.silu)
    model = nn.Sequential(*layers, nn.Linear(256, 96), experts).to(dtype)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = build_optimizer(model, config, head=(HEAD,))
    seen = []
    for _ in range(4):
        ledger = Ledger()
        ledger.enter(StepPoint(0, "step", ""))
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        with track(model, ledger, optimizer), replaced(dist, "all_to_all_single", released(dist.all_to_all_single)):
            before = ledger.total
            optimizer.step()
            seen.append((ledger.footprint().peak_bytes - before, ledger.live[Category.OPTIMIZER]))
    groups = [
        GroupSizes(group.settings, [shard_size(p) for p in group.parameters.values()])
        for group in group_parameters(model, config, head=(HEAD,))
    ]
    return min(seen[1:]), (temporary_bytes(config, groups, shape[-1]), state_bytes(config, groups))


def released(exchange: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective that returns when nobody else holds its tensors any more."""

    def call(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in args if isinstance(value, Tensor)]
        before = [tensor._use_count() for tensor in tensors]  # type: ignore[attr-defined]
        result = exchange(*args, **kwargs)
        deadline = time.monotonic() + 60
        while [tensor._use_count() for tensor in tensors] != before:  # type: ignore[attr-defined]
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return result

    return call


def shard_size(parameter: nn.Parameter) -> ShardSize:
    assert isinstance(parameter, DTensor)
    return ShardSize(tuple(parameter.shape), parameter.to_local().numel(), str(parameter.dtype).removeprefix("torch."))


def measure_all(names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        case = CASES[name]
        for shape, hidden_dim in (((2,), 8), ((2, 1), 256)):  # experts are the smallest and the largest parameters
            found[f"{name} {shape}"] = measure(*case, shape, hidden_dim)
            if name.startswith("muon"):  # its batches are smaller than the model
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(optimizers, "_MUON_LIMIT", 40_000)
                    found[f"{name} {shape}, in parts"] = measure(*case, shape, hidden_dim)
    return found


@sampled("names", list(CASES), 12)
def test_planned_bytes_are_the_measured_ones(names: tuple[str, ...]) -> None:
    """The rank has the larger of two shards, or the only one."""
    for name, (measured, planned) in run_ranks(measure_all, 2, names, timeout=220)[0].items():
        assert measured == pytest.approx(planned, rel=0.01, abs=128), name  # a few scalars
