"""One optimizer step, and validation. A loss is a sum over items: for most losses, over the valid targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from titan_launch.config.job import JobConfig
from titan_launch.core.observer import Observer, StepResult
from titan_launch.data.loader import copied_ahead
from titan_launch.data.sources import Batch
from titan_launch.distributed.mesh import Mesh
from titan_launch.loss.build import build_loss
from titan_launch.loss.interface import Z_LOSS, Loss, means_of_step
from titan_launch.metrics.tags import OTHER
from titan_launch.metrics.timeline import UNCOUNTED, StepClock
from titan_launch.models.documents import document_arguments
from titan_launch.optim.clip import clip_grad_norm
from titan_launch.optim.registry import replicas_of, step_unless
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.parallel.expert_balance import ExpertBalance
from titan_launch.parallel.float8 import scale_update
from titan_launch.parallel.fsdp import Accumulation, discard_pending, in_evaluation_mode
from titan_launch.parallel.pipeline import pipeline_of, run_forward
from titan_launch.train.forward import run_model
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.model import AssembledModel

if TYPE_CHECKING:
    from titan_launch.train.pipeline_step import PipelinedStep


@dataclass(frozen=True)
class Update:
    """The objects and settings with which a step changes the parameters."""

    optimizer: Optimizer
    guard: StepGuard
    """Object that decides whether to skip the update."""

    max_norm: float
    """Largest norm of the gradient after clipping. 0 disables clipping."""

    after: Callable[[], None] | None = None
    """A function to call after every change of parameters (see `TrainStep.parameters_changed`)."""


class MicrobatchesInTurn:
    """The forward and backward of a step's microbatches, one after another, for a model without pipeline stages. Models
    with pipeline stages use `pipeline_step.PipelinedStep` instead."""

    computes_loss = True

    def __init__(
        self, model: nn.Module, accumulation: Accumulation, device: torch.device, timeline: StepClock = UNCOUNTED
    ):
        """`timeline` measures the time of forward and backward."""
        self.timeline = timeline
        self._model = model
        self._accumulation = accumulation
        self._device = device

    def __call__(self, microbatches: list[Batch], loss: Loss, num_items: Callable[[], Tensor]) -> Tensor:
        """Compute the gradients of all microbatches. Return the total of their `Loss.sums`, divided by `num_items()`.
        `num_items` returns the step's number of items over all ranks, and is called after each forward."""
        sums = torch.zeros(loss.num_sums, device=self._device)
        if loss.prepares_steps:
            self.timeline.group("before the microbatches")
            self.timeline.begin("forward")
            loss.prepare_step(microbatches, self._device)
            self.timeline.begin(OTHER)
        for index, microbatch in enumerate(copied_ahead(microbatches, self._device)):
            self._accumulation.begin_microbatch(self._model, is_last=index == len(microbatches) - 1)
            self.timeline.group(f"microbatch {index}")
            sums += forward_backward(self._model, microbatch, self._device, num_items, loss, self.timeline)
        return sums

    def receive_buffers(self) -> Iterable[Tensor]:
        """Return no tensors: only the stages of a pipeline have receive buffers."""
        return ()


