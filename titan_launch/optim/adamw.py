"""AdamW (arXiv:1711.05101) with separate dtypes for moments, parameters and master weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from titan_launch.config.optimizers import batches
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.optim.shards import ShardGroup, count_step, in_float32, masters, moments, store


def update_adamw(groups: Sequence[ShardGroup], config: OptimizerConfig, applied: Tensor) -> None:
    """Update all groups in float32. Results in bfloat16 are rounded once, when they are stored. `applied`: a scalar on
    the device that is 1, or 0 for a skipped step, whose gradients must be 0. The host does not wait for the device."""
    for group in groups:
        count_step(group.shards, applied)
        step = group.shards[0].state["step"].double().clamp(min=1)  # 0 before the first update, which may be skipped
        # The scalars are float32 like the lists of tensors. Otherwise PyTorch would update a list tensor by tensor.
        corrections = _Corrections(
            (1 - config.beta2**step).sqrt().float(),
            ((1 - config.beta1**step) / applied).float(),  # infinity if the step is skipped, so that the update is 0
        )
        for batch in batches(group.shards, lambda shard: shard.parameter.numel()):
            _update(group._replace(shards=batch), config, applied, corrections)


def update_pytorch(group: ShardGroup, config: OptimizerConfig, found_inf: Tensor | None) -> None:
    """Update a group by PyTorch's function `adamw`. `found_inf`: a scalar on the device, not 0 for a skipped step. None
    means that the step is not skipped."""
    shards = group.shards
    adamw(
        [shard.parameter for shard in shards],
        [shard.gradient for shard in shards],
        [shard.state["exp_avg"] for shard in shards],
        [shard.state["exp_avg_sq"] for shard in shards],
        [],
        [shard.state["step"] for shard in shards],
        amsgrad=False,
        beta1=config.beta1,
        beta2=config.beta2,
        eps=config.eps,
        **group.pytorch_settings(config, found_inf),
    )


class _Corrections(NamedTuple):
    """AdamW's bias corrections, as scalars on the device."""

    root: Tensor
    """Divisor of the square root of the second moment: sqrt(1 - beta2^step)."""

    mean: Tensor
    """Divisor of the first moment: 1 - beta1^step, or infinity for a skipped step."""


def _update(group: ShardGroup, config: OptimizerConfig, applied: Tensor, corrections: _Corrections) -> None:
    shards, beta1, beta2 = group.shards, config.beta1, config.beta2
    gradients = in_float32([shard.gradient for shard in shards])
    means = moments(shards, "exp_avg")
    torch._foreach_mul_(means, (1 - (1 - beta1) * applied).float())
    torch._foreach_add_(means, gradients, alpha=1 - beta1)
    squares = moments(shards, "exp_avg_sq")
    torch._foreach_mul_(squares, (1 - (1 - beta2) * applied).float())
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    del gradients
    roots = torch._foreach_sqrt(squares)
    store(shards, "exp_avg_sq", squares)
    del squares
    torch._foreach_div_(roots, corrections.root)
    torch._foreach_add_(roots, config.eps)
    torch._foreach_mul_(roots, corrections.mean)
    parameters = masters(shards)
    torch._foreach_mul_(parameters, (1 - group.lr * group.weight_decay * applied).float())
    torch._foreach_addcdiv_(parameters, means, roots, value=-group.lr)
    del roots
    store(shards, "exp_avg", means)
    del means
    store(shards, "parameter", parameters)
