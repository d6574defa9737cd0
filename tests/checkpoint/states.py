"""A small training state on the ranks of a test, and its checkpoint manager."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.tensors import full_state, full_tensor
from titan_launch.checkpoint.manager import CheckpointManager
from titan_launch.checkpoint.manifest import Origin
from titan_launch.checkpoint.state import ModelAndOptimizer, Progress, TrainingState
from titan_launch.config.sections.checkpoint import CheckpointConfig
from titan_launch.distributed.random_state import RandomState
from titan_launch.parallel.batchnorm import RunningStatistics

ORIGIN = Origin(
    world_size=0, config_digest="", gradient_accumulation={}, activation_checkpoint={}, data={}, command="", commit=None
)
CPU = torch.device("cpu")


@dataclass
class Trained:
    """A model with uneven shards, buffers and a parameter that is never updated, and its optimizer."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    progress: Progress
    state: TrainingState

    def step(self) -> None:
        """Update the model. Each call uses other gradients."""
        inputs = torch.full((4, 5), 0.1 * (self.progress.step + 1))
        self.model[0](inputs).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.model.get_buffer("counts").add_(1)
        self.progress.step += 1
        self.progress.samples_seen += 4

    def everything(self) -> dict[str, Tensor]:
        """Return parameters, buffers and optimizer state, gathered from their shards."""
        found = full_state(self.model)
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                found[f"{name}/{key}"] = full_tensor(value)
        return found


def trained(steps: int, replicas: int = 1, width: int = 7) -> Trained:
    """Return the state after `steps` steps on the ranks of the test."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 3)), nn.Linear(3, 3)])
    model.register_buffer("counts", torch.zeros(2))
    ranks = dist.get_world_size()
    names = ("dp_replicate", "dp_shard")
    mesh = init_device_mesh("cpu", (replicas, ranks // replicas), mesh_dim_names=names)
    fully_shard(model[0], mesh=mesh if replicas > 1 else mesh["dp_shard"])
    fully_shard(model[1], mesh=mesh if replicas > 1 else mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    progress = Progress()
    statistics = RunningStatistics(model)
    weights, random = ModelAndOptimizer(model, optimizer), RandomState(CPU, 0, dist.get_rank())
    state = TrainingState(weights, {"progress": progress}, statistics, random)
    result = Trained(model, optimizer, progress, state)
    for _ in range(steps):
        result.step()
    return result


def manager_of(own: Trained, folder: Path, **config: Any) -> CheckpointManager:
    """Return a checkpoint manager for the state that writes into `folder`."""
    settings = CheckpointConfig(enable=True, **config)
    return CheckpointManager(folder, settings, own.state, own.progress, ORIGIN, CPU)


def saved(folder: Path, steps: int, replicas: int = 1, **config: Any) -> dict[str, Tensor]:
    """Train, save after every step, and return the state at the end."""
    own = trained(0, replicas)
    manager = manager_of(own, folder, **config)
    for _ in range(steps):
        own.step()
        manager.save()
    manager.finish()
    manager.close()
    return own.everything()
