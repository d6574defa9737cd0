"""What a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection
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
    """Sharded parameters, buffers and optimizer state under their full names, so that any mesh can load them.

    The optimizer's settings (weight decay, betas, groups) are not part of it: they are the configuration's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors, and the optimizer's for each parameter that has been updated."""
        model, optimizer = get_state_dict(self._model, self._optimizer)
        # Only now: it shards the parameters again that a forward has left gathered, and the optimizer knows the shards.
        updated = {name for name, parameter in self._model.named_parameters() if parameter in self._optimizer.state}
        return {"model": model, "optimizer": {name: _states(optimizer)[name] for name in updated}}

    def targets(self, saved: Collection[str]) -> dict[str, Any]:
        """Tensors for a checkpoint to be read into, for what is among its `saved` keys.

        A parameter that was never updated has no optimizer state there, though a new optimizer can make some for it.
        """
        model, optimizer = get_state_dict(self._model, self._optimizer)
        updated = {key.removeprefix("optimizer.").rpartition(".")[0] for key in saved if key.startswith("optimizer.")}
        return {"model": model, "optimizer": {name: s for name, s in _states(optimizer).items() if name in updated}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was read into `targets`; the optimizer keeps its own settings and groups."""
        _, current = get_state_dict(self._model, self._optimizer)
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        optimizer = {**current, "state": {**_states(current), **state["optimizer"]}}
        set_state_dict(self._model, self._optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
        for name, parameter in self._model.named_parameters():
            if name not in state["optimizer"]:
                self._optimizer.state.pop(parameter, None)


def _states(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of each parameter, by name."""
    states: dict[str, Any] = optimizer["state"]
    return states


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
