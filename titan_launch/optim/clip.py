"""The norm of the gradient, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm(
    parameters: Iterable[nn.Parameter], max_norm: float, pipeline: dist.ProcessGroup | None = None
) -> Tensor:
    """Scale all gradients down together, in place, so that their norm is at most `max_norm`; 0 leaves them alone.

    Returns the norm before, over all shards: a plain scalar, the same on all ranks that share the shards. `pipeline`:
    the ranks that have other parameters of the same model, whose gradients count too; collective over it. Waits for
    nothing on the host; a norm that is not finite makes the gradients NaN, and the caller must leave the step out.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = (
        get_total_norm(gradients) if gradients else torch.zeros((), device=parameters[0].device if parameters else None)
    )
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pipeline is not None:
        norm = _over_stages(norm, pipeline)
    if max_norm > 0 and gradients:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _over_stages(norm: Tensor, pipeline: dist.ProcessGroup) -> Tensor:
    """The norm of what several ranks have parts of; in float64, since squares of large norms overflow float32."""
    square = norm.double().square()
    dist.all_reduce(square, group=pipeline)
    return square.sqrt().to(norm.dtype)
