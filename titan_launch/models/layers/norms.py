"""Normalization layers of language models: from (batch, tokens, dim) to the same shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan_launch.config.architectures.llama3 import NormKind


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel over all tokens of the microbatch; in evaluation, by the running statistics.

    A bf16 input with fp32 parameters and statistics needs no cast: the kernels compute in fp32, and the output has the
    input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape; training needs at least two tokens."""
        normalized = super().forward(x.reshape(-1, x.shape[-1]))
        # FSDP2 warns of outputs that are views to autograd, because an in-place operation on them drops FSDP2's hooks.
        # `_unsafe_view` is no view to autograd, costs nothing, and is what `nn.Linear` uses.
        return torch.ops.aten._unsafe_view(normalized, x.shape)


class RMSNorm(nn.RMSNorm):
    """Division of each token's channels by their root mean square (arXiv:1910.07467).

    On a CPU the norm is several operations, and each contributes to the gradient of the input. `view_as` makes autograd
    add these contributions before that of the residual connection, as if the norm were an FSDP2 unit. So the gradient
    has the same bits in both cases.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape."""
        return super().forward(x.view_as(x))


def build_norm(kind: NormKind, dim: int, eps: float, momentum: float) -> nn.Module:
    """Return a norm over `dim` channels. `momentum`: weight of a microbatch in BatchNorm's running statistics."""
    if kind == "batchnorm":
        return BatchNorm(dim, eps=eps, momentum=momentum)
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps=eps)
    return RMSNorm(dim, eps=eps)
