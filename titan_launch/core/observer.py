"""The base class of objects that watch the steps of a run. `train/observers.py` has the list of all observers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WatchedStep:
    """Properties of a step that is about to run."""

    number: int
    """Number of the step, from 1 on."""

    is_reported: bool
    """True if a report follows the step. A signal may cause further reports."""

    microbatches: Sequence[Sequence[Tensor | None]]
    """This rank's microbatches, each a `data.sources.Batch`."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step: scalars on the device, for which the host has not waited."""

    loss_sum: Tensor
    """This rank's part of the step's loss, without the z-loss. The sum of the parts of all ranks is the mean loss over
    all items. (Items are the valid targets or, for some losses, pairs or answers.) The ranks of a tensor-parallel group
    compute the same loss. So the part of each rank is this loss divided by the tensor-parallel degree."""

    parts: Mapping[str, Tensor]
    """The further metrics of the loss (`Loss.tags`), by tag: for each metric, this rank's part of the mean."""

    items_local: Tensor
    """Number of this rank's items, divided by the tensor-parallel degree; 0 if this rank computes no loss."""

    items_global: Tensor
    """Number of items of all ranks. `loss_sum` and the gradients are already divided by this number."""

    targets_global: Tensor
    """Number of valid (not ignored) targets of all ranks."""

    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""

    is_skipped: Tensor
    """1 if the update was skipped, else 0."""


class Observer:
    """An object that watches steps and does not change their results. A method that is not overridden does nothing.

    An observer with state also implements `checkpoint.state.StatePart`, so that checkpoints save the state.
    """

    def before_step(self, step: WatchedStep) -> None:
        """Begin to watch a step."""

    def before_update(self) -> None:
        """Inspect a step when all gradients are complete, before they are clipped. If this method raises an error, the
        step is abandoned."""

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        """Stop watching a step, after its update."""

    def abandon_step(self, error: BaseException) -> None:
        """Stop watching a step that an error has ended. This method is called in place of `after_step`, also if the
        error came before `before_step`."""

    def take_metrics(self) -> Mapping[str, float | Tensor]:
        """Return this rank's metrics for a report, by tag, and reset them. Called after the last step that the report
        covers. This method is collective: all ranks call it, and return the same tags."""
        return {}
