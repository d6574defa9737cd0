"""An exponential moving average of the trained parameters (`[ema]`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.config.sections.training import EMAConfig
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.optim.groups import trainable_paths
from titan_launch.optim.shards import in_float32


def update_weight(config: EMAConfig, step: int) -> float:
    """Return the weight of the parameters in the average after a step: 0 if the step is between updates, and 1 while
    the average is a copy of the parameters. The number of updates follows from the step, so a resume needs no state."""
    assert config.decay is not None
    if step % config.every_steps:
        return 0.0
    if step <= config.start_step:
        return 1.0
    earlier = step // config.every_steps - config.start_step // config.every_steps - 1
    return 1 - (min(config.decay, (1 + earlier) / (10 + earlier)) if config.warmup else config.decay)


class WeightEMA:
    """The average: for each trainable parameter a float32 DTensor, sharded like the parameter. A shared parameter has
    one average. Nothing is communicated."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, config: EMAConfig):
        """Begin with the values of the parameters. If the optimizer has float32 masters, they are averaged in place of
        the rounded parameters."""
        self._config = config
        self._optimizer = optimizer
        self._names = trainable_paths(model)
        self._averages = {p: torch.empty_like(p, dtype=torch.float32, requires_grad=False) for p in self._names}
        self.load_state_dict({})

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
            # One tensor at a time: `_foreach_lerp_` with a weight on the device is such a loop, too.
            local.lerp_(source, applied)

    @contextmanager
    def in_model(self, parameters_changed: Callable[[], None]) -> Iterator[None]:
        """Give the parameters the values of the average until the end of the block.

        The parameters must be sharded, as they are between steps. `parameters_changed` is called after both changes.
        The copies of the parameters need less memory than their gradients, which do not exist between steps.
        """
        own = {parameter: local_tensor(parameter).detach().clone() for parameter in self._averages}
        _set_parameters(self._averages)
        parameters_changed()
        try:
            yield
        finally:
            _set_parameters(own)
            parameters_changed()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the averages by the full names of the parameters. That of a shared parameter has all its names."""
        return {name: self._averages[parameter] for parameter, names in self._names.items() for name in names}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load averages. An average that is not in `state` begins anew with the value of its parameter."""
        for parameter, average in self._averages.items():
            loaded = (local_tensor(state[name]) for name in self._names[parameter] if name in state)
            local_tensor(average).copy_(next(loaded, self._source(parameter)))

    def _source(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's values of a parameter: those of its master if there is one."""
        return local_tensor(self._optimizer.state.get(parameter, {}).get("master", parameter))


@torch.no_grad()
def _set_parameters(values: Mapping[nn.Parameter, Tensor]) -> None:
    for parameter, value in values.items():
        local_tensor(parameter).copy_(local_tensor(value))