class TrainStep:
    """One optimizer step: count the items of the loss, run forward and backward for all microbatches, clip gradients,
    decide whether to skip the update, and update."""

    def __init__(
        self,
        model: nn.Module,
        gradients: MicrobatchesInTurn | PipelinedStep,
        loss: Loss,
        update: Update,
        mesh: Mesh,
        device: torch.device,
    ):
        """`gradients` runs forward and backward over all microbatches. `loss` computes the sums of the loss over the
        items of a microbatch."""
        self.model = model
        self.optimizer = update.optimizer
        self.guard = update.guard
        self.gradients = gradients
        self._update = update
        self._mesh = mesh
        self.device = device
        self.loss = loss
        self._timeline = gradients.timeline
        self.statistics = RunningStatistics(model)
        """BatchNorm's running statistics, and a copy of them, which a skipped or abandoned step restores."""

        self.experts = ExpertBalance(model, mesh.data_group, device)
        """The loads (numbers of tokens per expert) and the selection biases of mixtures of experts."""

        self._replicas = replicas_of(self.optimizer)
        self._parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def __call__(self, microbatches: list[Batch], observers: Iterable[Observer] = ()) -> StepResult:
        """Train on the microbatches of one step. Collective. The host does not wait for the device.

        The gradient is exact even if microbatches or ranks have different numbers of items, in every gradient
        accumulation mode. The step's items are counted over all ranks before the first loss. Every microbatch's loss is
        a sum divided by that count, and FSDP2 only sums gradients.

        The method `before_update` of all `observers` is called when the gradients are complete, before clipping. After
        an error or an interrupt before the update, gradients and loads of experts are dropped, and running statistics
        are restored. Without pipeline stages, all ranks together can then try the step again.
        """
        self.statistics.save()
        try:
            counts = _Counts(self.loss, microbatches, self.device, self._mesh.data_group)
            sums = self.gradients(microbatches, self.loss, counts.num_items)
            self._timeline.group("")
            if self._replicas is not None:
                self._timeline.begin("communication")
                self._replicas.reduce_gradients()
            self._timeline.begin(OTHER)
            # Ranks with the same tokens compute the same loss, so each rank takes an equal part of the loss.
            total, *others = (sums / self._mesh.layout.token_copies).unbind()
            parts = dict(zip(self.loss.tags, others, strict=False))
            loss_sum = total - parts[Z_LOSS] if Z_LOSS in parts else total
            for observer in observers:
                observer.before_update()

            self._timeline.begin("optimizer")
            replicas = None if self._replicas is None else self._replicas.group
            grad_norm = clip_grad_norm(self._parameters, self._update.max_norm, self._mesh.pipeline_group, replicas)
            grad_norm = grad_norm.to(self.device, non_blocking=True)  # with CPU offload, the norm is on the host
            self._timeline.begin(OTHER)
            is_skipped = self.guard.check(loss_sum, grad_norm)
        except BaseException:
            discard_pending(self.model)
            if self._replicas is not None:
                self._replicas.discard()
            self.statistics.restore()
            self.experts.reset()
            raise

        try:
            self._timeline.begin("optimizer")
            step_unless(self.optimizer, is_skipped)
            if self._replicas is not None:
                self._timeline.begin("communication")
                self._replicas.gather_parameters()
            self._timeline.begin(OTHER)
            self.statistics.restore_if(is_skipped)
            self.experts.end_step(is_skipped)
            self.parameters_changed()
        finally:  # also after an interrupt: the next step must not add to these gradients and loads
            self.optimizer.zero_grad()
            self.experts.reset()

        has_loss = self.gradients.computes_loss
        items_local = counts.items_local if has_loss else torch.zeros_like(counts.items_local)
        items_local = items_local / self._mesh.layout.token_copies
        num_items, num_targets = counts.total()
        return StepResult(loss_sum, parts, items_local, num_items, num_targets, grad_norm, is_skipped)

    def parameters_changed(self) -> None:
        """Update the values that depend on parameters, such as float8 scales. The host does not wait for the device. A
        step calls this method after its update. Call the method after any other change of parameters."""
        if self._update.after is not None:
            self._update.after()


class _Counts:
    """The numbers of items and of valid targets of a step (`Loss.counts`): this rank's, and the sums over all ranks.
    An asynchronous all-reduce computes the sums. Without pipeline stages, the all-reduce overlaps with the first
    forward."""

    def __init__(
        self, loss: Loss, microbatches: Iterable[Batch], device: torch.device, group: dist.ProcessGroup | None
    ):
        counts = (loss.counts(microbatch.targets, microbatch.documents) for microbatch in microbatches)
        local = sum(counts, start=torch.zeros(2, dtype=torch.int64)).to(device, non_blocking=True)
        self.items_local = local[0]
        self._total = local.clone()
        self._sum = dist.all_reduce(self._total, group=group, async_op=True)

    def total(self) -> Tensor:
        """Return the sums over all ranks on the device: items and valid targets. On CUDA the host does not wait."""
        if self._sum is not None:
            self._sum.wait()
            self._sum = None
        return self._total

    def num_items(self) -> Tensor:
        """Return the number of items of all ranks, a scalar on the device."""
        return self.total()[0]


