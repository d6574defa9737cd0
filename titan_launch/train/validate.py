"""The loss on held-out data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from titan_launch.loss import count_valid, cross_entropy_sum
from titan_launch.train.step import Microbatch, logits_of


@torch.no_grad()
def validate(model: nn.Module, batches: Iterable[Microbatch], device: torch.device) -> float:
    """The mean loss over all valid targets of all ranks' batches, in evaluation mode; collective.

    Every rank must have the same number of batches, since each forward gathers parameters. NaN without a valid target.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=device)
    model.eval()
    for batch in batches:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
        totals[0] += cross_entropy_sum(logits_of(model, inputs), targets)
        totals[1] += count_valid(targets)
    model.train()
    dist.all_reduce(totals)
    loss_sum, count = totals.tolist()
    return loss_sum / count if count else math.nan
