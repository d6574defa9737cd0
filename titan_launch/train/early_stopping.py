"""Early stopping: the end of a run whose validation loss no longer improves (`validation.patience`)."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from titan_launch.checkpoint.retention import best_steps, validation_losses
from titan_launch.checkpoint.state import Progress, Values
from titan_launch.core.terminal import counted
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.metrics.tags import BEST_LOSS, WITHOUT_IMPROVEMENT


class EarlyStopping:
    """The lowest validation loss of a run, and the number of validations in a row without an improvement. This object
    is a part of the training state. All ranks have equal numbers, because a validation all-reduces its loss."""

    def __init__(self, patience: int, min_improvement: float, folder: Path, progress: Progress):
        """`patience`, `min_improvement`: keys of `[validation]`. `folder`: folder of the run's checkpoints. `progress`:
        a part of the same training state that is loaded before this part."""
        self._patience = patience
        self._min_improvement = min_improvement
        self._folder = folder
        self._progress = progress
        self._best_loss = math.inf
        self._best_step = 0
        """Step of the lowest loss; 0 before the first finite loss."""

        self._improved_loss = math.inf
        """Loss of the last validation that counts as an improvement. Later losses may be lower, but by at most
        `validation.min_improvement`."""

        self._without_improvement = 0
        self._has_ended = False

    @property
    def has_ended(self) -> bool:
        """True if the last validation has ended the run. False again after a resume with a larger patience."""
        return self._has_ended and self._without_improvement >= self._patience

    @property
    def needs_checkpoint(self) -> bool:
        """True if the validation of the last finished step has the lowest loss so far, or has ended the run."""
        return self._best_step == self._progress.step or self.has_ended

    def observe(self, loss: float) -> dict[str, float]:
        """Record the loss of a validation after the last finished step. A loss that is not finite counts as infinite.
        Return the metrics by tag."""
        if not math.isfinite(loss):
            loss = math.inf
        if loss < self._best_loss:
            self._best_loss, self._best_step = loss, self._progress.step
        if loss < self._improved_loss - self._min_improvement:
            self._improved_loss, self._without_improvement = loss, 0
        else:
            self._without_improvement += 1
        self._has_ended = self._without_improvement >= self._patience
        best = {BEST_LOSS: self._best_loss} if self._best_step else {}
        return {**best, WITHOUT_IMPROVEMENT: self._without_improvement}

    def describe(self, result: int) -> str:
        """Return a clause that says why the run has ended. `result`: step of the checkpoint to use as the result."""
        enough = f" by more than {self._min_improvement:g}" if self._min_improvement else ""
        best = f"best {self._best_loss:.4f} at step {self._best_step}" if self._best_step else "it was never finite"
        missing = ", whose checkpoint is missing" if self._best_step not in (0, result) else ""
        validations = counted(self._without_improvement, "validation")
        return f"validation loss has not improved{enough} for {validations} ({best}{missing})"

    def state_dict(self) -> Values:
        """Return the numbers as tensors. `checkpoint.index.ended_early` reads `has_ended`."""
        return {
            "best_loss": torch.tensor(self._best_loss, dtype=torch.float64),
            "best_step": torch.tensor(self._best_step),
            "improved_loss": torch.tensor(self._improved_loss, dtype=torch.float64),
            "without_improvement": torch.tensor(self._without_improvement),
            "has_ended": torch.tensor(int(self._has_ended)),
        }

    def load_state_dict(self, state: Values) -> None:
        """Load saved numbers. Collective. Raises ValueError for invalid numbers.

        `state` is ignored if it is empty: the checkpoint was saved without `validation.patience`, or its step is not
        loaded. `state` is also ignored if this run's folder has no checkpoints, because `state` is then from another
        run. The number of validations without an improvement is then 0. The lowest loss is that of the checkpoints in
        this run's folder, up to the current step.
        """
        saved = on_rank_0(lambda: validation_losses(self._folder))
        if saved and state.keys() == self.state_dict().keys():
            best, improved = float(state["best_loss"]), float(state["improved_loss"])
            step, number, has_ended = (int(state[key]) for key in ("best_step", "without_improvement", "has_ended"))
        else:
            losses = {step: loss for step, loss in saved.items() if loss is not None and step <= self._progress.step}
            step = next(iter(best_steps(losses)), 0)
            best = improved = losses.get(step, math.inf)
            number, has_ended = 0, 0
        is_known = math.isfinite(best) and best <= improved < math.inf and 0 < step <= self._progress.step
        is_unknown = best == improved == math.inf and step == 0
        if not (is_known or is_unknown) or not 0 <= number < 2**53:
            lowest = f"lowest loss {best} at step {step}, {number} validations without an improvement"
            raise ValueError(f"the state of early stopping is invalid: {lowest}")
        self._best_loss, self._best_step, self._improved_loss = best, step, improved
        self._without_improvement, self._has_ended = number, bool(has_ended)
