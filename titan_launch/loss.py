"""Loss and accuracy, as sums: the trainer divides by the number of valid targets, which only it knows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_launch.constants import IGNORED_TARGET


def cross_entropy_sum(outputs: Tensor, targets: Tensor, chunks: int = 1) -> Tensor:
    """Sum of -log softmax(outputs)[target] over the valid targets: a scalar, computed in fp32.

    `outputs` are logits (..., classes), `targets` class indices (...). Where no target is valid the sum is 0 and so
    are the gradients, which keeps the backward passes of all ranks in step.

    `chunks`: the targets are gone through in so many parts, one after the other, and what is computed in fp32 exists
    for one part at a time; backward computes it again. The gradient stays the same, bit for bit.
    """
    logits, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    if chunks > 1:
        total: Tensor = _ChunkedCrossEntropy.apply(logits, targets, chunks)
        return total
    return _sum(logits, targets)


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED_TARGET, reduction="sum")


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`_sum` of logits (n, classes) and targets (n) in chunks: only these two are kept for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, chunks: int) -> Tensor:
        ctx.save_for_backward(logits, targets)
        ctx.chunks = chunks
        total = torch.zeros((), device=logits.device)
        for part, wanted in zip(logits.chunk(chunks), targets.chunk(chunks), strict=True):
            total += _sum(part, wanted)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, targets = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        parts = zip(*(tensor.chunk(ctx.chunks) for tensor in (gradient, logits, targets)), strict=True)
        for result, part, wanted in parts:
            result.copy_(_gradient_of_sum(part, wanted, grad))
        return gradient, None, None


def _gradient_of_sum(logits: Tensor, targets: Tensor, grad: Tensor) -> Tensor:
    """What autograd would compute for `_sum`, with the same operations, in fp32."""
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    sum_reduction, total_weight = 2, torch.zeros_like(grad)  # the weight is not used in a sum
    of_log_softmax = torch.ops.aten.nll_loss_backward(
        grad, log_softmax, targets, None, sum_reduction, IGNORED_TARGET, total_weight
    )
    gradient: Tensor = torch.ops.aten._log_softmax_backward_data(of_log_softmax, log_softmax, -1, torch.float32)
    return gradient


def count_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many targets have the largest logit: an int64 scalar on their device.

    `outputs` are logits (..., classes), `targets` class indices (...). Of equal logits the first counts as the largest.
    An ignored target is no class, and so is never correct.
    """
    return (outputs.argmax(dim=-1) == targets).sum()


def count_valid(targets: Tensor) -> Tensor:
    """How many targets are not ignored: an int64 scalar on their device."""
    return (targets != IGNORED_TARGET).sum()
