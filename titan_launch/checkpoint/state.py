"""What a checkpoint holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer


@dataclass
class Progress:
    """How far a run is. With the seed it determines the data to come and the learning rate: both are pure functions."""

    step: int = 0
    """Optimizer steps done, those that a non-finite gradient left out included."""

    samples_seen: int = 0
    """Samples consumed over all ranks: the position in the data."""

    skipped_steps: int = 0
    """Steps whose update was left out because of a non-finite loss or gradient."""

    def state_dict(self) -> dict[str, Any]:
        """As plain integers."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was saved."""
        vars(self).update(state)


class ModelAndOptimizer:
    """Sharded parameters, buffers and optimizer state under their full names, so that any mesh can load them."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Both states, by parameter name (the optimizer's state is created with zeros where there is none yet)."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load both; DCP has already read the right shards."""
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


class RandomState:
    """Every rank's random generators, each rank under a key of its own (DCP keeps only one rank's copy of a shared
    key). On another number of ranks there is nothing to restore, and the generators stay as they were seeded.
    """

    def __init__(self, device: torch.device):
        self._device = device

    def key(self) -> str:
        """The key of this rank, which also names the world size it belongs to."""
        return f"rank_{dist.get_rank()}_of_{dist.get_world_size()}"

    def capture(self) -> dict[str, torch.Tensor]:
        """The state of the CPU's generator, and of this rank's GPU."""
        state = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self._device)
        return state

    def restore(self, state: dict[str, torch.Tensor]) -> None:
        """Set the generators to a captured state."""
        torch.set_rng_state(state["cpu"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self._device)
