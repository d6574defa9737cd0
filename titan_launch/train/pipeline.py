"""A step's microbatches through the stages of a pipeline, by PyTorch's schedules (torch.distributed.pipelining), which
are imported where there are stages."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan_launch.accumulation.strategies import AccumulationStrategy
from titan_launch.config.parallelism import ParallelismConfig
from titan_launch.config.pipeline_rules import misfit_of_microbatches
from titan_launch.errors import RunError, config_error
from titan_launch.parallel.pipeline import Pipeline

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs, targets) of a microbatch to its part of the step's loss."""


class PipelinedStep:
    """Goes through the microbatches of a step, forward and backward, once for each step.

    The microbatches of the schedule are those of gradient accumulation. Losses are sums that are divided already, so
    the schedule scales nothing. Gradients are communicated as the accumulation strategy says, by FSDP2's own hooks,
    which the schedule does not know of; a schedule that computes the gradients of weights apart from the others has
    them reduced after the last.
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
        """The gradients of all microbatches, complete at the end. Returns this rank's part of the loss: 0, but for the
        rank with the last stage.

        Raises what a stage raised, as it raised it. After that, messages to other ranks may be under way: RunError, if
        it is called again.
        """
        if self._is_abandoned:
            raise RunError("a pipeline cannot go on after a step that was abandoned: messages may be under way")
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
        """Whether the last stage is on this rank."""
        return self._pipeline.has_last

    @contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._is_abandoned = True
            self._schedules.clear()  # and what it holds of the step
            raise

    def _schedule(self, num_microbatches: int, inputs: Tensor) -> Any:
        """PyTorch's schedule for steps of so many microbatches; it allocates what it receives into."""
        key = (num_microbatches, inputs.shape)
        if key not in self._schedules:
            self._schedules[key] = self._build_schedule(num_microbatches, inputs)
        return self._schedules[key]

    def _build_schedule(self, num_microbatches: int, inputs: Tensor) -> Any:
        from titan_launch.train.pipeline_schedule import build_schedule

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
    """PyTorch wraps what a stage raises into an error that prints its arguments, and logs the whole schedule."""
    log = logging.getLogger("torch.distributed.pipelining.schedules")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    except RuntimeError as error:
        raise _innermost(error) from None
    finally:
        log.setLevel(level)


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ is not None and str(error).lstrip().startswith(("[Stage", "Failed to run stage")):
        error = error.__cause__
    return error
