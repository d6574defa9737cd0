"""SGD with separate dtypes for momentum, parameters and master weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from titan_launch.config.optimizers import batches
from titan_launch.config.sections.training import OptimizerConfig, SGDConfig
from titan_launch.optim.shards import ShardGroup, applied_or_skipped, count_step, in_float32, masters, moments, store


def update_sgd(groups: Sequence[ShardGroup], config: OptimizerConfig, applied: Tensor) -> None:
    """Update all groups in float32. Results in bfloat16 are rounded once, when they are stored. `applied`: a scalar on
    the device that is 1, or 0 for a skipped step, whose gradients must be 0. The host does not wait for the device."""
    for group in groups:
        count_step(group.shards, applied)
        for batch in batches(group.shards, lambda shard: shard.parameter.numel()):
            _update(group._replace(shards=batch), config.sgd, applied)


def update_pytorch(group: ShardGroup, config: OptimizerConfig, found_inf: Tensor | None) -> None:
    """Update a group by PyTorch's function `sgd`. (The class `torch.optim.SGD` is not used, because its momentum
    buffers stay uninitialized if the first step is skipped.) `found_inf`: a scalar on the device, not 0 for a
    skipped step. None means that the step is not skipped."""
    shards = group.shards
    count_step(shards, applied_or_skipped(found_inf, shards[0].parameter.device))
    sgd(
        [shard.parameter for shard in shards],
        [shard.gradient for shard in shards],
        [shard.state.get("momentum_buffer") for shard in shards],
        dampening=0.0,
        **config.sgd.model_dump(),
        **group.pytorch_settings(config, found_inf),
    )


def _update(group: ShardGroup, config: SGDConfig, applied: Tensor) -> None:
    # The scalars are float32 like the lists of tensors. Otherwise PyTorch would update a list tensor by tensor.
    shards = group.shards
    parameters = masters(shards)
    updates = torch._foreach_mul(parameters, (group.weight_decay * applied).float())
    torch._foreach_add_(updates, in_float32([shard.gradient for shard in shards]))
    if config.momentum:
        momenta = moments(shards, "momentum_buffer")
        torch._foreach_mul_(momenta, (1 - (1 - config.momentum) * applied).float())
        torch._foreach_add_(momenta, updates)
        if config.nesterov:
            torch._foreach_add_(updates, momenta, alpha=config.momentum)
        else:
            torch._foreach_copy_(updates, momenta)
        store(shards, "momentum_buffer", momenta)
        del momenta
    torch._foreach_mul_(updates, (-group.lr * applied).float())
    torch._foreach_add_(parameters, updates)
    del updates
    store(shards, "parameter", parameters)
