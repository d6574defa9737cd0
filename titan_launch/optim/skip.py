"""Leaving an update out without asking the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


def step_unless(optimizer: Optimizer, nonfinite: Tensor) -> None:
    """`optimizer.step()`, unless `nonfinite` (a scalar on the device, 0 or 1) is 1: then neither parameters nor
    optimizer state change, the state's step counts included.

    The fused implementation decides on the device. It reads the attributes that `torch.amp.GradScaler` sets on an
    optimizer for the same purpose, and which exist for this step only. Others make the host wait for the flag.
    """
    if all(group.get("fused") for group in optimizer.param_groups):
        _step_with_flag(optimizer, (nonfinite != 0).to(torch.float32))  # the kernels compare with exactly 1.0
    elif not nonfinite.item():
        optimizer.step()


def _step_with_flag(optimizer: Optimizer, found_inf: Tensor) -> None:
    vars(optimizer).update(grad_scale=None, found_inf=found_inf)
    try:
        optimizer.step()
    finally:
        del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
