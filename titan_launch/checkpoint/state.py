"""The training state: everything that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.checkpoint.manifest import BaseRecord
from titan_launch.distributed.collectives import on_all_ranks
from titan_launch.distributed.random_state import RandomState, random_key

Values = dict[str, Tensor]
"""A flat dict of tensors by name: DTensors, or plain tensors. If several ranks have a plain tensor of the same name,
their values are equal. The values of the optimizer and of the moving average of the weights may also be `Shard`s. A
`Shard` is this rank's part of a tensor."""


class StatePart(Protocol):
    """A part of the training state besides model and optimizer."""

    def state_dict(self) -> Values:
        """Return the state as tensors."""

    def load_state_dict(self, state: Values) -> None:
        """Load a state. `state` lacks the keys that are excluded from loading, and keys that an earlier version of the
        launcher did not save."""


class SizedPart(StatePart):
    """Base class of parts whose tensors may have different sizes in different checkpoints, and different keys on
    different ranks."""

    def targets(self, shapes: Mapping[str, tuple[int, ...]]) -> Values:
        """Return the tensors into which a checkpoint is read. `shapes`: the saved shapes, by key."""
        raise NotImplementedError


@dataclass
class Progress:
    """Progress of a run. The data order and the learning rate are pure functions of the progress and the seed."""

    step: int = 0
    """Number of finished steps, including skipped steps."""

    samples_seen: int = 0
    """Number of samples that the finished steps consumed, over all ranks."""

    skipped_steps: int = 0
    """Number of steps without an update, because the loss or the gradient norm was not finite, or was a spike."""

    samples_skipped: int = 0
    """Number of samples that were consumed by steps that rollbacks have undone. These samples are not used again, and
    `samples_seen` does not count them."""

    rollbacks: int = 0
    """Number of rollbacks: returns to a checkpoint after too many skipped steps."""

    @property
    def data_position(self) -> int:
        """Index of the next step's first sample in the stream of samples."""
        return self.samples_seen + self.samples_skipped

    def state_dict(self) -> Values:
        """Return the numbers of this object as tensors, because a checkpoint holds only tensors."""
        return {name: torch.tensor(value) for name, value in vars(self).items()}

    def load_state_dict(self, state: Values) -> None:
        """Load the saved numbers. Raises ValueError for a number below 0, or of 2**53 or more."""
        numbers = {name: int(value) for name, value in state.items()}
        wrong = [f"{name} = {number}" for name, number in numbers.items() if not 0 <= number < 2**53]
        if wrong:
            raise ValueError(f"the run's progress is invalid: {wrong[0]}")
        vars(self).update(numbers)


