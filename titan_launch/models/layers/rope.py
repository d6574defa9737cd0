"""Rotary position embedding (arXiv:2104.09864), with Llama 3.1's frequency scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from titan_launch.config.architectures.llama3 import RopeScaling


class RotaryEmbedding(nn.Module):
    """Rotates each pair of neighbouring channels of a head by an angle proportional to the token's position.

    One instance serves all layers. The tables are buffers, not arguments: FSDP2 casts every floating argument of a
    wrapped module to the compute dtype, and bf16 cannot tell position 8000 from 8001. They are not saved, and
    `reset_parameters` computes them anew after a start on the meta device.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None = None):
        """`head_dim` is even; `theta` is the base of the frequencies."""
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        shape = (max_seq_len, head_dim // 2)
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables, in fp32 as when the published models were trained."""
        frequencies = rotary_frequencies(self.head_dim, self.theta, self.scaling, self.cos.device)
        positions = torch.arange(self.cos.shape[0], dtype=torch.float32, device=self.cos.device)
        angles = torch.outer(positions, frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    def forward(self, x: Tensor) -> Tensor:
        """Rotate (batch, tokens, heads, head_dim), in fp32; the result has the input's dtype.

        Raises ValueError for more tokens than the tables hold.
        """
        num_tokens = x.shape[1]
        if num_tokens > self.cos.shape[0]:
            raise ValueError(f"{num_tokens} tokens, but the rotary tables hold {self.cos.shape[0]} (training.seq_len)")
        cos, sin = self.cos[:num_tokens, None], self.sin[:num_tokens, None]  # [tokens, 1, head_dim / 2]
        first, second = x.float().unflatten(-1, (-1, 2)).unbind(-1)
        rotated = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)
        return rotated.flatten(-2).to(x.dtype)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Radians per token of each channel pair, [head_dim / 2]: theta^(-2 i / head_dim), scaled where asked.

    Llama 3.1 divides the frequency of a slow pair by `factor`, leaves that of a fast one, and interpolates linearly
    between, by how many of its turns fit into the original context (Meta's `apply_scaling` in `llama-models`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return frequencies * (kept + (1 - kept) / scaling.factor)
