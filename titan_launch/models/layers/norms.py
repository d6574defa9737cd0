"""Normalization layers: (batch, tokens, dim) to the same shape."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan_launch.config.architectures.llama3 import NormKind


class BatchNorm(nn.BatchNorm1d):
    """Normalizes each channel over all tokens of the microbatch, and with running statistics in evaluation.

    Takes bf16 input with fp32 parameters and statistics as it is: the kernels compute in fp32, and the output has the
    input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to the same shape; at least two tokens in training."""
        normalized = super().forward(x.reshape(-1, x.shape[-1]))
        # A plain `view` would be one to autograd as well, and FSDP2 warns of those as outputs: an in-place operation
        # on them drops its hooks. This is how `nn.Linear` folds its result back, for the same cost: none.
        return torch.ops.aten._unsafe_view(normalized, x.shape)


class RMSNorm(nn.RMSNorm):
    """Divides each token's channels by their root mean square (arXiv:1910.07467).

    On a CPU that is several operations, each with a share in the gradient of the input. They add up here before they
    meet the residual stream's, as they do where the norm is an FSDP2 unit: the sum has the same bits in both.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to the same shape."""
        return super().forward(x.view_as(x))


def build_norm(kind: NormKind, dim: int, eps: float, momentum: float) -> nn.Module:
    """A norm over `dim` channels. `momentum` is the weight of a microbatch in BatchNorm's running statistics."""
    if kind == "batchnorm":
        return BatchNorm(dim, eps=eps, momentum=momentum)
    if kind == "layernorm":
        return nn.LayerNorm(dim, eps=eps)
    return RMSNorm(dim, eps=eps)
