"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.accumulation.strategies import AccumulationStrategy
from titan_launch.errors import config_error
from titan_launch.loss import count_valid, cross_entropy_sum
from titan_launch.optim.clip import clip_grad_norm
from titan_launch.optim.skip import step_unless
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.train.guard import NonFiniteGuard

Microbatch = tuple[Tensor, Tensor]
"""Inputs and targets of one rank; the first axis is the sample."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, on the device: scalars that nothing has waited for yet."""

    loss_sum: Tensor
    """This rank's part of the step's loss; the sum over ranks is the mean over all valid targets."""

    valid_local: Tensor
    """Valid (not ignored) targets of this rank."""

    valid_global: Tensor
    """Valid targets of all ranks: the one denominator of the step's loss."""

    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""


class TrainStep:
    """Forward and backward over a step's microbatches, clipping, and the optimizer's update."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        accumulation: AccumulationStrategy,
        guard: NonFiniteGuard,
        max_norm: float,
        device: torch.device,
    ):
        self._model = model
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._guard = guard
        self._max_norm = max_norm
        self._device = device
        self._statistics = RunningStatistics(model)

    def __call__(self, microbatches: list[Microbatch], before_update: Callable[[], None] | None = None) -> StepResult:
        """Train on one step's microbatches; nothing waits for the device.

        Exact for unequal microbatches and ranks, in every accumulation mode: the step's valid targets are counted over
        all ranks before the first forward, every microbatch's loss is a sum divided by that count, and FSDP2 only sums
        gradients. `before_update` is called when the gradients are complete and nothing is changed yet.
        """
        valid_local, valid_global = self._count(targets for _, targets in microbatches)
        self._statistics.save()
        loss_sum = torch.zeros((), device=self._device)
        for index, microbatch in enumerate(microbatches):
            self._accumulation.begin_microbatch(self._model, is_last=index == len(microbatches) - 1)
            loss_sum += self._backward(microbatch, valid_global)
        if before_update is not None:
            before_update()
        grad_norm = clip_grad_norm(self._model.parameters(), self._max_norm)
        left_out = self._guard.check(loss_sum, grad_norm)
        step_unless(self._optimizer, left_out)
        self._statistics.restore_if(left_out)
        self._optimizer.zero_grad()
        return StepResult(loss_sum, valid_local, valid_global, grad_norm)

    def _count(self, targets: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
        local = sum((count_valid(t) for t in targets), start=torch.zeros((), dtype=torch.int64))
        local = local.to(self._device, non_blocking=True)
        total = local.clone()
        dist.all_reduce(total)
        return local, total

    def _backward(self, microbatch: Microbatch, valid_global: Tensor) -> Tensor:
        inputs, targets = (tensor.to(self._device, non_blocking=True) for tensor in microbatch)
        loss = cross_entropy_sum(logits_of(self._model, inputs), targets) / valid_global.clamp(min=1)
        loss.backward()
        return loss.detach()


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """A model's outputs, which must be the logits. Raises ConfigError that says so where they are anything else."""
    outputs = model(inputs)
    if not isinstance(outputs, Tensor):
        reason = f"its forward must return the logits, a tensor (..., classes); it returns a {type(outputs).__name__}"
        raise config_error(("model", "name"), reason)
    return outputs
