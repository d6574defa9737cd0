"""AdamW (arXiv:1711.05101) with moments, parameters and masters in dtypes of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_launch.optim.shards import Shard
from titan_launch.plan.param_groups import batches


def update_adamw(
    shards: Sequence[Shard], lr: float, weight_decay: float, betas: tuple[float, float], eps: float, kept: Tensor
) -> None:
    """One step for the shards of a group, in float32; what is stored in bfloat16 is rounded once, at the end.

    `kept`: 1, or 0 where nothing is to change, in which case the gradients must be 0. Nothing waits for the device.
    """
    for batch in batches([shard.parameter.numel() for shard in shards]):
        _update([shards[index] for index in batch], lr, weight_decay, betas, eps, kept)


def _update(
    shards: Sequence[Shard], lr: float, weight_decay: float, betas: tuple[float, float], eps: float, kept: Tensor
) -> None:
    steps = [shard.state["step"] for shard in shards]
    torch._foreach_add_(steps, [kept.float()] * len(steps))  # of one tensor, PyTorch would ask the device for it
    beta1, beta2 = betas
    gradients = [shard.gradient.float() for shard in shards]
    means = [shard.state["exp_avg"].float() for shard in shards]
    torch._foreach_mul_(means, (1 - (1 - beta1) * kept).float())
    torch._foreach_add_(means, gradients, alpha=1 - beta1)
    squares = [shard.state["exp_avg_sq"].float() for shard in shards]
    torch._foreach_mul_(squares, (1 - (1 - beta2) * kept).float())
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    del gradients
    roots = torch._foreach_sqrt(squares)
    _write(shards, "exp_avg_sq", squares)
    del squares
    torch._foreach_div_(roots, [_bias_correction(beta2, step).sqrt() for step in steps])
    torch._foreach_add_(roots, eps)
    torch._foreach_mul_(roots, [_bias_correction(beta1, step) / kept for step in steps])  # by infinity: no update
    parameters = [shard.master for shard in shards]
    torch._foreach_mul_(parameters, (1 - lr * weight_decay * kept).float())
    torch._foreach_addcdiv_(parameters, means, roots, value=-lr)
    del roots
    _write(shards, "exp_avg", means)
    del means
    _write(shards, "parameter", parameters)


def _write(shards: Sequence[Shard], name: str, values: Sequence[Tensor]) -> None:
    for shard, value in zip(shards, values, strict=True):
        shard.write(**{name: value})


def _bias_correction(beta: float, step: Tensor) -> Tensor:
    """Before the first update, which may be left out, as after it."""
    return 1 - beta ** step.double().clamp(min=1)
