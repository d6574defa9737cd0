"""The norm of the gradient, and clipping to it: on this rank's shards, with one number exchanged.

`torch.nn.utils.clip_grad_norm_` gives the same, but dispatches several operations for every DTensor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.nn.utils import get_total_norm

from titan_launch.distributed.dtensor import local_tensor

_SMALLEST = 1e-6
"""Added to a norm that is divided by, as PyTorch does."""


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale all gradients down together, in place, so that their norm is at most `max_norm`; 0 leaves them alone.

    Returns the norm before, over all shards: a plain scalar, the same on all ranks that share the shards; collective
    over them. DTensors are all on one mesh. `pipeline`: the ranks that have other parameters of the same model, whose
    gradients count too; collective over it. Waits for nothing on the host; a norm that is not finite makes the
    gradients NaN, and the caller must leave the step out.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = (
        _norm_over_shards(gradients)
        if gradients
        else torch.zeros((), device=parameters[0].device if parameters else None)
    )
    if pipeline is not None:
        square = norm.double().square()
        dist.all_reduce(square, group=pipeline)
        norm = square.sqrt().to(norm.dtype)
    if max_norm > 0:
        factor = (max_norm / (norm + _SMALLEST)).clamp(max=1.0)
        for alike in _by_dtype(map(local_tensor, gradients)):
            torch._foreach_mul_(alike, factor)
    return norm


def _norm_over_shards(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of gradients of which this rank has shards, in float32 or more.

    Pipeline stages, whose gradients may have different dtypes, must agree on the norm. Squares are added in float64,
    because the squares of large norms overflow float32.
    """
    if not isinstance(gradients[0], DTensor):
        return get_total_norm(gradients)
    mesh = gradients[0].device_mesh
    norms = {where: get_total_norm(tensors) for where, tensors in _by_placements(gradients).items()}
    divided = {where: [not placement.is_replicate() for placement in where] for where in norms}
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and any(axes[axis] for axes in divided.values())]
    squares = []
    for where, norm in norms.items():
        copies = math.prod(mesh.size(axis) for axis in axes if not divided[where][axis])
        squares.append(norm.double().square() / copies)  # every copy is added
    square = torch.stack(squares).sum()
    for axis in axes:
        dist.all_reduce(square, group=mesh.get_group(axis))
    return square.sqrt().to(torch.promote_types(next(iter(norms.values())).dtype, torch.float32))


def _by_placements(gradients: Sequence[Tensor]) -> Mapping[tuple[Placement, ...], list[Tensor]]:
    """Yield this rank's shards of DTensors, grouped by mesh and placements."""
    parts: defaultdict[tuple[Placement, ...], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        assert isinstance(gradient, DTensor), "parameters are DTensors, all or none"
        parts[gradient.placements].append(local_tensor(gradient))
    return parts


def _by_dtype(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Return the tensors in groups that one kernel can process."""
    alike: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.dtype].append(tensor)
    return alike.values()
