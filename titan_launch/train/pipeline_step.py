"""Forward and backward of a step through pipeline stages, with the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from titan_launch.config.rules.parallelism import SPLIT_BACKWARD_SCHEDULES, misfit_of_microbatches
from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.core.errors import RunError, config_error
from titan_launch.core.patches import loggers_silenced
from titan_launch.distributed.torch_private import (
    ForwardOrder,
    accumulate_in_reduce_dtype,
    pop_forward_order,
    restore_forward_order,
)
from titan_launch.parallel.accumulation import AccumulationStrategy
from titan_launch.parallel.pipeline import LocalStage, Pipeline


def build_schedule(
    name: str,
    num_microbatches: int,
    pipeline: Pipeline,
    inputs: Tensor,
    accumulation: AccumulationStrategy,
    device: torch.device,
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Return PyTorch's schedule `name` for this rank's stages. The schedule does not scale gradients.

    `inputs`: inputs of one microbatch. `loss`: function of a microbatch's (outputs, targets) that returns its part of
    the step's loss.
    """
    boundaries = pipeline.boundaries.of(inputs)
    stages = [
        ScheduledStage(
            local,
            len(pipeline.plan.stages),
            boundaries[local.stage.index : local.stage.index + 2],
            accumulation,
            pipeline,
            device,
            splits_backward=name in SPLIT_BACKWARD_SCHEDULES,
        )
        for local in pipeline.local
    ]
    kind = get_schedule_class(name)
    what: Any = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    return kind(what, num_microbatches, loss_fn=loss, scale_grads=False)


class ScheduledStage(PipelineStage):
    """PyTorch's pipeline stage, changed so that FSDP2 works in it as it does without a pipeline."""

    def __init__(
        self,
        local: LocalStage,
        num_stages: int,
        boundaries: tuple[Tensor, ...],
        accumulation: AccumulationStrategy,
        pipeline: Pipeline,
        device: torch.device,
        splits_backward: bool,
    ):
        index = local.stage.index
        stage_inputs, stage_outputs = (_with_gradient(tensor) for tensor in boundaries)
        super().__init__(
            _HiddenModule(local.module),
            index,
            num_stages,
            device,
            input_args=stage_inputs,
            output_args=stage_outputs,
            group=pipeline.group,
        )
        self._root = local.module
        self._fsdp_root = cast(Any, local.module)  # Any, because older releases of PyTorch lack methods
        self._accumulation = accumulation
        self._splits_backward = splits_backward
        self._orders: dict[int, ForwardOrder] = {}
        if splits_backward and hasattr(FSDPModule, "finalize_backward"):
            self._fsdp_root.set_manual_backward_finalization(True)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        self._orders[fwd_chunk_id] = pop_forward_order(self._root)
        return output

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        restore_forward_order(self._root, self._orders.pop(bwd_chunk_id))
        self._accumulation.begin_microbatch(self._root, is_last=last_backward and not self._splits_backward)
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        accumulate_in_reduce_dtype(self._root)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce gradients and reshard, if the schedule has a separate backward of weights.

        `finalize_backward` is public since torch 2.15. Remove the other branch when torch 2.14 is not supported.
        """
        if not self._splits_backward:
            return
        if hasattr(FSDPModule, "finalize_backward"):
            self._fsdp_root.set_requires_gradient_sync(True)
            self._fsdp_root.set_reshard_after_backward(True)
            self._fsdp_root.finalize_backward()
        else:
            hidden, self.submod = self.submod, self._root
            try:
                super().perform_reduce_grad(grad_scale_factor)
            finally:
                self.submod = hidden

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return the messages with which torch before 2.13 connects ranks, except messages to this rank itself.

        With ZBV a rank has two consecutive stages, but gloo cannot connect a rank to itself."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


class _HiddenModule(nn.Module):
    """A wrapper that hides FSDP2 from the schedule.

    Otherwise the schedule would control FSDP2: all-gather a whole stage at once, reshard it and reduce its gradients
    only at the end of the step, in every gradient accumulation mode."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args).contiguous()  # required for sending


def _with_gradient(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


Loss = Callable[[Tensor, Tensor], Tensor]
"""Function of a microbatch's (outputs, targets) that returns its part of the step's loss."""


class PipelinedStep:
    """Runs forward and backward of all microbatches of a step through a pipeline.

    The microbatches of the schedule are those of gradient accumulation. Each loss is already divided by the number
    of valid targets, so the schedule does not scale. FSDP2's hooks reduce gradients when the gradient accumulation mode
    demands it, independent of the schedule. If the schedule has a separate backward of weights, the hooks reduce
    gradients after the last of these backwards.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        parallelism: ParallelismConfig,
        accumulation: AccumulationStrategy,
        device: torch.device,
    ):
        self._pipeline = pipeline
        self._parallelism = parallelism
        self._accumulation = accumulation
        self._device = device
        self._schedules: dict[tuple[int, torch.Size], Any] = {}
        self._loss: Loss | None = None
        self._is_abandoned = False

    def __call__(self, microbatches: list[tuple[Tensor, Tensor]], loss: Loss) -> Tensor:
        """Compute the gradients of all microbatches. Return this rank's part of the loss, 0 without the last stage.

        Raises the errors of stages unchanged. After an error, messages to other ranks may be pending, so a further call
        raises RunError.
        """
        if self._is_abandoned:
            raise RunError(
                "a pipeline cannot continue after an abandoned step, since messages may be pending; start the run again"
            )
        inputs, targets = (
            torch.cat([tensor.to(self._device, non_blocking=True) for tensor in tensors])
            for tensors in zip(*microbatches, strict=True)
        )
        schedule = self._schedule(len(microbatches), microbatches[0][0])
        losses: list[Tensor] = []
        self._loss = loss
        with self._abandoned_on_error(), _errors_as_raised():
            first = (inputs,) if self._pipeline.local[0].stage.index == 0 else ()
            if self._pipeline.has_last:
                schedule.step(*first, target=targets, losses=losses, return_outputs=False)
            else:
                schedule.step(*first, return_outputs=False)
        return sum((each.detach() for each in losses), start=torch.zeros((), device=self._device))

    @property
    def computes_loss(self) -> bool:
        """True if the last stage is on this rank."""
        return self._pipeline.has_last

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._is_abandoned = True
            self._schedules.clear()  # frees the tensors of the step
            raise

    def _schedule(self, num_microbatches: int, inputs: Tensor) -> Any:
        """Return the schedule for a number of microbatches. Schedules are reused: each allocates receive buffers."""
        key = (num_microbatches, inputs.shape)
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(num_microbatches, inputs)
        return self._schedules[key]

    def _build_schedule(self, num_microbatches: int, inputs: Tensor) -> Any:
        misfit = misfit_of_microbatches(self._parallelism, num_microbatches)
        if misfit is not None:
            raise config_error(("training", "global_batch_size"), misfit)
        return build_schedule(
            self._parallelism.pipeline_parallel_schedule,
            num_microbatches,
            self._pipeline,
            inputs,
            self._accumulation,
            self._device,
            self._compute_loss,
        )

    def _compute_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(outputs, targets)


@contextmanager
def _errors_as_raised() -> Iterator[None]:
    """Raise the original error of a pipeline stage, without the error and the log of the whole schedule that PyTorch
    adds to it."""
    try:
        with loggers_silenced("torch.distributed.pipelining.schedules"):
            yield
    except RuntimeError as error:
        raise _innermost(error) from None


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None and str(error).lstrip().startswith(("[Stage", "Failed to run stage")):
        error = error.__cause__
    return error
