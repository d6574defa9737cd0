"""Non-finite losses and gradients: seen on any rank, acted on by all, without waiting for the device."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from titan_launch.errors import RunError


class NonFiniteGuard:
    """Decides on the device whether a step's update is left out, and counts.

    The decision must be common: under HSDP the gradient norm is reduced within a replica only, and a rank that steps
    alone has different parameters ever after. So one flag a step is reduced over all ranks.
    """

    def __init__(self, action: Literal["stop", "skip"], device: torch.device):
        self._action = action
        self._num_steps = 0
        self._skipped = torch.zeros((), device=device)
        self._first_bad = torch.zeros((), device=device)

    def check(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """1 where this step's update must be left out on every rank, else 0: a scalar on the device; collective.

        After the first bad step `stop` leaves out all that follow, so that the parameters stay those from before it
        until the host looks.
        """
        self._num_steps += 1
        flag = (~torch.isfinite(loss + grad_norm)).float()
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        self._first_bad = torch.where((self._first_bad == 0) & (flag > 0), float(self._num_steps), self._first_bad)
        if self._action == "stop":
            flag = (self._first_bad > 0).float()
        self._skipped += flag
        return flag

    def take_skipped(self) -> int:
        """Steps left out since the last call. Waits for the device."""
        skipped = int(self._skipped.item())
        self._skipped.zero_()
        return skipped

    def raise_if_stopped(self, step: int) -> None:
        """End the run if `stop` has left out an update; `step` is the step just done. Waits for the device."""
        if self._action != "stop" or not self._first_bad.item():
            return
        bad = step - self._num_steps + int(self._first_bad.item())
        raise RunError(
            f"step {bad}: the loss or the gradient is not finite; its update was left out on all ranks and the run "
            'stops (debug.on_nonfinite = "skip" goes on instead). Usual causes: optimizer.lr too high, '
            "training.max_norm = 0, a precision rule that leaves a sum in bfloat16"
        )
