"""This rank's parts of parameters, with their gradients and state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_launch.dtensors import local_tensor
from titan_launch.optim.exchange import division_of
from titan_launch.optim.rounding import Draw, round_to


@dataclass(frozen=True)
class Shard:
    """A parameter as this rank has it: plain tensors, the memory of which is that of the DTensors."""

    name: str
    whole: Tensor
    """The parameter itself: a DTensor, or a plain tensor."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    seed: int | None
    """Of stochastic rounding; None: to the nearest."""

    @property
    def master(self) -> Tensor:
        """The parameter in float32, to be updated: its master, or itself, or a copy."""
        return self.state.get("master", self.parameter).float()

    def write(self, **values: Tensor) -> None:
        """Store float32 values, which are used up: of the `parameter`, or by the name in the state.

        A parameter with a master is the nearest to that.
        """
        for name, value in values.items():
            if name == "parameter" and "master" in self.state:
                self.state["master"].copy_(value)
                self.parameter.copy_(value)
            else:
                target = self.parameter if name == "parameter" else self.state[name]
                round_to(target, value, self._draw(name))

    def _draw(self, what: str) -> Draw | None:
        if self.seed is None:
            return None
        offsets = division_of(self.whole).offsets(self.whole.shape)
        return Draw(self.seed, f"{self.name}/{what}", self.state["step"], offsets)


def shard_of(name: str, parameter: Tensor, state: dict[str, Any], seed: int | None) -> Shard:
    """The part of a parameter that has a gradient and state."""
    assert parameter.grad is not None
    local_state = {key: local_tensor(value) for key, value in state.items()}
    return Shard(name, parameter, local_tensor(parameter), local_tensor(parameter.grad), local_state, seed)


def mask_gradients(shards: list[Shard], left_out: Tensor | None) -> None:
    """Set the gradients to zero, in place, where the step is left out: what is not finite would not vanish by a factor.
    `left_out`: a boolean on the device."""
    if left_out is not None:
        for shard in shards:
            shard.gradient.masked_fill_(left_out, 0)


def share_kept(left_out: Tensor | None, device: torch.device) -> Tensor:
    """1, or 0 where the step is left out: float64, which takes the dtype of what it multiplies."""
    return torch.ones((), dtype=torch.float64, device=device) if left_out is None else (~left_out).double()
