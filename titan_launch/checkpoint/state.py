"""What a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.distributed.random_state import RandomState, random_key

Values = dict[str, Tensor]
"""A flat table of tensors, the same on all ranks."""


class Part(Protocol):
    """Something besides model and optimizer that a run goes on with. The same on all ranks."""

    def state_dict(self) -> Values:
        """Return its state, as tensors."""

    def load_state_dict(self, state: Values) -> None:
        """Take over a state, which may lack what was not there when it was saved."""


@dataclass
class Progress:
    """How far a run is. With the seed it determines the data to come and the learning rate: both are pure functions."""

    step: int = 0
    """Optimizer steps done, those whose update was left out included."""

    samples_seen: int = 0
    """Samples that these steps consumed, over all ranks."""

    skipped_steps: int = 0
    """Steps whose update was left out because of a non-finite or outlying loss or gradient."""

    samples_skipped: int = 0
    """Samples that the run has moved past when it went back to a checkpoint: no step of `step` consumed them."""

    rollbacks: int = 0
    """How often it has gone back."""

    @property
    def data_position(self) -> int:
        """Where in the stream of samples the next step begins."""
        return self.samples_seen + self.samples_skipped

    def state_dict(self) -> Values:
        """As tensors: a checkpoint holds nothing else."""
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: Values) -> None:
        """Take over what was saved. Raises ValueError for a number that cannot be one of these."""
        numbers = {name: int(value) for name, value in state.items()}
        wrong = [f"{name} = {number}" for name, number in numbers.items() if not 0 <= number < 2**53]
        if wrong:
            raise ValueError(f"the run's progress has {wrong[0]}")
        vars(self).update(numbers)


class ModelAndOptimizer:
    """Sharded parameters, buffers and optimizer state under their full names, so that any mesh can load them.

    The optimizer's settings (weight decay, betas, groups) are not part of it: they are the configuration's.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """The model's tensors, and the optimizer's for each parameter that has been updated."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if not self._optimizer.state:  # PyTorch would make one, as of a step that has not been done, and leave it there
            return {"model": get_model_state_dict(self._model), "optimizer": {}}
        model, optimizer = get_state_dict(self._model, self._optimizer)
        # Only now: it shards the parameters again that a forward has left gathered, and the optimizer knows the shards.
        updated = {name for name, parameter in self._model.named_parameters() if parameter in self._optimizer.state}
        return {"model": model, "optimizer": {name: _states(optimizer)[name] for name in updated}}

    def targets(self, tensors: Collection[str], updated: Collection[str]) -> dict[str, Any]:
        """Tensors for a checkpoint to be read into: those of the model named in `tensors`, and the optimizer's state of
        the parameters named in `updated`. What the optimizer has is given up."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._optimizer.state.clear()  # of an empty one PyTorch makes a whole one, also for what was never updated
        model, optimizer = get_state_dict(self._model, self._optimizer)
        states = _states(optimizer)
        return {
            "model": {name: tensor for name, tensor in model.items() if name in tensors},
            "optimizer": {name: states[name] for name in updated if name in states},
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of every parameter and buffer that this rank has a part of, by name."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        model = get_model_state_dict(self._model)
        return {name: tuple(tensor.shape) for name, tensor in model.items() if isinstance(tensor, Tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what was read into `targets`; the optimizer keeps its own settings and groups, and loses the state
        of parameters that have none there."""
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

        own, current = get_state_dict(self._model, self._optimizer)
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        optimizer = {**current, "state": {**_states(current), **state["optimizer"]}}
        model = {**own, **state["model"]}
        set_state_dict(self._model, self._optimizer, model_state_dict=model, optim_state_dict=optimizer)
        for group, kept in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(kept)
        for name, parameter in self._model.named_parameters():
            if name not in state["optimizer"]:
                self._optimizer.state.pop(parameter, None)


def _states(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The state of each parameter, by name."""
    states: dict[str, Any] = optimizer["state"]
    return states


def rank_key() -> str:
    """The key of this rank: DCP keeps only one rank's copy of what all ranks call the same."""
    return f"rank_{dist.get_rank()}"


class LocalStatistics:
    """Each rank's own running statistics of BatchNorm, for a checkpoint at a step where they are pooled only because it
    is saved (by the clock, or before a signal's end): the run goes on with what it would have without that.

    Kept under a key of each rank's own, beside the pooled ones, and taken up by as many ranks as wrote them.
    """

    def __init__(self, model: nn.Module):
        self._buffers = {
            f"{path}.{name}": buffer
            for path, module in model.named_modules()
            if isinstance(module, _BatchNorm)
            for name, buffer in module.named_buffers(recurse=False)
        }
        self._kept: Values = {}

    def keep(self) -> None:
        """Remember them, before they are pooled."""
        self._kept = {name: buffer.detach().clone() for name, buffer in self._buffers.items()}

    def state_dict(self) -> Values:
        """What was kept since the last `restore`."""
        return self._kept

    def targets(self) -> Values:
        """Tensors for a checkpoint to be read into."""
        return {name: torch.empty_like(buffer) for name, buffer in self._buffers.items()}

    def restore(self) -> None:
        """Go back to what was kept, if it was."""
        self.load_state_dict(self._kept)
        self._kept = {}

    @torch.no_grad()
    def load_state_dict(self, state: Values) -> None:
        """Take over a state."""
        for name, value in state.items():
            self._buffers[name].copy_(value)


class TrainingState:
    """All that a run goes on with: model, optimizer, random generators, and further parts by name."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        parts: Mapping[str, Part],
        device: torch.device,
        seed: int,
        stream: int,
        pipeline: dist.ProcessGroup | None = None,
    ):
        """`seed`, `stream`: of the random numbers that this rank draws. `pipeline`: the ranks that hold the other
        stages of the model, if there are any."""
        self._pipeline = pipeline
        self.weights = ModelAndOptimizer(model, optimizer)
        self.parts = dict(parts)
        self.random = RandomState(device, seed, stream)
        self.random_key = random_key(stream)
        self.local_statistics = LocalStatistics(model)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The whole shape of every parameter and buffer of the whole model, by name; collective over the pipeline."""
        if self._pipeline is None:
            return self.weights.shapes()
        return {
            name: shape for part in on_all_ranks(self.weights.shapes, self._pipeline) for name, shape in part.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Nested tables, whose leaves are DTensors and tensors; nothing is copied."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        return {
            **self.weights.state_dict(),
            **parts,
            "random": {self.random_key: self.random.state_dict()},
            "local_statistics": {rank_key(): self.local_statistics.state_dict()},
        }
