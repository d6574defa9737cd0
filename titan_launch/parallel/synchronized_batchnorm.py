"""BatchNorm whose statistics are computed over the batches of all data-parallel ranks.

PyTorch's SyncBatchNorm refuses CPU tensors, and its conversion replaces a user's subclass by a plain layer. Here the
class of a layer is replaced by a subclass of that class. In the MRO of the subclass, `_Synchronized` comes just before
PyTorch's `_BatchNorm`. So a user's `forward` that calls `super().forward` still runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from titan_launch.distributed.collectives import all_reduced


def synchronize(norms: list[_BatchNorm], group: dist.ProcessGroup) -> None:
    """Change layers in place: in training they normalize over the batches of all ranks of `group`.

    Every rank must run the same layers in the same order. Batches may have any size, also 0. This call itself is not
    collective.
    """
    classes: dict[type, type] = {}
    shared = {"ranks": group.size(), "group_name": group.group_name}
    for norm in norms:
        cls = type(norm)
        if cls not in classes:
            names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **shared}
            classes[cls] = type(cls.__name__, (cls, _Synchronized), names)
        norm.__class__ = classes[cls]


def overrides_forward(module: nn.Module) -> bool:
    """Return True if a class in the MRO before `_BatchNorm` has a `forward` that does not call `super().forward`. The
    call is assumed if the code of `forward` has the names `super` and `forward`."""
    mro = type(module).__mro__
    between = mro[: mro.index(_BatchNorm)]
    return any("forward" in vars(cls) and not _calls_super(vars(cls)["forward"]) for cls in between)


def _calls_super(forward: Any) -> bool:
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"super", "forward"} <= set(code.co_names)


class _Synchronized(_BatchNorm):
    """Base class inserted between a layer's class and PyTorch's `_BatchNorm`."""

    ranks: int
    group_name: str

    def forward(self, input: Tensor) -> Tensor:
        """Normalize an input of shape (N, C, ...). The output has the same shape and dtype. In training, the statistics
        cover the batches of all ranks, in fp32 (fp64 for an fp64 input). Collective in training. In evaluation,
        PyTorch's forward runs."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        mean, variance, count = self._batch_statistics(input.detach())
        if self.track_running_stats:
            self._track(mean, variance, count)
        return _Normalize.apply(input, self.weight, self.bias, mean, variance, count, self.eps, self.group_name)

    def _batch_statistics(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean and the biased variance over all ranks, both [C], and the number of values per channel, [1].
        Collective.

        Each rank sums squared deviations from its own mean. The sums are then combined (Chan, Golub, LeVeque 1979).
        Unlike E[x^2] - E[x]^2, this method does not subtract large numbers.
        """
        gathered = _all_gather(_summary(x), self.ranks, self.group_name)
        counts, means, sums = gathered[:, :1], *gathered[:, 1:].chunk(2, dim=1)
        count = counts.sum(0).clamp(min=1)
        mean = (means * (counts / count)).sum(0)
        variance = (sums + counts * (means - mean).square()).sum(0) / count
        return mean, variance, count

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Update the running statistics as `_BatchNorm.forward` does; the running variance is unbiased."""
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1 / self.num_batches_tracked if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.copy_(running + (new - running) * momentum)


def _summary(x: Tensor) -> Tensor:
    """Return a tensor of shape [1, 1 + 2 C]: the number of values per channel, C means, and C sums of squared
    deviations. For an empty batch, all are 0."""
    x = _accurate(x)
    channels = x.shape[1]
    count = x.numel() // channels
    if count == 0:
        return x.new_zeros(1, 1 + 2 * channels)
    mean = x.mean(_other_axes(x))
    deviations = x - mean.view(_along_channels(x))  # torch.var_mean takes ten times as long on CPUs
    squares = deviations.square_().sum(_other_axes(x))
    return torch.cat([x.new_full((1,), count), mean, squares]).unsqueeze(0)


class _Normalize(torch.autograd.Function):
    """Normalization by the statistics of all ranks' batches. The gradient of the input includes the path through the
    statistics."""

    @staticmethod
    def forward(  # noqa: PLR0913 - autograd sees only tensors that are arguments themselves
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        eps: float,
        group_name: str,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.group_name = group_name
        scale, shift = (None if p is None else p.to(mean.dtype) for p in (weight, bias))
        return F.batch_norm(x, mean, variance, scale, shift, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, inverse_std, count = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        shape = _along_channels(x)
        normalized = (_accurate(x) - mean.view(shape)) * inverse_std.view(shape)
        grad = _accurate(grad)
        sums = torch.stack([grad.sum(_other_axes(x)), (grad * normalized).sum(_other_axes(x))])
        grad_x = None
        if needs_x:
            along_mean, along_std = all_reduced(sums, ctx.group_name) / count
            scale = inverse_std if weight is None else inverse_std * weight
            centred = (grad - along_mean.view(shape)).sub_(normalized.mul_(along_std.view(shape)))
            grad_x = centred.mul_(scale.view(shape)).to(x.dtype)
        # The gradients of the parameters come from this rank's batch only, because FSDP2 sums them over the ranks.
        grad_weight = sums[1].to(weight.dtype) if needs_weight else None
        grad_bias = sums[0].to(weight.dtype) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None, None


def _accurate(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _along_channels(x: Tensor) -> list[int]:
    """Return the shape [1, C, 1, ...] in which a vector of C values broadcasts against `x`."""
    return [1, -1, *[1] * (x.ndim - 2)]


def _other_axes(x: Tensor) -> list[int]:
    """Return the indices of all dimensions of `x` except the channel dimension."""
    return [0, *range(2, x.ndim)]


def _all_gather(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Gather a tensor of shape [1, n] from every rank into one of shape [ranks, n], with a functional collective (see
    `all_reduced`)."""
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, ranks, group_name)
    return torch.ops._c10d_functional.wait_tensor(gathered)
