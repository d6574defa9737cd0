"""Cross-entropy in chunks of classes, computed from the input of an output layer, or from logits. In the first case,
the logits of all classes never exist at the same time.

Forward goes through the chunks and updates a running log-sum-exp for each target. Backward computes the logits of each
chunk a second time. The softmax follows from these logits and the log-sum-exp.

The chunks divide classes, not tokens, for three reasons. First, a chunk's part of the weight gradient is one matrix
product, which is written once, in the dtype of the weight. So nothing is accumulated in bf16, and this gradient,
usually the largest of the model, needs no fp32 copy. Second, only the gradient of the input is a sum over chunks. This
gradient is small, so the sum is in fp32. Third, tensor parallelism also divides classes, over ranks. So the number of
all-reduces does not depend on the number of chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import LossConfig

Adjust = Callable[[Tensor], Tensor]
"""An elementwise function of logits, such as a soft cap."""


@dataclass(frozen=True)
class Classes:
    """The range of classes that this rank holds: `count` of `total` classes, from class `start` on."""

    count: int
    total: int
    start: int = 0
    group: dist.ProcessGroup | None = None
    """The ranks that together hold all classes; None if this rank holds all classes."""

    @staticmethod
    def of(tensor: Tensor, dim: int) -> Classes:
        """Return this rank's range of the classes along `dim` of a tensor. A DTensor is sharded along `dim` into equal
        shards: `check_divisions` requires this."""
        total = tensor.shape[dim]
        if not isinstance(tensor, DTensor):
            return Classes(total, total)
        mesh = tensor.device_mesh
        count = total // mesh.size()
        return Classes(count, total, mesh.get_local_rank() * count, mesh.get_group())

    def chunks(self, number: int) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of each chunk, counted from this rank's first class. `end` is not part of the chunk.

        There are at most `number` chunks. The size of each chunk, except for the last, is a multiple of 8, because GPUs
        have fast matrix products for such sizes.
        """
        size = -(-self.count // (8 * number)) * 8
        for first in range(0, self.count, size):
            yield first, min(first + size, self.count)

    def reduced(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        """All-reduce `values` over the ranks of `group` in place, and return them. Without a group, return them
        unchanged."""
        if self.group is not None:
            dist.all_reduce(values, op=op, group=self.group)
        return values


@dataclass(frozen=True)
class _Running:
    """For each of n targets, statistics of its logits in the chunks so far. Each statistic is fp32 (n, 1)."""

    largest: Tensor
    """The largest logit so far, or of all classes if all logits are given."""

    sum_exp: Tensor
    """The sum of exp(logit - largest)."""

    wanted: Tensor
    """The logit of the target's class. 0 before the chunk with this class, on ranks that do not hold the class, and for
    ignored targets."""

    logit_sum: Tensor | None
    """The sum of the logits, for label smoothing; None without label smoothing."""

    @staticmethod
    def start(num_targets: int, device: torch.device, smooths: bool) -> _Running:
        """Return the statistics before the first chunk. `smooths`: True with label smoothing."""
        zeros = torch.zeros(num_targets, 1, device=device)
        lowest = torch.full_like(zeros, torch.finfo(zeros.dtype).min)
        return _Running(lowest, zeros, zeros, zeros if smooths else None)

    def of_all_ranks(self, classes: Classes, has_largest: bool) -> _Running:
        """Return the statistics over the classes of all ranks. Collective over `classes.group`. `has_largest`: True if
        `largest` is the maximum over all ranks already."""
        if classes.group is None:
            return self
        largest = self.largest if has_largest else classes.reduced(self.largest.clone(), dist.ReduceOp.MAX)
        summands = [self.sum_exp * (self.largest - largest).exp(), self.wanted]
        if self.logit_sum is not None:
            summands.append(self.logit_sum)
        sums = classes.reduced(torch.cat(summands, -1), dist.ReduceOp.SUM).split(1, dim=-1)
        return _Running(largest, sums[0], sums[1], None if self.logit_sum is None else sums[2])


def _add_classes(
    logits: Tensor, index: Tensor, largest: Tensor, sum_exp: Tensor, wanted: Tensor, logit_sum: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the fields of `_Running` after a chunk of logits (n, classes). `index` (n, 1): the target's class minus
    the chunk's first class. The target's class may be outside of the chunk."""
    before, largest = largest, torch.maximum(largest, logits.amax(-1, keepdim=True)).float()
    exponentials = logits.to(torch.float32, copy=True).sub_(largest).exp_()
    sum_exp = sum_exp * (before - largest).exp() + exponentials.sum(-1, keepdim=True)
    is_here = (index >= 0) & (index < logits.shape[-1])
    wanted = torch.where(is_here, logits.gather(-1, index.where(is_here, 0)).float(), wanted)
    if logit_sum is not None:
        logit_sum = logit_sum + logits.sum(-1, keepdim=True, dtype=torch.float32)
    return largest, sum_exp, wanted, logit_sum


def _gradient(  # noqa: PLR0913 - a compiled function takes tensors and numbers
    logits: Tensor,
    index: Tensor,
    largest: Tensor,
    log_sum: Tensor,
    scale: Tensor,
    z_factor: Tensor | None,
    smoothing: float,
    num_classes: int,
) -> Tensor:
    """Return the gradient of the loss with respect to a chunk of logits, in the dtype of the logits: `scale` x
    (`z_factor` x softmax - t - smoothing / num_classes). t is 1 - smoothing at the target's class, and 0 elsewhere.
    `z_factor`: None for 1.

    The softmax is exp((logit - `largest`) - `log_sum`), where `log_sum` is the logarithm of `_Running.sum_exp` over all
    classes. (The sum `largest` + `log_sum` alone would lose digits of large logits.)
    """
    gradient = logits.to(torch.float32, copy=True).sub_(largest).sub_(log_sum).exp_()
    if z_factor is not None:
        gradient.mul_(z_factor)
    is_here = (index >= 0) & (index < logits.shape[-1])
    gradient.scatter_add_(-1, index.where(is_here, 0), is_here.float().mul_(smoothing - 1))
    if smoothing:
        gradient.sub_(smoothing / num_classes)
    return gradient.mul_(scale).to(logits.dtype)


@dataclass(frozen=True)
class Kernels:
    """The two functions that process one chunk of logits. Neither calls a collective, so each can be compiled."""

    add_classes: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor | None]]
    gradient: Callable[..., Tensor]

    @staticmethod
    def compiled(compile_function: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Kernels:
        """Return the functions, each compiled by `compile_function`."""
        return Kernels(compile_function(_add_classes), compile_function(_gradient))


@dataclass(frozen=True)
class Method:
    """The settings and functions with which a loss is computed in chunks."""

    config: LossConfig
    classes: Classes
    adjust: Adjust | None
    kernels: Kernels
    counts_correct: bool
    """True: the second sum of `ChunkedLoss` counts correct predictions. False: it is the weighted z-loss."""

    @property
    def chunks(self) -> Iterator[tuple[int, int]]:
        """The chunks of this rank's classes."""
        return self.classes.chunks(self.config.chunks)

    def index(self, targets: Tensor, first: int) -> Tensor:
        """Return the targets (n) as indices into a chunk of logits: int64 (n, 1). `first`: position of the chunk in
        this rank's classes. If a target is outside the chunk, its index is negative or too large."""
        return (targets - (self.classes.start + first)).unsqueeze(-1)

    def gradient(self, logits: Tensor, *numbers: Tensor | None) -> Tensor:
        """Return the gradient of the loss with respect to a chunk of `logits` before `adjust`. `numbers`: the arguments
        of `_gradient` from `index` to `z_factor`."""
        constants = (self.config.label_smoothing, self.classes.total)
        if self.adjust is None:
            return self.kernels.gradient(logits, *numbers, *constants)
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            adjusted = self.adjust(leaf)
        of_adjusted = self.kernels.gradient(adjusted.detach(), *numbers, *constants)
        (gradient,) = torch.autograd.grad(adjusted, leaf, of_adjusted)
        return gradient


def _logits(x: Tensor, weight: Tensor | None, bias: Tensor | None, first: int, end: int) -> Tensor:
    """Return the logits of the classes from `first` to `end` - 1, before `adjust`. Without a weight, `x` is the
    logits."""
    if weight is None:
        return x[:, first:end]
    return F.linear(x, weight[first:end], None if bias is None else bias[first:end])


class ChunkedLoss(torch.autograd.Function):
    """The autograd function that returns the two sums of `CrossEntropy.sums`. `x` is the input (n, features) of an
    output layer or, without a weight, the logits (n, classes).

    Backward runs through the first sum only. For backward, the function saves its inputs and two fp32 numbers for each
    target.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, targets: Tensor, method: Method
    ) -> Tensor:
        smoothing, classes = method.config.label_smoothing, method.classes
        running = _Running.start(len(x), x.device, smoothing > 0)
        if weight is None:  # `x` is the logits, so the largest is known in advance
            largest = classes.reduced(x.amax(-1, keepdim=True).float(), dist.ReduceOp.MAX)
            running = replace(running, largest=largest)
        best = _Best.start(running) if method.counts_correct else None
        for first, end in method.chunks:
            logits = _logits(x, weight, bias, first, end)
            logits = logits if method.adjust is None else method.adjust(logits)
            index = method.index(targets, first)
            numbers = (running.largest, running.sum_exp, running.wanted, running.logit_sum)
            running = _Running(*method.kernels.add_classes(logits, index, *numbers))
            best = None if best is None else best.with_chunk(logits, classes.start + first)
            del logits
        running = running.of_all_ranks(classes, has_largest=weight is None)
        largest, log_sum = running.largest, running.sum_exp.log()
        ctx.save_for_backward(x, weight, bias, targets, largest, log_sum)
        ctx.method = method
        cross_entropy = log_sum + (largest - running.wanted)
        if running.logit_sum is not None:
            uniform = log_sum + (largest - running.logit_sum / classes.total)
            cross_entropy = (1 - smoothing) * cross_entropy + smoothing * uniform
        is_valid = (targets != IGNORED_TARGET).unsqueeze(-1)
        loss = cross_entropy.where(is_valid, 0).sum()
        if best is not None:
            return torch.stack([loss, (best.of_all_ranks(classes) == targets.unsqueeze(-1)).sum()])
        z_loss = method.config.z_loss * (largest + log_sum).square().where(is_valid, 0).sum()
        return torch.stack([loss + z_loss, z_loss])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight, bias, targets, largest, log_sum = ctx.saved_tensors
        method: Method = ctx.method
        z_loss = method.config.z_loss
        scale = grad[0] * (targets != IGNORED_TARGET).unsqueeze(-1)
        z_factor = 1 + 2 * z_loss * (largest + log_sum) if z_loss else None
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        sum_dtype = x.dtype if weight is None else torch.promote_types(x.dtype, torch.float32)
        for_x = torch.zeros_like(x, dtype=sum_dtype) if needs_x else None
        for_weight = torch.empty_like(weight) if needs_weight else None
        for_bias = torch.empty_like(bias) if needs_bias else None
        for first, end in method.chunks:
            index = method.index(targets, first)
            logits = _logits(x, weight, bias, first, end)
            gradient = method.gradient(logits, index, largest, log_sum, scale, z_factor)
            del logits
            if for_x is not None and weight is None:
                for_x[:, first:end] = gradient
            elif for_x is not None:
                for_x += gradient @ weight[first:end]
            if for_weight is not None:
                torch.mm(gradient.t(), x, out=for_weight[first:end])
            if for_bias is not None:
                torch.sum(gradient, 0, out=for_bias[first:end])
            del gradient
        return None if for_x is None else for_x.to(x.dtype), for_weight, for_bias, None, None


@dataclass(frozen=True)
class _Best:
    """For each of n targets, the largest logit so far and the first class with this logit: (n, 1)."""

    logit: Tensor
    label: Tensor

    @staticmethod
    def start(running: _Running) -> _Best:
        """Return the state before the first chunk."""
        logit = torch.full_like(running.largest, -torch.inf)
        return _Best(logit, torch.zeros_like(logit, dtype=torch.int64))

    def with_chunk(self, logits: Tensor, first: int) -> _Best:
        """Return the state after a chunk of logits. `first`: class of the chunk's first logit, counted over all
        ranks."""
        logit, label = logits.max(-1, keepdim=True)
        is_larger = logit > self.logit
        return _Best(logit.float().where(is_larger, self.logit), (label + first).where(is_larger, self.label))

    def of_all_ranks(self, classes: Classes) -> Tensor:
        """Return the first class with the largest logit over the classes of all ranks: int64 (n, 1). Collective over
        `classes.group`."""
        if classes.group is None:
            return self.label
        largest = classes.reduced(self.logit.clone(), dist.ReduceOp.MAX)
        return classes.reduced(self.label.where(self.logit == largest, classes.total), dist.ReduceOp.MIN)
