"""Forward and backward of a step through pipeline stages, with the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titan_launch.config.rules.parallelism import misfit_of_microbatches
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.core.errors import RunError, config_error
from titan_launch.core.patches import loggers_silenced
from titan_launch.data.sources import Batch
from titan_launch.distributed.torch_private import (
    ForwardOrder,
    accumulate_in_reduce_dtype,
    pop_forward_order,
    restore_forward_order,
)
from titan_launch.loss.interface import Loss, means_of_step
from titan_launch.metrics.timeline import UNCOUNTED, StepClock
from titan_launch.models.documents import document_arguments
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.parallel.pipeline import LocalStage, Pipeline


class ScheduledStage(PipelineStage):
    """A `PipelineStage` of PyTorch in which FSDP2 works as in a model without a pipeline."""

    def __init__(self, local: LocalStage, boundaries: tuple[Tensor, ...], step: PipelinedStep):
        """`boundaries`: a tensor for the input of each stage of the model, in order, and one for the output of the last
        stage. Only their shapes and dtypes are used. `step`: the forward and backward in which the stage takes part."""
        index = local.stage.index
        stage_inputs, stage_outputs = (
            tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
            for tensor in boundaries[index : index + 2]
        )
        super().__init__(
            HiddenModule(local.module),
            index,
            len(step.pipeline.plan.stages),
            step.device,
            input_args=stage_inputs,
            output_args=stage_outputs,
            group=step.pipeline.group,
        )
        self._root = cast(Any, local.module)  # Any, because older releases of PyTorch lack methods
        self._step = step
        self._orders: dict[int, ForwardOrder] = {}
        if step.splits_backward and hasattr(FSDPModule, "finalize_backward"):
            self._root.set_manual_backward_finalization(True)

    def receive_buffers(self) -> Iterator[Tensor]:
        """Yield the tensors into which this stage has received activations and gradients, if it still holds them."""
        for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
            yield from (info.buffer for info in infos if getattr(info, "buffer", None) is not None)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._step.timeline.begin("forward")
        with self._step.losses.given(fwd_chunk_id):
            output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._step.timeline.begin("communication")
        self._orders[fwd_chunk_id] = pop_forward_order(self._root)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        restore_forward_order(self._root, self._orders.pop(bwd_chunk_id))
        self._step.accumulation.begin_microbatch(self._root, is_last=last_backward and not self._step.splits_backward)
        self._step.timeline.begin("backward")
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._step.timeline.begin("communication")

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        self._step.timeline.begin("backward")
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._step.timeline.begin("communication")
        accumulate_in_reduce_dtype(self._root)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients and reshard, if the schedule has a separate backward of weights; otherwise do nothing."""
        if not self._step.splits_backward:
            return
        self._step.accumulation.begin_microbatch(self._root, is_last=True)
        # `finalize_backward` is public since torch 2.15. Remove the other branch when older releases are not supported.
        if hasattr(FSDPModule, "finalize_backward"):
            self._root.finalize_backward()
        else:
            hidden, self.submod = self.submod, self._root
            try:
                super().perform_reduce_grad(grad_scale_factor)
            finally:
                self.submod = hidden

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the messages with which torch before 2.13 connects ranks, except messages to this rank itself. With
        ZBV a rank has two consecutive stages, but gloo cannot connect a rank to itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class HiddenModule(nn.Module):
    """A wrapper that hides FSDP2 from the schedule.

    Without the wrapper, the schedule would control FSDP2 in every gradient accumulation mode. It would all-gather a
    whole stage at once. It would reshard the stage and reduce its gradients only at the end of the step.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs).contiguous()  # required for sending


def _joined(microbatches: Sequence[Batch]) -> Batch:
    """Return the microbatches of a step as one batch, which the schedule divides again."""
    columns = zip(*microbatches, strict=True)
    return Batch._make(None if column[0] is None else torch.cat(column) for column in columns)


class PipelinedStep:
    """The forward and backward of all microbatches of a step through a pipeline.

    The schedule and gradient accumulation use the same microbatches. Each loss is already divided by the number of
    items, so the schedule does not scale gradients. The gradient accumulation mode decides when FSDP2's hooks reduce
    gradients. If the schedule has a separate backward of weights, gradients are reduced after the last of these
    backwards (`ScheduledStage.perform_reduce_grad`).
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parallelism: ParallelismConfig,
        accumulation: Accumulation,
        device: torch.device,
        timeline: StepClock = UNCOUNTED,
    ):
        """`timeline` measures the time of forward, backward and communication."""
        self.pipeline = pipeline
        self.accumulation = accumulation
        self.device = device
        self.timeline = timeline
        self.splits_backward = parallelism.splits_backward
        """True if the schedule computes the gradients of weights in a separate backward."""

        self._parallelism = parallelism
        self._schedules: dict[tuple[int, torch.Size], tuple[Any, list[ScheduledStage]]] = {}
        self._losses: _Losses | None = None
        self._is_abandoned = False

    def __call__(self, microbatches: list[Batch], loss: Loss, num_items: Callable[[], Tensor]) -> Tensor:
        """Compute the gradients of all microbatches. Return the total of their `Loss.sums`, divided by `num_items()`,
        or zeros if the last stage is on another rank. `num_items` returns the step's number of items over all ranks.

        Raises the errors of stages unchanged, and the ConfigError of `schedule_for`. After an error in the schedule,
        messages to other ranks may be pending, so a further call raises RunError.
        """
        if self._is_abandoned:
            raise RunError(
                "a pipeline cannot continue after an abandoned step, since messages may be pending; start the run again"
            )
        batch = _joined([microbatch.to(self.device) for microbatch in microbatches])
        schedule = self.schedule_for(microbatches)
        self._losses = _Losses(loss, batch.targets.tensor_split(len(microbatches)), num_items())
        own = self.pipeline.local
        first = (batch.inputs,) if own[0].stage.index == 0 else ()
        arguments: dict[str, Tensor] = document_arguments(own[0].module, batch.documents)
        if self.pipeline.has_last:
            arguments["target"] = batch.targets
        self.timeline.begin("communication")  # between forwards and backwards, this rank waits for other stages
        try:
            with _errors_as_raised():
                schedule.step(*first, return_outputs=False, **arguments)
        except BaseException:
            self._is_abandoned = True
            self._schedules.clear()  # frees the tensors of the step
            raise
        sums, self._losses = self._losses.sums, None
        return sum(sums, start=torch.zeros(loss.num_sums, device=self.device))

    def schedule_for(self, microbatches: list[Batch]) -> Any:
        """Return PyTorch's schedule for a step with these microbatches. The schedule does not scale gradients.
        Schedules are reused, because each schedule allocates receive buffers. Raises ConfigError if the schedule does
        not allow this number of microbatches."""
        number, inputs = len(microbatches), microbatches[0].inputs
        key = (number, inputs.shape)
        if key not in self._schedules:
            misfit = misfit_of_microbatches(self._parallelism, number)
            if misfit is not None:
                raise config_error(("training", "global_batch_size"), misfit)
            boundaries = self.pipeline.boundaries.of(inputs)
            stages = [ScheduledStage(local, boundaries, self) for local in self.pipeline.local]
            kind = get_schedule_class(self._parallelism.pipeline_parallel_schedule)
            what: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            loss = lambda outputs, targets: self.losses.compute(outputs, targets)  # noqa: E731 - of this step
            self._schedules[key] = kind(what, number, loss_fn=loss, scale_grads=False), stages
        return self._schedules[key][0]

    @property
    def computes_loss(self) -> bool:
        """True if the last stage is on this rank."""
        return self.pipeline.has_last

    def receive_buffers(self) -> Iterator[Tensor]:
        """Yield the tensors into which the stages have received activations and gradients. These tensors live until the
        next step."""
        for _, stages in self._schedules.values():
            for stage in stages:
                yield from stage.receive_buffers()

    @property
    def losses(self) -> _Losses:
        """The losses of the current step."""
        assert self._losses is not None, "a schedule runs only within a step"
        return self._losses


