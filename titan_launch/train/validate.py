"""Loss and accuracy on validation data."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.distributed.torch_private import roots
from titan_launch.models.loss import Loss, count_correct, count_valid, cross_entropy_sum
from titan_launch.parallel.fsdp import reset_iterations
from titan_launch.parallel.pipeline import pipeline_of, run_forward
from titan_launch.train.forward import forward_explained, logits_of
from titan_launch.train.step import Microbatch


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[Microbatch], device: torch.device, loss_sum: Loss = cross_entropy_sum
) -> dict[str, float]:
    """Return the `validation/*` metrics over all valid targets of all ranks, in evaluation mode. Collective.

    Every rank must have the same number of batches, since each forward all-gathers parameters. Without valid targets
    the metrics are NaN. In a pipeline only the ranks with the last stage contribute.
    """
    totals = torch.zeros(3, dtype=torch.float64, device=device)
    was_training = {  # a frozen BatchNorm stays frozen
        module: module.training for root in roots(model) for module in root.modules()
    }
    for root in roots(model):
        root.eval()
    pipeline = pipeline_of(model)
    logits: Tensor | None
    for batch in batches:
        inputs, targets = (tensor.to(device, non_blocking=True) for tensor in batch)
        if pipeline is None:
            with forward_explained(model, inputs):
                logits = logits_of(model(inputs), inputs)
        elif (logits := run_forward(pipeline, inputs, device)) is None:
            continue  # another rank holds the last stage
        totals[0] += loss_sum(logits, targets)
        totals[1] += count_correct(logits, targets)
        totals[2] += count_valid(targets)
    for module, flag in was_training.items():
        module.training = flag
    reset_iterations(model)  # puts the sharded parameters back into the model; the optimizer's state refers to them
    dist.all_reduce(totals)
    loss, correct, count = totals.tolist()
    loss, accuracy = (loss / count, correct / count) if count else (math.nan, math.nan)
    return {"validation/loss": loss, "validation/accuracy": accuracy}
