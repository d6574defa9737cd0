"""Leaving an update out without asking the host."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from titan_launch.optim.mixed import MixedOptimizer


def step_unless(optimizer: Optimizer, nonfinite: Tensor) -> None:
    """`optimizer.step()`, unless `nonfinite` (a scalar on the device, 0 or 1) is 1: then neither parameters nor
    optimizer state change, the state's step counts included.

    `MixedOptimizer` and PyTorch's fused implementation decide on the device. They read the attributes that
    `torch.amp.GradScaler` sets on an optimizer for the same purpose, and which exist for this step only. Others make
    the host wait for the flag.
    """
    if _decides_on_device(optimizer):
        flag = (nonfinite != 0).to(torch.float32)  # the kernels compare with exactly 1.0
        _step_with_flag(optimizer, flag.to(optimizer.param_groups[0]["params"][0].device))  # the host, if offloaded
    elif not nonfinite.item():
        optimizer.step()


def _decides_on_device(optimizer: Optimizer) -> bool:
    if isinstance(optimizer, MixedOptimizer):
        return optimizer.reads_found_inf
    return all(group.get("fused") for group in optimizer.param_groups)


def _step_with_flag(optimizer: Optimizer, found_inf: Tensor) -> None:
    vars(optimizer).update(grad_scale=None, found_inf=found_inf)
    try:
        optimizer.step()
    finally:
        del vars(optimizer)["grad_scale"], vars(optimizer)["found_inf"]