class _Losses:
    """The losses of the microbatches of a step."""

    def __init__(self, loss: Loss, targets: Sequence[Tensor], num_items: Tensor):
        """`targets`: the targets of each microbatch."""
        self._loss = loss
        self._targets = targets
        self._num_items = num_items
        self.sums: list[Tensor] = []
        """For each microbatch, its sums (`Loss.sums`) divided by `num_items`, detached."""

    def given(self, index: int) -> AbstractContextManager[None]:
        """Return a context manager that provides the targets of a microbatch to the output layer."""
        return self._loss.given(self._targets[index])

    def compute(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of a microbatch's losses, divided by `num_items`: a scalar. Append its sums to `sums`."""
        means = means_of_step(self._loss.sums(outputs, targets), self._num_items)
        self.sums.append(means.detach())
        # A copy, because a split backward detaches the loss in place, which a view does not allow.
        return means[0].clone()


@contextmanager
def _errors_as_raised() -> Iterator[None]:
    """If a pipeline stage raises an error in the block, raise it unchanged. PyTorch would wrap it in other errors, and
    log the whole schedule."""
    try:
        with loggers_silenced("torch.distributed.pipelining.schedules"):
            yield
    except RuntimeError as error:
        original: BaseException = error
        while original.__cause__ is not None and str(original).lstrip().startswith(("[Stage", "Failed to run stage")):
            original = original.__cause__
        raise original from None
