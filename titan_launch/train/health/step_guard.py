"""Steps whose update is left out: seen on any rank, decided for all on the device, without waiting for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.config.sections.run import DebugConfig

Reason = Literal["nonfinite", "spike"]
"""Why a step is left out: a number that is not finite, or one far above those before."""

MAX_WINDOW = 1024
"""The largest `debug.spike_window`; so many steps are kept and saved, so that the setting may change at a resume."""

_TRAINED, _NONFINITE, _SPIKE, _STOPPED = range(4)
_REASONS: dict[int, Reason] = {_NONFINITE: "nonfinite", _SPIKE: "spike"}


@dataclass(frozen=True)
class SkippedStep:
    """A step whose update was left out; the same on all ranks, but for `own_loss`."""

    step: int
    reason: Reason
    loss: float
    """The step's loss over all ranks."""

    grad_norm: float
    loss_limit: float
    """What the loss would have had to exceed to be a spike; inf where nothing was one."""

    grad_norm_limit: float
    own_loss: float
    """This rank's part of the loss; the parts of all ranks add up to it."""


@dataclass(frozen=True)
class SkippedSteps:
    """What has been left out since the last look."""

    steps: tuple[SkippedStep, ...]
    last: SkippedStep | None
    """The fault that was one too many, if there was one: nothing has been updated since."""


class StepGuard:
    """Decides on the device whether a step's update is left out, and remembers why until the host looks.

    left_out = guard.check(loss_sum, grad_norm)   # every step; nothing waits
    settlement = guard.settle(step)               # now and then; waits

    The decision must be common: under HSDP the gradient norm is reduced within a replica only, and a rank that steps
    alone has different parameters ever after. So loss, norm and flag are summed over all ranks, in one collective.
    """

    def __init__(self, config: DebugConfig, device: torch.device):
        self._stops_on_nonfinite = config.on_nonfinite == "stop"
        self._max_skips = config.max_skips
        self._sigma = config.spike_sigma
        self._window = config.spike_window
        self._history = torch.zeros(2, MAX_WINDOW, dtype=torch.float64, device=device)
        """Loss and gradient norm of the last steps that were trained on, the newest at the end."""

        self._filled = torch.zeros((), dtype=torch.int64, device=device)
        """Columns of the history, from the end, that hold a step."""

        self._skips = torch.zeros((), dtype=torch.int64, device=device)
        """Steps left out in a row."""

        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        """Whether there was a fault too many: then nothing is updated until the host looks."""

        self._ages = torch.arange(MAX_WINDOW, 0, -1, device=device)
        self._no_limits = torch.full((2,), math.inf, dtype=torch.float64, device=device)
        self._records: list[Tensor] = []
        """Of every step since the last look: why it was left out, this rank's loss, whether it was one too many, loss
        and norm, and their limits."""

    @torch.no_grad()
    def check(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1 where this step's update must be left out on every rank, else 0: a scalar on the device; collective.

        `loss`: this rank's part, all of which add up to the step's loss. `grad_norm`: of the whole gradient, the same
        on all ranks that share its shards. Both are scalars.
        """
        is_finite = torch.isfinite(loss + grad_norm)
        summed = torch.stack([(~is_finite).double(), loss.double(), grad_norm.double() / dist.get_world_size()])
        dist.all_reduce(summed)
        values, nonfinite = summed[1:], summed[0] > 0
        limits = self._limits()
        spike = (values > limits).any() & ~nonfinite
        is_bad = (nonfinite | spike) & ~self._stopped
        self._skips = torch.where(self._stopped, self._skips, torch.where(is_bad, self._skips + 1, 0))
        is_last = is_bad & (self._skips >= self._max_skips)
        if self._stops_on_nonfinite:
            is_last = is_last | (is_bad & nonfinite)
        reason = torch.where(nonfinite, _NONFINITE, torch.where(spike, _SPIKE, _TRAINED))
        reason = torch.where(self._stopped, _STOPPED, reason)
        self._records.append(
            torch.cat([torch.stack([reason.double(), loss.double(), is_last.double()]), values, limits])
        )
        self._stopped = self._stopped | is_last
        skip = is_bad | self._stopped
        if self._sigma is not None:
            self._remember(values, ~skip)
        return skip.float()

    def _limits(self) -> Tensor:
        """What makes loss and norm a spike, float64 `[2]`: infinite as long as half of the window is empty."""
        if self._sigma is None:
            return self._no_limits
        filled = self._filled.clamp(max=self._window)
        is_filled = self._ages <= filled
        count = filled.clamp(min=1)
        mean = torch.where(is_filled, self._history, 0.0).sum(1, keepdim=True) / count
        variance = torch.where(is_filled, (self._history - mean).square(), 0.0).sum(1, keepdim=True) / count
        limits = (mean + self._sigma * variance.sqrt()).squeeze(1)
        return torch.where(filled >= (self._window + 1) // 2, limits, self._no_limits)

    def _remember(self, values: Tensor, is_trained: Tensor) -> None:
        shifted = torch.cat([self._history[:, 1:], values[:, None]], dim=1)
        self._history = torch.where(is_trained, shifted, self._history)
        self._filled = (self._filled + is_trained).clamp(max=MAX_WINDOW)

    def pop_skipped_steps(self, step: int) -> SkippedSteps:
        """What was left out since the last call, of which `step` is the last step done. Waits for the device."""
        records, self._records = self._records, []
        if not records:
            return SkippedSteps((), None)
        rows = torch.stack(records).tolist()
        steps, last = [], None
        for number, row in enumerate(rows, start=step - len(rows) + 1):
            code, own_loss, is_last, loss, grad_norm, loss_limit, grad_norm_limit = row
            if int(code) not in _REASONS:
                continue
            skipped_step = SkippedStep(
                number, _REASONS[int(code)], loss, grad_norm, loss_limit, grad_norm_limit, own_loss
            )
            steps.append(skipped_step)
            last = skipped_step if is_last else last
        return SkippedSteps(tuple(steps), last)

    def reset_skips(self) -> None:
        """Forget the steps left out in a row, and go on: after the run has gone back to a checkpoint."""
        self._records.clear()
        self._skips = torch.zeros_like(self._skips)
        self._stopped = torch.zeros_like(self._stopped)

    def state_dict(self) -> dict[str, Tensor]:
        """What the next decisions depend on, as of a step that is settled; the same on all ranks."""
        return {"history": self._history.clone(), "filled": self._filled.clone(), "skips": self._skips.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on with what was saved. A history is dropped where spikes are not looked for, so that it does not age.

        Raises ValueError for counts that cannot be.
        """
        if any(int(state[name]) < 0 for name in ("filled", "skips") if name in state):
            raise ValueError("a negative number of steps in the guard's state")
        for name, own in (("history", self._history), ("filled", self._filled), ("skips", self._skips)):
            if name in state:
                own.copy_(state[name])
        if self._sigma is None:
            self._filled.zero_()
        self._records.clear()
