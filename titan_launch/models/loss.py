"""Loss and accuracy as sums over targets. The training step divides each sum by the global number of valid targets.

With tensor parallelism, logits may be sharded over ranks by class: a DTensor sharded along its last dimension. Then the
ranks compute one loss together, and no rank holds all logits of a target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

from titan_launch.config.sections.data import IGNORED_TARGET

Loss = Callable[[Any, Tensor], Tensor]
"""A function of a model's outputs, usually logits, and of targets. It returns the sum of the loss over the valid
targets, a scalar."""


def loss_in_chunks(chunks: int) -> Loss:
    """Return the function `cross_entropy_sum` with its argument `chunks` set to this number."""
    return cross_entropy_sum if chunks == 1 else partial(cross_entropy_sum, chunks=chunks)


def cross_entropy_sum(outputs: Tensor, targets: Tensor, chunks: int = 1) -> Tensor:
    """Return the sum of -log softmax(outputs)[target] over the valid targets: a scalar, computed in fp32.

    `outputs` are logits (..., classes), `targets` class indices (...). If no target is valid, the sum and the gradients
    are 0, and all ranks still run the same backward.

    `chunks`: number of parts into which the targets are split. Only one part at a time has fp32 tensors. If `chunks` is
    greater than 1, backward computes these tensors a second time. The gradient is bitwise the same for every `chunks`.

    If logits are sharded by class over T ranks, each rank computes with 1/T of the logits. The call is then collective:
    forward all-reduces three numbers per target. Backward always computes the fp32 tensors a second time.
    """
    if isinstance(outputs, DTensor):
        logits, classes = _own_classes(outputs)
        divided: Tensor = _DividedCrossEntropy.apply(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), chunks, classes
        )
        return divided
    logits, targets = outputs.reshape(-1, outputs.shape[-1]), targets.reshape(-1)
    if chunks > 1:
        total: Tensor = _ChunkedCrossEntropy.apply(logits, targets, chunks)
        return total
    return _sum(logits, targets)


def _sum(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets, ignore_index=IGNORED_TARGET, reduction="sum")


class _ChunkedCrossEntropy(torch.autograd.Function):
    """`_sum` of logits (n, classes) and targets (n), computed in chunks. For backward it saves only its inputs."""

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
    """Return the gradient of `_sum` by the same operations that autograd uses, in fp32."""
    log_softmax = torch.log_softmax(logits.float(), dim=-1)
    sum_reduction, total_weight = 2, torch.zeros_like(grad)  # the weight is not used in a sum
    of_log_softmax = torch.ops.aten.nll_loss_backward(
        grad, log_softmax, targets, None, sum_reduction, IGNORED_TARGET, total_weight
    )
    gradient: Tensor = torch.ops.aten._log_softmax_backward_data(of_log_softmax, log_softmax, -1, torch.float32)
    return gradient


@dataclass(frozen=True)
class _Classes:
    """The range of classes whose logits this rank holds."""

    start: int
    count: int
    group: dist.ProcessGroup
    """The ranks that together hold all classes."""

    def reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduce `values` over the ranks in place, and return them."""
        dist.all_reduce(values, op=op, group=self.group)
        return values

    def at(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return two [n, 1] tensors for `targets` [n]: the index of each target in this rank's logits, and whether this
        rank holds the class of the target.

        The index is 0 if this rank does not hold the class.
        """
        index = (targets - self.start).unsqueeze(-1)
        is_here = (index >= 0) & (index < self.count)
        return index.where(is_here, 0), is_here


def _own_classes(outputs: DTensor) -> tuple[Tensor, _Classes]:
    """Return this rank's part of sharded logits, differentiable, and the range of classes of this part."""
    assert outputs.placements == (Shard(outputs.ndim - 1),), outputs.placements
    mesh, logits = outputs.device_mesh, outputs.to_local()
    count = logits.shape[-1]  # the same on all ranks: check_tensor_plan requires this
    return logits, _Classes(mesh.get_local_rank() * count, count, mesh.get_group())


class _DividedCrossEntropy(torch.autograd.Function):
    """`_sum` of sharded logits (n, classes / ranks) and targets (n), computed in chunks.

    For backward it saves logits, targets, and two numbers per target: the largest logit of all ranks, and the logarithm
    of the sum of exp(logit - largest). Backward computes the softmax from them. Saving only their sum, the log-sum-exp,
    would lose digits of large logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, chunks: int, classes: _Classes) -> Tensor:
        scales = torch.empty(len(targets), 2, dtype=torch.float32, device=logits.device)
        ctx.save_for_backward(logits, targets, scales)
        ctx.chunks, ctx.classes = chunks, classes
        total = torch.zeros((), device=logits.device)
        for part, wanted, scale in zip(*(t.chunk(chunks) for t in (logits, targets, scales)), strict=True):
            largest = classes.reduced(part.amax(-1, keepdim=True).float(), dist.ReduceOp.MAX)
            distances = (part - largest).float()  # one fp32 tensor: bf16 minus fp32 is fp32
            index, is_here = classes.at(wanted)
            own = distances.gather(-1, index).where(is_here, 0)
            sums = classes.reduced(torch.cat([distances.exp_().sum(-1, keepdim=True), own], -1), dist.ReduceOp.SUM)
            log_sum, wanted_distance = sums[:, :1].log(), sums[:, 1:]
            torch.cat([largest, log_sum], -1, out=scale)
            total += (log_sum - wanted_distance).squeeze(-1).where(wanted != IGNORED_TARGET, 0).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, scales = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        parts = zip(*(tensor.chunk(ctx.chunks) for tensor in (gradient, logits, targets, scales)), strict=True)
        for result, part, wanted, scale in parts:
            softmax = (part - scale[:, :1]).float().sub_(scale[:, 1:]).exp_()
            index, is_here = ctx.classes.at(wanted)
            softmax.scatter_add_(-1, index, -is_here.to(softmax.dtype))
            result.copy_(softmax.mul_(grad).where((wanted != IGNORED_TARGET).unsqueeze(-1), 0))
        return gradient, None, None, None


def count_correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the number of correct predictions, an int64 scalar on the device of `targets`.

    A prediction is correct if the target's class has the largest logit; of equal logits, the first counts as the
    largest. `outputs` are logits (..., classes), `targets` class indices (...). An ignored target is never correct.
    Collective if logits are sharded by class.
    """
    if isinstance(outputs, DTensor):
        logits, classes = _own_classes(outputs)
        largest, index = logits.max(dim=-1)
        everywhere = classes.reduced(largest.clone(), dist.ReduceOp.MAX)
        first = torch.where(largest == everywhere, index + classes.start, outputs.shape[-1])
        return (classes.reduced(first, dist.ReduceOp.MIN) == targets).sum()
    return (outputs.argmax(dim=-1) == targets).sum()


def count_valid(targets: Tensor) -> Tensor:
    """Return the number of targets that are not ignored, an int64 scalar on the device of `targets`."""
    return (targets != IGNORED_TARGET).sum()
