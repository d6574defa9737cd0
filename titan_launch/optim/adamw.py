"""AdamW (arXiv:1711.05101) with moments, parameters and masters in dtypes of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_launch.optim.shards import LocalShard, count_step, in_float32, masters, store
from titan_launch.plan.param_groups import batches


def update_adamw(
    shards: Sequence[LocalShard], lr: float, weight_decay: float, betas: tuple[float, float], eps: float, kept: Tensor
) -> None:
    """One step for shards with equal step counts, in float32; what is stored in bfloat16 is rounded once, at the end.

    `kept`: 1, or 0 where nothing is to change, in which case the gradients must be 0. Nothing waits for the device.
    """
    count_step(shards, kept)
    step = shards[0].state["step"].double().clamp(min=1)  # 0 before the first update, which may be skipped
    # Scalars in the dtype of the lists, without which PyTorch updates a list tensor by tensor.
    corrections = _Corrections(
        (1 - betas[1] ** step).sqrt().float(),
        ((1 - betas[0] ** step) / kept).float(),  # infinity where the step is skipped: no update
    )
    for batch in batches([shard.parameter.numel() for shard in shards]):
        _update([shards[index] for index in batch], lr, weight_decay, betas, eps, kept, corrections)


class _Corrections(NamedTuple):
    """Bias corrections of the moments: scalars on the device."""

    root: Tensor
    """Of the square root of the second moment."""

    mean: Tensor
    """Of the first moment."""


def _update(
    shards: Sequence[LocalShard],
    lr: float,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    kept: Tensor,
    corrections: _Corrections,
) -> None:
    beta1, beta2 = betas
    gradients = in_float32([shard.gradient for shard in shards])
    means = in_float32([shard.state["exp_avg"] for shard in shards])
    torch._foreach_mul_(means, (1 - (1 - beta1) * kept).float())
    torch._foreach_add_(means, gradients, alpha=1 - beta1)
    squares = in_float32([shard.state["exp_avg_sq"] for shard in shards])
    torch._foreach_mul_(squares, (1 - (1 - beta2) * kept).float())
    torch._foreach_addcmul_(squares, gradients, gradients, value=1 - beta2)
    del gradients
    roots = torch._foreach_sqrt(squares)
    store(shards, "exp_avg_sq", squares)
    del squares
    torch._foreach_div_(roots, corrections.root)
    torch._foreach_add_(roots, eps)
    torch._foreach_mul_(roots, corrections.mean)
    parameters = masters(shards)
    torch._foreach_mul_(parameters, (1 - lr * weight_decay * kept).float())
    torch._foreach_addcdiv_(parameters, means, roots, value=-lr)
    del roots
    store(shards, "exp_avg", means)
    del means
    store(shards, "parameter", parameters)
