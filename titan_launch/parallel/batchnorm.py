"""BatchNorm over data-parallel ranks: whose statistics normalize, how fast the running ones move, and pooling them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from titan_launch.config.sections.precision import BatchNormConfig
from titan_launch.core.errors import ConfigError, Problem, config_error
from titan_launch.parallel.synchronized_batchnorm import overrides_forward, synchronize

_log = logging.getLogger(__name__)

_FEW_VALUES = 32
"""Below this many values the variance of a batch is off by a quarter or more: its standard error is
`sqrt(2 / (n - 1))` for normal values."""


def prepare_batch_norms(
    model: nn.Module, config: BatchNormConfig, num_microbatches: int, group: dist.ProcessGroup | None
) -> None:
    """Apply `[batchnorm]` to a model before it is wrapped, in place; nothing is allocated.

    `group`: the data-parallel ranks, where statistics are synchronized; `check_batch_norms` has said that they can be.
    """
    norms = dict(_batch_norms(model))
    if config.momentum_per == "step":
        for norm in norms.values():
            if norm.momentum is not None:  # None: a cumulative average, in which every microbatch counts the same
                norm.momentum = _momentum_of_microbatch(norm.momentum, num_microbatches)
    if group is not None:
        synchronize(list(norms.values()), group)
        _log.info("%s", _describe_synchronized(len(norms), group.size()))
    if norms:
        _ValuesCheck(group).watch(model, norms)


def _momentum_of_microbatch(momentum: float, num_microbatches: int) -> float:
    """The momentum with which so many updates leave on the old statistic the weight that one with `momentum` would."""
    return float(1 - (1 - momentum) ** (1 / num_microbatches))


def _batch_norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm))


def check_batch_norms(model: nn.Module, config: BatchNormConfig) -> None:
    """Raise ConfigError for layers whose statistics cannot be synchronized, where they are to be."""
    problems = [
        Problem(
            ("batchnorm", "statistics"),
            f"{path} is a {type(norm).__name__}, {_why_not(norm)}",
            "synchronized",
        )
        for path, norm in _batch_norms(model)
        if config.statistics == "synchronized" and overrides_forward(norm)
    ]
    if problems:
        raise ConfigError(problems)


def _why_not(norm: _BatchNorm) -> str:
    if isinstance(norm, nn.SyncBatchNorm):
        return "which synchronizes by itself, on GPUs only; put an nn.BatchNorm in its place"
    return (
        "whose forward computes statistics of its own instead of calling super().forward(...); let it do so, or set "
        '"local"'
    )


def _describe_synchronized(num_norms: int, ranks: int) -> str:
    if num_norms == 0:
        return "the model has no BatchNorm: there are no statistics to synchronize"
    if ranks == 1:
        return "BatchNorm statistics are synchronized over a group of one: the same as local"
    return f"the statistics of {num_norms} BatchNorm layers are synchronized over {ranks} ranks"


class _ValuesCheck:
    """Looks, in the first training forward, at how many values each layer's statistics rest on per channel."""

    def __init__(self, group: dist.ProcessGroup | None):
        self._group = group
        self._counts: dict[str, int] = {}

    def watch(self, model: nn.Module, norms: Mapping[str, _BatchNorm]) -> None:
        """Look once, by hooks that remove themselves, and speak when the model's forward ends."""
        for path, norm in norms.items():
            if not isinstance(norm, nn.SyncBatchNorm):  # it counts all ranks' values itself
                self._watch(path, norm)

        def report(module: nn.Module, inputs: Any, output: Any) -> None:
            if module.training and not torch.compiler.is_compiling():
                handle.remove()
                self._report()

        handle = model.register_forward_hook(report)

    def _watch(self, path: str, norm: _BatchNorm) -> None:
        def count(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if norm.training and not torch.compiler.is_compiling():
                handle.remove()
                x = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
                self._counts[path] = self._count(x.numel() // norm.num_features, x.device)
                self._check(path)

        handle = norm.register_forward_pre_hook(count, with_kwargs=True)

    def _count(self, local: int, device: torch.device) -> int:
        """The values of all ranks where statistics are synchronized. Collective there; waits for the device."""
        if self._group is None:
            return local
        count = torch.tensor(local, device=device)
        dist.all_reduce(count, group=self._group)
        return int(count.item())

    def _check(self, path: str) -> None:
        if self._counts[path] == 1:
            reason = f"gives the BatchNorm {path} one value per channel in a microbatch, whose variance is 0"
            raise config_error(("training", "local_batch_size"), f"{reason}; {self._remedy()}")

    def _report(self) -> None:
        few = {path: count for path, count in self._counts.items() if count < _FEW_VALUES}
        if few and not (dist.is_initialized() and dist.get_rank()):
            worst = min(few, key=lambda path: few[path])
            _log.warning(
                "the statistics of %d BatchNorm layers rest on fewer than %d values per channel, those of %s on %d: "
                "they are mostly noise. This follows from training.local_batch_size: %s",
                *(len(few), _FEW_VALUES, worst, few[worst], self._remedy()),
            )

    def _remedy(self) -> str:
        return "raise it" if self._group else 'raise it, or on several ranks set batchnorm.statistics = "synchronized"'


@dataclass(frozen=True)
class Divergence:
    """How far the running statistics of the ranks lie apart: the largest values over all channels and ranks."""

    mean: float
    """Distance of a rank's running mean from the pooled one, in pooled standard deviations."""

    variance: float
    """Distance of a rank's running variance from the pooled one, as a fraction of that."""


def largest_divergence(of_stages: Iterable[Divergence | None]) -> Divergence | None:
    """The largest of those of several pipeline stages; None where no stage has running statistics to pool."""
    found = [divergence for divergence in of_stages if divergence is not None]
    return Divergence(max(d.mean for d in found), max(d.variance for d in found)) if found else None


@torch.no_grad()
def pool_running_statistics(model: nn.Module, group: dist.ProcessGroup | None = None) -> Divergence | None:
    """Replace every rank's running statistics by those of all ranks' data together; tell how far they were apart.

    Where each rank normalizes over its own microbatches, the moving averages drift apart while the parameters stay
    equal. Pooled: the mean of the means, and the mean of the variances plus the variance of the means (law of total
    variance). None, and nothing done, where there is one rank or no running statistic. Collective over `group`, the
    data-parallel ranks (None: all ranks); waits for the device.
    """
    norms = [norm for _, norm in _batch_norms(model) if norm.running_mean is not None]
    if not norms or dist.get_world_size(group) == 1:
        return None
    means, variances = (
        torch.cat([getattr(norm, name).double() for norm in norms]) for name in ("running_mean", "running_var")
    )
    mean = _average(means, group)
    variance = _average(variances + (means - mean).square(), group)
    spread = variance.clamp(min=torch.finfo(variance.dtype).tiny)  # 0 only where all ranks agree: 0 / spread is 0 then
    apart = torch.stack([((means - mean).abs() / spread.sqrt()).max(), ((variances - variance).abs() / spread).max()])
    dist.all_reduce(apart, op=dist.ReduceOp.MAX, group=group)
    _scatter(norms, "running_mean", mean)
    _scatter(norms, "running_var", variance)
    return Divergence(*apart.tolist())


def _average(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def _scatter(norms: list[_BatchNorm], name: str, values: Tensor) -> None:
    for norm, part in zip(norms, values.split([norm.num_features for norm in norms]), strict=True):
        getattr(norm, name).copy_(part)


class RunningStatistics:
    """A copy of a model's running statistics, to restore after a skipped or an abandoned step.

    The copy is one flat tensor of bytes, whatever the dtypes of the buffers. So a step of a deep model launches as few
    kernels as a step of a shallow one.
    """

    def __init__(self, model: nn.Module):
        """The buffers of the model's norms must not be replaced after this call; they may be written in place."""
        for _, norm in _batch_norms(model):
            norm._buffers.update({name: b.contiguous() for name, b in norm._buffers.items() if b is not None})
        buffers = [buffer for _, norm in _batch_norms(model) for buffer in norm.buffers(recurse=False)]
        self._buffers = [buffer.view(-1).view(torch.uint8) for buffer in buffers]
        self._sizes = [buffer.numel() for buffer in self._buffers]
        self.saved = torch.cat(self._buffers) if buffers else torch.empty(0, dtype=torch.uint8)
        """The bytes of all buffers, one after the other."""

    @torch.no_grad()
    def save(self) -> None:
        """Copy the buffers."""
        if self._buffers:
            torch.cat(self._buffers, out=self.saved)

    @torch.no_grad()
    def restore_if(self, flag: Tensor) -> None:
        """Restore the buffers where `flag`, a scalar on the device, is not 0. The host does not wait for the device."""
        if self._buffers:
            self._write(torch.where(flag != 0, self.saved, torch.cat(self._buffers)))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers."""
        self._write(self.saved)

    def _write(self, values: Tensor) -> None:
        if self._buffers:
            torch._foreach_copy_(self._buffers, values.split(self._sizes))
