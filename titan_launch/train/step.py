"""One optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.distributed.mesh import Mesh
from titan_launch.models.loss import Loss, count_valid, cross_entropy_sum
from titan_launch.optim.clip import clip_grad_norm
from titan_launch.optim.registry import step_unless
from titan_launch.parallel.accumulation import AccumulationStrategy
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.parallel.fsdp import discard_pending
from titan_launch.train.forward import logits_of
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.pipeline_step import PipelinedStep

Microbatch = tuple[Tensor, Tensor]
"""Inputs and targets of one rank; the first axis is the sample."""


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, on the device: scalars that nothing has waited for yet."""

    loss_sum: Tensor
    """This rank's part of the step's loss; the sum over all ranks is the mean over all valid targets. Ranks that
    compute the same loss together (tensor parallelism) have equal parts of it."""

    valid_local: Tensor
    """Valid (not ignored) targets that `loss_sum` is of: this rank's, divided among those that share the loss."""

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
        guard: StepGuard,
        max_norm: float,
        mesh: Mesh,
        device: torch.device,
        loss: Loss = cross_entropy_sum,
        pipelined: PipelinedStep | None = None,
        after_update: Callable[[], None] | None = None,
    ):
        """`pipelined`: goes through the microbatches where the model is divided into pipeline stages. `after_update`:
        what depends on the parameters beyond a step; see `parameters_changed`."""
        self._model = model
        self._optimizer = optimizer
        self._accumulation = accumulation
        self._guard = guard
        self._max_norm = max_norm
        self._mesh = mesh
        self._device = device
        self.loss = loss
        """The sum of the loss over the valid targets of a microbatch."""

        self._pipelined = pipelined
        self._after_update = after_update
        self.statistics = RunningStatistics(model)
        """BatchNorm's running statistics, and the copy of them that a step can restore."""

        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]

    def __call__(self, microbatches: list[Microbatch], before_update: Callable[[], None] | None = None) -> StepResult:
        """Train on one step's microbatches; nothing waits for the device.

        Exact for unequal microbatches and ranks, in every accumulation mode: the step's valid targets are counted over
        all ranks before the first loss, every microbatch's loss is a sum divided by that count, and FSDP2 only sums
        gradients. `before_update` is called when the gradients are complete and nothing is changed yet.

        What ends the step before the update (an error, an interrupt) leaves nothing of it behind: gradients and running
        statistics are as before, and if all ranks have abandoned it, it can be tried again.
        """
        self.statistics.save()
        with self._abandoned_on_error():
            valid = self._count(targets for _, targets in microbatches)
            loss_sum = self._accumulate(microbatches, valid) / self._mesh.layout.tensor
            if before_update is not None:
                before_update()
            grad_norm = clip_grad_norm(self._parameters, self._max_norm, self._mesh.pipeline_group)
            grad_norm = grad_norm.to(self._device, non_blocking=True)  # from the host, where gradients are offloaded
            left_out = self._guard.check(loss_sum, grad_norm)
        try:
            step_unless(self._optimizer, left_out)
            self.statistics.restore_if(left_out)
            self.parameters_changed()
        finally:  # after an interrupt the next step must not add to these gradients
            self._optimizer.zero_grad()
        valid_local = valid.local
        if self._pipelined is not None and not self._pipelined.computes_loss:
            valid_local = torch.zeros_like(valid_local)
        return StepResult(loss_sum, valid_local / self._mesh.layout.tensor, valid.total(), grad_norm)

    def parameters_changed(self) -> None:
        """Bring up to date what depends on the parameters: done after each update, and to be called when something else
        than a step has changed them. Nothing waits for the device."""
        if self._after_update is not None:
            self._after_update()

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            discard_pending(self._model)
            self.statistics.restore()
            raise

    def _count(self, targets: Iterable[Tensor]) -> _Valid:
        local = sum((count_valid(t) for t in targets), start=torch.zeros((), dtype=torch.int64))
        return _Valid(local.to(self._device, non_blocking=True), self._mesh.data_group)

    def _accumulate(self, microbatches: list[Microbatch], valid: _Valid) -> Tensor:
        """The gradients of all microbatches, complete after the last one. Returns this rank's part of the loss."""
        if self._pipelined is not None:
            loss = partial(loss_of, valid_global=valid.total(), loss_sum=self.loss)
            return self._pipelined(microbatches, loss)
        loss_sum = torch.zeros((), device=self._device)
        for index, microbatch in enumerate(microbatches):
            self._accumulation.begin_microbatch(self._model, is_last=index == len(microbatches) - 1)
            loss_sum += self._backward(microbatch, valid)
        return loss_sum

    def _backward(self, microbatch: Microbatch, valid: _Valid) -> Tensor:
        inputs, targets = (tensor.to(self._device, non_blocking=True) for tensor in microbatch)
        return backward(self._model, inputs, targets, valid.total, self.loss)


class _Valid:
    """A step's valid targets: of this rank, and of all ranks, which are added up while the first forward runs."""

    def __init__(self, local: Tensor, group: dist.ProcessGroup | None):
        self.local = local
        self._total = local.clone()
        self._sum = dist.all_reduce(self._total, group=group, async_op=True)

    def total(self) -> Tensor:
        """Of all ranks; a scalar on the device, for which the host does not wait on CUDA."""
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
        return self._total


def backward(
    model: nn.Module, inputs: Tensor, targets: Tensor, valid_global: Callable[[], Tensor], loss_sum: Loss
) -> Tensor:
    """Forward and backward over one microbatch. Returns its part of the step's loss, detached.

    `valid_global`: the step's valid targets over all ranks, which divide the sum that `loss_sum` gives; asked for when
    the forward is done.
    """
    loss = loss_of(logits_of(model, inputs), targets, valid_global(), loss_sum)
    loss.backward()
    return loss.detach()


def loss_of(logits: Tensor, targets: Tensor, valid_global: Tensor, loss_sum: Loss) -> Tensor:
    """A microbatch's part of the step's loss: its sum, divided by the step's valid targets over all ranks."""
    return loss_sum(logits, targets) / valid_global.clamp(min=1)
