"""Detection of steps to skip, on the device and for all ranks, without waiting for the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.config.sections.run import DebugConfig

Reason = Literal["nonfinite", "spike"]
"""Reason for a skipped step: the loss or the gradient norm is not finite, or far above its recent values (a spike)."""

MAX_WINDOW = 1024
"""Largest `debug.spike_window`. The history always has this length, so that the setting may change at a resume."""

_TRAINED, _NONFINITE, _SPIKE, _STOPPED = range(4)
_REASONS: dict[int, Reason] = {_NONFINITE: "nonfinite", _SPIKE: "spike"}


@dataclass(frozen=True)
class SkippedStep:
    """A skipped step, equal on all ranks except for `own_loss`."""

    step: int
    reason: Reason
    loss: float
    """Loss of the step over all ranks."""

    grad_norm: float
    loss_limit: float
    """Largest loss that is not a spike; inf if spikes are not detected, or if the history is too short."""

    grad_norm_limit: float
    own_loss: float
    """This rank's part of the loss. The parts of all ranks sum to the loss."""

    is_last: bool
    """True if the run must stop or go back to a checkpoint. After this step, no parameter was updated."""


class StepGuard:
    """An object that decides on the device whether to skip a step, and records the skipped steps.

    skip = guard.check(loss_sum, grad_norm)        # every step; does not wait for the device
    skipped = guard.pop_skipped_steps(step)        # at reports; waits for the device

    All ranks must decide the same, because otherwise their parameters would diverge. Under HSDP the gradient norm is
    reduced within a replica only. So one all-reduce over all ranks sums the loss and a non-finite flag, and computes
    the mean of the norms.
    """

    def __init__(self, config: DebugConfig, device: torch.device):
        self._stops_on_nonfinite = config.on_nonfinite == "stop"
        self._max_skips = config.max_skips
        self._sigma = config.spike_sigma
        self._window = config.spike_window
        self._history = torch.zeros(2, MAX_WINDOW, dtype=torch.float64, device=device)
        """Loss and gradient norm of the last steps that were not skipped, the newest last."""

        self._filled = torch.zeros((), dtype=torch.int64, device=device)
        """Number of steps in the history. The history is filled from its end."""

        self._skips = torch.zeros((), dtype=torch.int64, device=device)
        """Number of skipped steps in a row."""

        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        """True after a step at which the run must stop or go back. All steps are skipped until the host reacts."""

        self._ages = torch.arange(MAX_WINDOW, 0, -1, device=device)
        self._no_limits = torch.full((2,), math.inf, dtype=torch.float64, device=device)
        self._records: list[Tensor] = []
        """Values of every step since the last call of `pop_skipped_steps`: reason, this rank's loss, 1 if the run must
        stop or go back (else 0), loss and norm over all ranks, and their limits."""

    @torch.no_grad()
    def check(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return 1 if all ranks must skip this step, else 0, as a scalar on the device. Collective. `loss`: this rank's
        part of the loss. `grad_norm`: norm of the gradient of all parameters, equal on all ranks of one replica of the
        model. Both are scalars."""
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
            shifted = torch.cat([self._history[:, 1:], values[:, None]], dim=1)
            self._history = torch.where(skip, self._history, shifted)
            self._filled = (self._filled + ~skip).clamp(max=MAX_WINDOW)
        return skip.float()

    def _limits(self) -> Tensor:
        """Return the limits of loss and gradient norm, float64 `[2]`. The limits are infinite if spikes are not
        detected, and until the history has half of `debug.spike_window` steps."""
        if self._sigma is None:
            return self._no_limits
        filled = self._filled.clamp(max=self._window)
        is_filled = self._ages <= filled
        count = filled.clamp(min=1)
        mean = torch.where(is_filled, self._history, 0.0).sum(1, keepdim=True) / count
        variance = torch.where(is_filled, (self._history - mean).square(), 0.0).sum(1, keepdim=True) / count
        limits = (mean + self._sigma * variance.sqrt()).squeeze(1)
        return torch.where(filled >= (self._window + 1) // 2, limits, self._no_limits)

    def pop_skipped_steps(self, step: int) -> list[SkippedStep]:
        """Return the steps skipped since the last call. Steps after a step with `is_last` are not included. `step`: the
        last finished step. Waits for the device."""
        records, self._records = self._records, []
        rows = torch.stack(records).tolist() if records else []
        steps = []
        for number, row in enumerate(rows, start=step - len(rows) + 1):
            code, own_loss, is_last, loss, grad_norm, loss_limit, grad_norm_limit = row
            if int(code) not in _REASONS:
                continue
            values = loss, grad_norm, loss_limit, grad_norm_limit, own_loss
            steps.append(SkippedStep(number, _REASONS[int(code)], *values, bool(is_last)))
        return steps

    def reset_skips(self) -> None:
        """Drop the records, reset the count of skipped steps, and let the following steps train. Call this method after
        the run has gone back to a checkpoint."""
        self._records.clear()
        self._skips = torch.zeros_like(self._skips)
        self._stopped = torch.zeros_like(self._stopped)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state on which later decisions depend, equal on all ranks. Call `pop_skipped_steps` first."""
        return {"history": self._history.clone(), "filled": self._filled.clone(), "skips": self._skips.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore a saved state. If the job does not detect spikes, drop the saved history, because it would not be
        updated. Raises ValueError for invalid counts."""
        if any(int(state[name]) < 0 for name in ("filled", "skips") if name in state):
            raise ValueError("the saved state of the step guard has a negative number of steps")
        for name, own in (("history", self._history), ("filled", self._filled), ("skips", self._skips)):
            if name in state:
                own.copy_(state[name])
        if self._sigma is None:
            self._filled.zero_()
        self._records.clear()
