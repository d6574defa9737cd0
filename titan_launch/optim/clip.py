"""The norm of the gradient, and clipping to it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients down together, in place, so that their norm is at most `max_norm`; 0 leaves them alone.

    Returns the norm before, over all shards: a plain scalar, the same on all ranks that share the shards. Waits for
    nothing on the host; a norm that is not finite makes the gradients NaN, and the caller must leave the step out.
    """
    parameters = list(parameters)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return torch.zeros((), device=parameters[0].device if parameters else None)
    norm = get_total_norm(gradients)
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm > 0:
        clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
