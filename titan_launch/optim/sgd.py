"""SGD with momentum, parameters and masters in dtypes of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_launch.config.sections.training import SGDConfig
from titan_launch.optim.shards import LocalShard, count_step, in_float32, masters, store
from titan_launch.plan.param_groups import batches


def update_sgd(shards: Sequence[LocalShard], lr: float, weight_decay: float, config: SGDConfig, kept: Tensor) -> None:
    """One step in float32; what is stored in bfloat16 is rounded once, at the end.

    `kept`: 1, or 0 where nothing is to change, in which case the gradients must be 0. Nothing waits for the device.
    """
    count_step(shards, kept)
    for batch in batches([shard.parameter.numel() for shard in shards]):
        _update([shards[index] for index in batch], lr, weight_decay, config, kept)


def _update(shards: Sequence[LocalShard], lr: float, weight_decay: float, config: SGDConfig, kept: Tensor) -> None:
    # Scalars in the dtype of the lists, without which PyTorch updates a list tensor by tensor.
    parameters = masters(shards)
    updates = torch._foreach_mul(parameters, (weight_decay * kept).float())
    torch._foreach_add_(updates, in_float32([shard.gradient for shard in shards]))
    if config.momentum:
        momenta = in_float32([shard.state["momentum_buffer"] for shard in shards])
        torch._foreach_mul_(momenta, (1 - (1 - config.momentum) * kept).float())
        torch._foreach_add_(momenta, updates)
        if config.nesterov:
            torch._foreach_add_(updates, momenta, alpha=config.momentum)
        else:
            torch._foreach_copy_(updates, momenta)
        store(shards, "momentum_buffer", momenta)
        del momenta
    torch._foreach_mul_(updates, (-lr * kept).float())
    torch._foreach_add_(parameters, updates)
    del updates
    store(shards, "parameter", parameters)