class ModelAndOptimizer:
    """Sharded parameters, buffers and optimizer state by full name, so that any mesh can load them. The optimizer's
    settings (weight decay, betas, groups) come from the job file and are not part of the state."""

    def __init__(self, model: nn.Module, optimizer: Optimizer):
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Return nested dicts: under `model` the model's tensors, and under `optimizer` the state of each parameter
        that the optimizer has updated."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

        if not self._optimizer.state:  # get_state_dict would create optimizer state, as if a step had been done
            return {"model": get_model_state_dict(self._model), "optimizer": {}}
        model, optimizer = get_state_dict(self._model, self._optimizer)
        states = _states(optimizer)
        # The keys of optimizer.state are sharded parameters. get_state_dict has resharded the parameters that a forward
        # left unsharded, so `named_parameters` now returns the sharded ones.
        updated = {name for name, parameter in self._model.named_parameters() if parameter in self._optimizer.state}
        return {"model": model, "optimizer": {name: states[name] for name in updated}}

    def targets(self, tensors: Collection[str], updated: Collection[str]) -> dict[str, Any]:
        """Return tensors into which a checkpoint is read, in dicts like those of `state_dict`. The current optimizer
        state is dropped. `tensors`: names of the model's tensors to read. `updated`: names of the parameters whose
        optimizer state is read."""
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self._optimizer.state.clear()  # get_state_dict then creates the state of all parameters
        model, optimizer = get_state_dict(self._model, self._optimizer)
        states = _states(optimizer)
        return {
            "model": {name: tensor for name, tensor in model.items() if name in tensors},
            "optimizer": {name: states[name] for name in updated if name in states},
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the unsharded shape of every parameter and buffer of which this rank has a shard, by name."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        model = get_model_state_dict(self._model)
        return {name: tuple(tensor.shape) for name, tensor in model.items() if isinstance(tensor, Tensor)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state`: the result of `targets`, after a checkpoint was read into it. The optimizer keeps its settings
        and groups. A parameter whose optimizer state is not in `state` loses its current optimizer state."""
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
    """Return the optimizer state of each parameter, by name."""
    states: dict[str, Any] = optimizer["state"]
    return states


def rank_key() -> str:
    """Return this rank's key in a state dict. State that differs between ranks needs a key for each rank, because DCP
    saves only one rank's value of a key."""
    return f"rank_{dist.get_rank()}"


class LocalStatistics(StatePart, Protocol):
    """Each rank's own running statistics of BatchNorm (`parallel.batchnorm.RunningStatistics`).

    A checkpoint always has the pooled statistics, which are equal on all ranks. If `checkpoint.interval_minutes` or a
    signal is the only reason for a checkpoint, each rank continues with its own statistics after the save. Such a
    checkpoint also has these statistics, under a key for each rank. If a run resumes from it on the same number of
    ranks, each rank restores its own statistics, as if there had been no checkpoint.
    """

    def targets(self) -> Values:
        """Return tensors into which a checkpoint is read."""


class BaseWeights(Protocol):
    """The folder of `model.weights`. Checkpoints omit parameters that are never trained, because this folder has their
    values."""

    @property
    def omitted(self) -> Collection[str]:
        """Names of the parameters that a checkpoint of the present state omits."""

    @property
    def record(self) -> BaseRecord | None:
        """The facts about the folder that a checkpoint's manifest records; None without a folder."""

    def find(self, checkpoint: Path, base: BaseRecord, names: Collection[str]) -> Collection[str]:
        """Return the names in `names` for which the folder has values. Collective. `names`: tensors of the model that
        `checkpoint` lacks. `base`: the folder that the checkpoint's manifest names. Raises ConfigError if
        `model.weights` is not set, cannot be read, or has other content than `base`."""

    def read(self, missing: Collection[str]) -> None:
        """Read the parameters `missing` from the folder, unless they have been read before. Collective.

        The other parameters of the model have already been loaded from a checkpoint. After this call, checkpoints omit
        each parameter that is never trained and equals its value in the folder, unless `checkpoint.save_frozen` is set.
        """


class TrainingState:
    """The whole training state: model, optimizer, random generators, and further parts by name."""

    def __init__(
        self,
        weights: ModelAndOptimizer,
        parts: Mapping[str, StatePart | None],
        local_statistics: LocalStatistics,
        random: RandomState,
        pipeline: dist.ProcessGroup | None = None,
        base: BaseWeights | None = None,
    ):
        """`parts`: further parts by name, in the order in which they are loaded after the weights. The value is None
        for a part that this run does not have. `pipeline`: process group of the ranks that hold the pipeline stages of
        the model; None without pipeline parallelism. `base`: the folder with the values of parameters that checkpoints
        omit. With None, checkpoints omit nothing."""
        self._pipeline = pipeline
        self.base = base
        self.weights = weights
        self.parts = {name: part for name, part in parts.items() if part is not None}
        self.random = random
        self.random_key = random_key(random.stream)
        self.local_statistics = local_statistics

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter and buffer of the whole model, by name. Collective over the pipeline."""
        if self._pipeline is None:
            return self.weights.shapes()
        return {
            name: shape for part in on_all_ranks(self.weights.shapes, self._pipeline) for name, shape in part.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Return nested dicts of DTensors, `Shard`s and tensors, without the parameters that `base` omits. Parameters
        and optimizer state are not copied."""
        parts = {name: part.state_dict() for name, part in self.parts.items()}
        weights = self.weights.state_dict()
        omitted = () if self.base is None else self.base.omitted
        return {
            **weights,
            "model": {name: tensor for name, tensor in weights["model"].items() if name not in omitted},
            **parts,
            "random": {self.random_key: self.random.state_dict()},
            "local_statistics": {rank_key(): self.local_statistics.state_dict()},
        }
