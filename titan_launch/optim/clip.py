"""Gradient norm and clipping. Each rank computes with its shards, and the ranks exchange only scalars.
`torch.nn.utils.clip_grad_norm_` gives the same result, but it dispatches several operations for every DTensor."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from titan_launch.config.optimizers import alike
from titan_launch.distributed.dtensor import local_tensor


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float, *others: dist.ProcessGroup | None) -> Tensor:
    """Clip gradients in place to a total norm of at most `max_norm`. If `max_norm` is 0, do not change them.

    Return the norm before clipping, over all shards, as a scalar tensor that is equal on all ranks. The norm is 0 if no
    parameter of any rank has a gradient. `others`: further process groups over which the squared norm is summed: the
    group of the pipeline stages, or of the replicas of a sharded optimizer. None in `others` is ignored.

    The gradients are all DTensors, or all plain tensors. With expert parallelism, the DTensors are on two meshes of the
    same ranks.

    Collective over the ranks that share the shards, and over `others`. The host does not wait for the device. If the
    norm is not finite and `max_norm` is not 0, the gradients become 0 or NaN, and the caller must skip the step.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        norm = _norm_over_shards(gradients)
    else:
        norm = torch.zeros((), device=parameters[0].device if parameters else None)
    groups = [group for group in others if group is not None]
    if groups:
        square = norm.double().square()
        for group in groups:
            dist.all_reduce(square, group=group)
        norm = square.sqrt().to(norm.dtype)
    if max_norm > 0:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # never divides by 0, as in `clip_grad_norm_` of PyTorch
        for same in alike(map(local_tensor, gradients), lambda gradient: gradient.dtype):
            torch._foreach_mul_(same, factor)  # one kernel for each dtype
    return norm


def _norm_over_shards(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients over all ranks: in float32 or float64 for DTensors, and in their own dtype for plain
    tensors.

    The dtype for DTensors is at least float32, because pipeline stages with gradients of different dtypes must agree on
    the norm. Squares of DTensors' norms are added in float64, because the squares of large norms overflow float32.
    """
    if not isinstance(gradients[0], DTensor):
        return get_total_norm(gradients)
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    assert len(sharded) == len(gradients), "either all parameters are DTensors, or none"
    squares = [_square_on_mesh(same[0].device_mesh, same) for same in alike(sharded, lambda each: each.device_mesh)]
    dtype = functools.reduce(torch.promote_types, {gradient.dtype for gradient in gradients}, torch.float32)
    return torch.stack(squares).sum().sqrt().to(dtype)


def _square_on_mesh(mesh: DeviceMesh, gradients: Sequence[DTensor]) -> Tensor:
    """Return the square of the norm of gradients on one mesh, over all ranks of the mesh, in float64."""
    by_placements = alike(gradients, lambda gradient: gradient.placements)
    norms = {same[0].placements: get_total_norm([*map(local_tensor, same)]) for same in by_placements}
    divided = {where: [not placement.is_replicate() for placement in where] for where in norms}
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and any(axes[axis] for axes in divided.values())]
    squares = []
    for where, norm in norms.items():
        copies = math.prod(mesh.size(axis) for axis in axes if not divided[where][axis])
        squares.append(norm.double().square() / copies)  # the all-reduce adds the squares of all copies
    square = torch.stack(squares).sum()
    for axis in axes:
        dist.all_reduce(square, group=mesh.get_group(axis))
    return square
