"""The protocol of everything that watches the steps of a run. `train/observers.py` has the list of all observers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class WatchedStep:
    """A step before it runs."""

    number: int
    """Number of the step, from 1 on."""

    is_reported: bool
    """True if a report follows the step. A signal may cause further reports."""

    microbatches: Sequence[Sequence[Tensor | None]]
    """This rank's microbatches, as `data.sources.Batch`."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step: scalars on the device, for which the host has not waited."""

    loss_sum: Tensor
    """This rank's part of the step's loss, without the z-loss. The sum over all ranks is the mean over all items: the
    valid targets, or the items of another loss. Ranks that share matrices (tensor parallelism) compute the same loss,
    and each has an equal part of it."""

    parts: Mapping[str, Tensor]
    """This rank's part of the other metrics of the loss (`Loss.tags`), by tag."""

    items_local: Tensor
    """Number of items of this rank in `loss_sum`, divided by the number of ranks that share matrices (tensor
    parallelism)."""

    items_global: Tensor
    """Number of items of all ranks: the only denominator of the step's loss."""

    targets_global: Tensor
    """Number of valid (not ignored) targets of all ranks."""

    grad_norm: Tensor
    """Norm of the whole gradient before clipping."""

    is_skipped: Tensor
    """1 if the step did not change the parameters, else 0."""


class Observer:
    """Something that watches steps and does not change their results. A method that is not overridden does nothing.

    An observer with a state also is a part of checkpoints (`checkpoint.state.Part`).
    """

    def before_step(self, step: WatchedStep) -> None:
        """Begin to watch a step."""

    def before_update(self) -> None:
        """Look at a step when all gradients are complete, before anything changes. An error abandons the step."""

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        """Stop watching a step, after its update."""

    def abandon_step(self, error: BaseException) -> None:
        """Stop watching a step that an error has ended, in place of `after_step`. `before_step` may not have run."""

    def take_metrics(self) -> Mapping[str, float | Tensor]:
        """Return this rank's values for a report by tag, after its last step, and reset them. All ranks return the same
        tags. Collective."""
        return {}
