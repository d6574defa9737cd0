"""BatchNorm over data-parallel ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def pool_running_statistics(model: nn.Module) -> None:
    """Replace every rank's running statistics by those of all ranks' data together, in one all-reduce.

    Each rank normalizes over its own microbatches, so the moving averages drift apart while the parameters stay equal.
    Pooled: the mean of the means, and the mean of the variances plus the variance of the means (law of total
    variance). Called before validation and checkpoints, so that all ranks evaluate, and a checkpoint holds, one model.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    if not norms or dist.get_world_size() == 1:
        return
    means, variances = (
        torch.cat([getattr(m, name).double() for m in norms]) for name in ("running_mean", "running_var")
    )
    sums = torch.stack([means, variances, means.square()])
    dist.all_reduce(sums)
    mean, variance, mean_square = sums / dist.get_world_size()
    _scatter(norms, "running_mean", mean)
    _scatter(norms, "running_var", variance + mean_square - mean.square())


class RunningStatistics:
    """The running statistics of a model as they were, to go back to when a step is left out."""

    def __init__(self, model: nn.Module):
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        self._buffers = [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
        self._saved = [buffer.clone() for buffer in self._buffers]

    @torch.no_grad()
    def save(self) -> None:
        """Remember them as they are now."""
        for saved, buffer in zip(self._saved, self._buffers, strict=True):
            saved.copy_(buffer)

    @torch.no_grad()
    def restore_if(self, flag: torch.Tensor) -> None:
        """Go back to what was saved where `flag`, a scalar on the device, is not 0; waits for nothing."""
        for saved, buffer in zip(self._saved, self._buffers, strict=True):
            buffer.copy_(torch.where(flag != 0, saved, buffer))


def _scatter(norms: list[_BatchNorm], name: str, values: torch.Tensor) -> None:
    for norm, part in zip(norms, values.split([norm.num_features for norm in norms]), strict=True):
        getattr(norm, name).copy_(part)
