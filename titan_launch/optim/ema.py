"""An exponential moving average of the trained parameters (`[ema]`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.config.sections.training import EMAConfig
from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.distributed.dtensor import Shard, local_tensor
from titan_launch.optim.groups import trainable_paths
from titan_launch.optim.registry import replicas_of
from titan_launch.optim.shards import in_float32


def update_weight(config: EMAConfig, step: int) -> float:
    """Return the weight w of a step: the new average is (1 - w) x average + w x parameters. For a step between updates,
    w is 0. For updates up to `ema.start_step`, w is 1 (a copy). w depends only on the step, so a resume needs no
    state."""
    assert config.decay is not None
    if step % config.every_steps:
        return 0.0
    if step < config.first_update:
        return 1.0
    earlier = (step - config.first_update) // config.every_steps
    return 1 - (min(config.decay, (1 + earlier) / (10 + earlier)) if config.warmup else config.decay)


class WeightEMA(Observer):
    """A moving average of the trainable parameters: for each parameter a float32 DTensor, sharded like the parameter. A
    shared parameter has one average. If the optimizer is sharded over replicas, each average is a plain tensor instead:
    the average of this replica's chunk of the parameter. In that case `in_model` all-gathers the chunks. No other
    method communicates."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: EMAConfig):
        """Begin with the values of the parameters. If the optimizer has float32 master weights, these are averaged in
        place of the rounded parameters."""
        self._config = config
        self._optimizer = optimizer
        self._replicas = replicas_of(optimizer)
        self._names = trainable_paths(model)
        self._averages = {
            p: torch.empty_like(self._own(p) if self._replicas else p, dtype=torch.float32, requires_grad=False)
            for p in self._names
        }
        self.load_state_dict({})

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        """Update the average."""
        self.update(step.number, result.is_skipped)

    @torch.no_grad()
    def update(self, step: int, is_skipped: Tensor) -> None:
        """Update the average after a step, unless the step was skipped. `is_skipped`: scalar on the device, 0 or 1. The
        host does not wait for the device, except with CPU offload."""
        weight = update_weight(self._config, step)
        if not weight:
            return
        applied = torch.where(is_skipped == 0, weight, 0.0)
        for parameter, average in self._averages.items():
            local, (source,) = local_tensor(average), in_float32([self._source(parameter)])
            applied = applied.to(local.device)
            # A loop, because `_foreach_lerp_` with a weight on the device also updates one tensor at a time.
            local.lerp_(source, applied)

    @contextmanager
    def in_model(self, parameters_changed: Callable[[], None]) -> Iterator[None]:
        """Give the parameters the values of the average until the end of the block.

        The parameters must be sharded, as they are between steps. `parameters_changed` is called after each of the two
        changes of the parameters. Copies of the parameters are kept until the end of the block. The copies need no more
        memory than the gradients, which do not exist between steps. Collective over the replicas if the optimizer is
        sharded over them.
        """
        own = {parameter: local_tensor(parameter).detach().clone() for parameter in self._averages}
        try:
            with torch.no_grad():
                for parameter, average in self._averages.items():
                    self._own(parameter).copy_(local_tensor(average))
            if self._replicas is not None:
                self._replicas.gather_parameters()
            parameters_changed()
            yield
        finally:
            with torch.no_grad():
                for parameter, value in own.items():
                    local_tensor(parameter).copy_(value)
            parameters_changed()

    @property
    def tensors(self) -> Iterable[Tensor]:
        """The averages, as DTensors or plain tensors."""
        return self._averages.values()

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the full names of the parameters. The average of a shared parameter appears under all
        its names. The average of a chunk is a `Shard`."""
        averages: dict[nn.Parameter, Tensor | Shard] = {**self._averages}
        if self._replicas is not None:
            averages = {p: self._replicas.shard_of(p, chunk, tuple(p.shape)) for p, chunk in self._averages.items()}
        return {name: averages[parameter] for parameter, names in self._names.items() for name in names}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load averages by the full names of the parameters. If `state` lacks an average, the average gets the value of
        its parameter or, if there is one, of the float32 master weight."""
        for parameter, average in self._averages.items():
            loaded = (state[name] for name in self._names[parameter] if name in state)
            value = next(loaded, self._source(parameter))
            local_tensor(average).copy_(value.local if isinstance(value, Shard) else local_tensor(value))

    def _source(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's values of a parameter, or of its float32 master weight if there is one."""
        master = self._optimizer.state.get(parameter, {}).get("master")
        return self._own(parameter) if master is None else local_tensor(master)

    def _own(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's shard of a parameter. If the optimizer is sharded over replicas, return this replica's
        chunk of the shard. The average has the same shape."""
        local = local_tensor(parameter).detach()
        return local if self._replicas is None else self._replicas.of(parameter, local)


def build_ema(config: EMAConfig, model: nn.Module, optimizer: Optimizer) -> WeightEMA | None:
    """Return the moving average of the parameters of a wrapped model; None if `ema.decay` is not set."""
    return None if config.decay is None else WeightEMA(model, optimizer, config)
