"""BatchNorm over data-parallel ranks: local or synchronized statistics, momentum, and pooled running statistics."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from titan_launch.config.sections.precision import BatchNormConfig
from titan_launch.core.errors import ConfigError, Problem, config_error
from titan_launch.core.terminal import counted
from titan_launch.parallel.synchronized_batchnorm import overrides_forward, synchronize

_log = logging.getLogger(__name__)

_FEW_VALUES = 32
"""Smallest number of values per channel without a warning. With fewer values, the relative standard error of their
variance exceeds 1/4: for n normally distributed values it is `sqrt(2 / (n - 1))`."""


def prepare_batch_norms(
    model: nn.Module,
    config: BatchNormConfig,
    num_microbatches: int,
    group: dist.ProcessGroup | None,
    warns: bool = True,
) -> None:
    """Apply the section `[batchnorm]` in place to a model that FSDP2 has not wrapped yet. Nothing is allocated.

    `group`: the ranks over which statistics are synchronized; None for local statistics. `warns`: True if this rank
    logs a warning about layers with few values. Call `check_batch_norms` first.
    """
    norms = dict(_batch_norms(model))
    if config.of_frozen == "fixed":
        frozen = {p: norm for p, norm in model.named_modules() if isinstance(norm, _NormBase) and _is_fixed(norm)}
        for path, norm in frozen.items():
            _fix_statistics(norm)
            norms.pop(path, None)
        _log.info("batchnorm statistics: fixed in %s", counted(len(frozen), "frozen layer"))
    if config.momentum_per == "step":
        for norm in norms.values():
            if norm.momentum is not None:  # None: a cumulative average of all microbatches with equal weights
                # The updates of all microbatches then have the effect of one update with the layer's own momentum.
                norm.momentum = float(1 - (1 - norm.momentum) ** (1 / num_microbatches))
    if group is not None:
        synchronize(list(norms.values()), group)
        _log.info("%s", _describe_synchronized(len(norms), group.size()))
    if norms:
        _ValuesCheck(group, warns).watch(model, norms)


def _is_fixed(norm: _NormBase) -> bool:
    """Return True if `batchnorm.of_frozen = "fixed"` applies to a layer: it has running statistics and parameters, and
    no parameter is trained."""
    parameters = list(norm.parameters(recurse=False))
    is_frozen = bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
    return is_frozen and norm.running_mean is not None


def _fix_statistics(norm: _NormBase) -> None:
    """Let a layer normalize with its running statistics in training, too, and not update them."""
    norm.train = lambda mode=True: nn.Module.train(norm, False)  # type: ignore[method-assign]
    norm.eval()


def _batch_norms(model: nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, _BatchNorm))


def check_batch_norms(model: nn.Module, config: BatchNormConfig) -> None:
    """Raise ConfigError if the statistics of a layer must be synchronized, but its class prevents that."""
    problems = []
    for path, norm in _batch_norms(model) if config.statistics == "synchronized" else ():
        if not overrides_forward(norm):
            continue
        if isinstance(norm, nn.SyncBatchNorm):
            why = "which synchronizes statistics by itself, and only on GPUs; use an nn.BatchNorm instead"
        else:
            why = (
                "whose forward does not call super().forward(...), so its statistics cannot be synchronized; add "
                'this call, or set batchnorm.statistics = "local"'
            )
        reason = f"{path} is a {type(norm).__name__}, {why}"
        problems.append(Problem(("batchnorm", "statistics"), reason, "synchronized"))
    if problems:
        raise ConfigError(problems)


def _describe_synchronized(num_norms: int, ranks: int) -> str:
    if num_norms == 0:
        return "batchnorm statistics: the model has no BatchNorm layers to synchronize"
    if ranks == 1:
        return "batchnorm statistics: synchronized over 1 rank, which is the same as local"
    return f"batchnorm statistics: {counted(num_norms, 'layer')} synchronized over {ranks} ranks"


class _ValuesCheck:
    """A check, in the first training forward, that each layer computes its statistics from enough values per
    channel."""

    def __init__(self, group: dist.ProcessGroup | None, warns: bool):
        self._group = group
        self._warns = warns
        self._counts: dict[str, int] = {}

    def watch(self, model: nn.Module, norms: Mapping[str, _BatchNorm]) -> None:
        """Register hooks that count values in the first training forward, and then remove themselves. The hooks raise
        ConfigError for a layer with one value per channel. At the end of the forward, a rank with `warns` logs a
        warning if layers have few values."""
        for path, norm in norms.items():
            if not isinstance(norm, nn.SyncBatchNorm):  # its statistics come from the values of all ranks
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
        """Return `local`, or with synchronized statistics its sum over the ranks (collective; waits for the device)."""
        if self._group is None:
            return local
        count = torch.tensor(local, device=device)
        dist.all_reduce(count, group=self._group)
        return int(count.item())

    def _check(self, path: str) -> None:
        if self._counts[path] == 1:
            reason = f"gives BatchNorm layer {path} only one value per channel and microbatch, so its variance is 0"
            raise config_error(("training", "local_batch_size"), f"{reason}; {self._remedy()}")

    def _report(self) -> None:
        few = {path: count for path, count in self._counts.items() if count < _FEW_VALUES}
        if few and self._warns:
            worst = min(few, key=lambda path: few[path])
            _log.warning(
                "batchnorm statistics: %s with fewer than %d values per channel and microbatch "
                "(fewest: %s, %d values), so the statistics are mostly noise; %s",
                *(counted(len(few), "layer"), _FEW_VALUES, worst, few[worst], self._remedy()),
            )

    def _remedy(self) -> str:
        larger = "increase training.local_batch_size"
        return larger if self._group else f'{larger}, or with several ranks set batchnorm.statistics = "synchronized"'


@dataclass(frozen=True)
class Divergence:
    """Largest distance of a rank's running statistics from the pooled statistics, over all channels and ranks."""

    mean: float
    """Largest distance of a rank's running mean from the pooled mean, in pooled standard deviations."""

    variance: float
    """Largest distance of a rank's running variance from the pooled variance, as a fraction of the pooled variance."""