def forward_backward(
    model: nn.Module,
    microbatch: Batch,
    device: torch.device,
    num_items: Callable[[], Tensor],
    loss: Loss,
    timeline: StepClock = UNCOUNTED,
) -> Tensor:
    """Run forward and backward over one microbatch. Return its sums (`Loss.sums`), divided by `num_items()`, detached.

    `num_items` returns the number of the step's items over all ranks, and is called after the forward. `timeline`
    measures the time of forward and backward.

    When this function returns, inputs, outputs and loss are freed, before the next microbatch allocates its own.
    """
    microbatch = microbatch.to(device)
    timeline.begin("forward")
    loss.prepare(*microbatch)
    outputs = run_model(model, microbatch, loss)
    means = means_of_step(loss.sums(outputs, microbatch.targets), num_items())
    del outputs  # the autograd graph keeps the tensors that backward needs
    timeline.begin("backward")
    means[0].backward()
    timeline.begin(OTHER)
    return means.detach()


@torch.no_grad()
def validate(
    model: nn.Module, batches: Iterable[tuple[str, Batch]], device: torch.device, loss: Loss
) -> dict[str, float]:
    """Run the model in evaluation mode over the batches of all ranks. Return the `validation/*` metrics. Collective.

    `batches`: pairs of a source's name and a batch. The name is "" if the data is not a mixture. Named sources also
    have metrics of their own. Every rank must have the same names and the same number of batches, because each forward
    all-gathers parameters. Without items the metrics are NaN. The accuracy is NaN for a model that returns only its
    loss. In a pipeline only the ranks with the last stage compute losses.
    """
    totals: dict[str, Tensor] = {}
    pipeline = pipeline_of(model)
    outputs: Any
    with in_evaluation_mode(model):
        for source, batch in batches:
            batch = batch.to(device)
            total = totals.setdefault(source, torch.zeros(4, dtype=torch.float64, device=device))
            if pipeline is None:
                loss.prepare(*batch)
                outputs = run_model(model, batch, loss)
            else:
                with loss.given(batch.targets):
                    outputs = run_forward(pipeline, batch.inputs, device, document_arguments(model, batch.documents))
            if outputs is not None:  # else another rank holds the last stage
                total[:2] += loss.sums(outputs, batch.targets)
                total[2:] += loss.counts(batch.targets, batch.documents)
    rows = torch.stack([torch.zeros(4, dtype=torch.float64, device=device), *totals.values()])
    dist.all_reduce(rows)
    metrics = _validation_means(rows.sum(0), "", loss.accuracy_of_items)
    for source, row in zip(totals, rows[1:], strict=True):
        metrics |= _validation_means(row, f"/{source}", loss.accuracy_of_items) if source else {}
    return metrics


def _validation_means(sums: Tensor, suffix: str, accuracy_of_items: bool) -> dict[str, float]:
    """Return loss and accuracy by tag; NaN for a mean of no items. `sums`: the sum of the losses, and the numbers of
    correct predictions, of items and of valid targets. `accuracy_of_items`: True if the accuracy is a fraction of
    the items, and False if it is a fraction of the valid targets."""
    loss_sum, correct, items, targets = sums.tolist()
    predictions = items if accuracy_of_items else targets
    mean = loss_sum / items if items else math.nan
    accuracy = correct / predictions if predictions else math.nan
    return {f"validation/loss{suffix}": mean, f"validation/accuracy{suffix}": accuracy}


def build_step(
    config: JobConfig,
    model: AssembledModel,
    optimizer: Optimizer,
    device: torch.device,
    num_classes: int,
    timeline: StepClock,
) -> TrainStep:
    """Return the training step. `num_classes`: number of classes of the data; for tokens, the vocabulary size.
    `timeline` measures the time of forward, backward, communication and optimizer."""
    accumulation = Accumulation(config.gradient_accumulation, replicas_of(optimizer))
    pipeline = pipeline_of(model.module)
    gradients: MicrobatchesInTurn | PipelinedStep
    if pipeline is None:
        gradients = MicrobatchesInTurn(model.module, accumulation, device, timeline)
    else:
        from titan_launch.train.pipeline_step import PipelinedStep  # importing PyTorch's schedules takes a second

        gradients = PipelinedStep(pipeline, config.parallelism, accumulation, device, timeline)
    loss = build_loss(model.module, model.plan, config, num_classes, frozen=model.frozen)
    guard, after = StepGuard(config.debug, device), scale_update(model.module, config.float8)
    update = Update(optimizer, guard, config.training.max_norm, after)
    return TrainStep(model.module, gradients, loss, update, model.mesh, device)
