"""Loss and accuracy, as sums: the trainer divides by the number of valid targets, which only it knows."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from titan_launch.constants import IGNORED_TARGET


def cross_entropy_sum(outputs: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log softmax(outputs)[target] over the valid targets: a scalar, computed in fp32.

    `outputs` are logits (..., classes), `targets` class indices (...). Where no target is valid the sum is 0 and so
    are the gradients, which keeps the backward passes of all ranks in step.
    """
    logits = outputs.reshape(-1, outputs.shape[-1]).float()
    return F.cross_entropy(logits, targets.reshape(-1), ignore_index=IGNORED_TARGET, reduction="sum")


def count_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many targets have the largest logit: an int64 scalar on their device.

    `outputs` are logits (..., classes), `targets` class indices (...). Of equal logits the first counts as the largest.
    An ignored target is no class, and so is never correct.
    """
    return (outputs.argmax(dim=-1) == targets).sum()


def count_valid(targets: Tensor) -> Tensor:
    """How many targets are not ignored: an int64 scalar on their device."""
    return (targets != IGNORED_TARGET).sum()