def largest_divergence(of_stages: Iterable[Divergence | None]) -> Divergence | None:
    """Return the largest divergence over pipeline stages; None if no stage has pooled running statistics."""
    found = [divergence for divergence in of_stages if divergence is not None]
    return Divergence(max(d.mean for d in found), max(d.variance for d in found)) if found else None


class RunningStatistics:
    """The running statistics of a model's BatchNorm and InstanceNorm layers on this rank, and one copy of them. Only
    the statistics of BatchNorm layers are pooled.

    The copy has two uses. A training step saves the statistics at its beginning, and restores them if the step is
    skipped or fails. A checkpoint outside of the regular steps, after a time interval or a signal, pools the statistics
    temporarily: `pool(temporarily=True)` saves this rank's statistics, `state_dict` returns the saved values, and
    `unpool` restores them.

    The copy is one flat tensor of bytes for buffers of all dtypes. So the number of kernels does not grow with the
    depth of the model. Activation checkpointing does not use this class (see `activation_checkpoint._Forward`).
    """

    def __init__(self, model: nn.Module):
        """Save the statistics. From now on the buffers of the norms may be written to, but must not be replaced."""
        norms = {path: module for path, module in model.named_modules() if isinstance(module, _NormBase)}
        for norm in norms.values():
            norm._buffers.update({name: b.contiguous() for name, b in norm._buffers.items() if b is not None})
        self._tracking = [norm for _, norm in _batch_norms(model) if norm.running_mean is not None]
        self._buffers = {
            f"{path}.{name}": b for path, norm in norms.items() for name, b in norm.named_buffers(recurse=False)
        }
        self._bytes = [buffer.view(-1).view(torch.uint8) for buffer in self._buffers.values()]
        self._sizes = [buffer.numel() for buffer in self._bytes]
        self._is_pooled_temporarily = False
        self.saved = torch.cat(self._bytes) if self._bytes else torch.empty(0, dtype=torch.uint8)
        """The copy: the concatenated bytes of all buffers."""

    @property
    def saved_bytes(self) -> dict[str, int]:
        """Number of bytes of each buffer in the copy, by full name."""
        return dict(zip(self._buffers, self._sizes, strict=True))

    @torch.no_grad()
    def save(self) -> None:
        """Save the values of the buffers in the copy."""
        if self._bytes:
            torch.cat(self._bytes, out=self.saved)

    @torch.no_grad()
    def restore_if(self, flag: Tensor) -> None:
        """Restore the buffers if `flag`, a scalar on the device, is not 0. The host does not wait for the device."""
        if self._bytes:
            self._write(torch.where(flag != 0, self.saved, torch.cat(self._bytes)))

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the buffers from the copy."""
        self._write(self.saved)

    def _write(self, values: Tensor) -> None:
        if self._bytes:
            torch._foreach_copy_(self._bytes, values.split(self._sizes))

    @torch.no_grad()
    def pool(self, group: dist.ProcessGroup | None = None, temporarily: bool = False) -> Divergence | None:
        """Replace every rank's running statistics by pooled statistics. Return the divergence of the ranks before
        pooling.

        With local statistics each rank normalizes over its own microbatches. The running statistics then drift apart,
        while the parameters stay equal. The pooled mean is the mean of the ranks' means. The pooled variance is the
        mean of their variances plus the variance of their means (law of total variance). On a single rank, or without
        running statistics, nothing is pooled, and None is returned.

        `group`: the ranks with the same parameters and different data; None stands for all ranks. `temporarily`:
        `unpool` will undo the pooling. Collective over `group`; the host waits for the device.
        """
        if temporarily:
            self.save()
            self._is_pooled_temporarily = True
        if not self._tracking or dist.get_world_size(group) == 1:
            return None
        means, variances = (
            torch.cat([getattr(norm, name).double() for norm in self._tracking])
            for name in ("running_mean", "running_var")
        )
        mean = _average(means, group)
        variance = _average(variances + (means - mean).square(), group)
        spread = variance.clamp(min=torch.finfo(variance.dtype).tiny)  # not 0, because 0 / 0 is NaN
        apart = torch.stack(
            [((means - mean).abs() / spread.sqrt()).max(), ((variances - variance).abs() / spread).max()]
        )
        dist.all_reduce(apart, op=dist.ReduceOp.MAX, group=group)
        _scatter(self._tracking, "running_mean", mean)
        _scatter(self._tracking, "running_var", variance)
        return Divergence(*apart.tolist())

    def unpool(self) -> None:
        """Restore this rank's own statistics if they were pooled temporarily; otherwise do nothing."""
        if self._is_pooled_temporarily:
            self.restore()
        self._is_pooled_temporarily = False

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's saved statistics by full name if they are pooled temporarily, else an empty dict."""
        if not self._is_pooled_temporarily:
            return {}
        own = zip(self._buffers.items(), self.saved.split(self._sizes), strict=True)
        # A clone is aligned for every dtype; a slice of the copy may not be.
        return {name: values.clone().view(buffer.dtype).view(buffer.shape) for (name, buffer), values in own}

    def targets(self) -> dict[str, Tensor]:
        """Return uninitialized tensors like the buffers, by full name. A checkpoint is loaded into them."""
        return {name: torch.empty_like(buffer) for name, buffer in self._buffers.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy the values of `state` into the buffers."""
        for name, value in state.items():
            self._buffers[name].copy_(value)


def _average(values: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = values.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def _scatter(norms: list[_BatchNorm], name: str, values: Tensor) -> None:
    for norm, part in zip(norms, values.split([norm.num_features for norm in norms]), strict=True):
        getattr(norm, name).copy_(part)
