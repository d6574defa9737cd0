"""Layers that language models share: attention with rotary position embedding, norms, and the feed-forward layer."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.config.architectures.llama3 import NormKind, RopeScaling


class RotaryEmbedding(nn.Module):
    """Rotates each pair of neighbouring channels of a head by an angle proportional to the token's position.

    All layers share one instance. The table of angles is a buffer, not an argument: FSDP2 casts every floating argument
    of a wrapped module to the compute dtype, and bf16 cannot distinguish position 8000 from 8001. Checkpoints do not
    contain the table. `reset_parameters` computes it for a model that was built on the meta device.
    """

    table: Tensor
    """Cosine and sine of each angle: (max_seq_len, head_dim / 2, 2)."""

    def __init__(self, head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None = None):
        """Compute the table. `head_dim` must be even; `theta` is the base of the frequencies."""
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        table = torch.empty((max_seq_len, head_dim // 2, 2), dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table in fp32, as the published models do."""
        frequencies = rotary_frequencies(self.head_dim, self.theta, self.scaling, self.table.device)
        positions = torch.arange(self.table.shape[0], dtype=torch.float32, device=self.table.device)
        angles = torch.outer(positions, frequencies)
        self.table.copy_(torch.stack((angles.cos(), angles.sin()), dim=-1))

    def forward(self, x: Tensor) -> Tensor:
        """Rotate (batch, tokens, heads, head_dim) in fp32; the result has the input's dtype.

        Raise ValueError for more tokens than the table has.
        """
        num_tokens, max_tokens = x.shape[1], self.table.shape[0]
        if num_tokens > max_tokens:
            raise ValueError(f"{num_tokens} tokens, but the rotary table has {max_tokens} (training.seq_len)")
        table = self.table[:num_tokens, None].float()  # [tokens, 1, head_dim / 2, 2]
        pairs = x.float().unflatten(-1, (-1, 2))
        rotated = _rotated_by_parts(pairs, table) if torch.compiler.is_compiling() else _rotated(pairs, table)
        return rotated.flatten(-2).to(x.dtype)


def _rotated(pairs: Tensor, table: Tensor) -> Tensor:
    """Return the rotated pairs, by one product of complex numbers.

    In eager mode this needs a seventh of the kernels of `_rotated_by_parts`, and these are vectorized on a CPU.
    """
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))


def _rotated_by_parts(pairs: Tensor, table: Tensor) -> Tensor:
    """Return the rotated pairs, by real products. Inductor fuses these, but cannot compile complex numbers."""
    (first, second), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the angle per token of each channel pair in radians, [head_dim / 2]: theta^(-2 i / head_dim).

    With `scaling`, as in Llama 3.1, the frequencies of slow pairs are divided by `factor`, and those of fast pairs are
    unchanged. In between, the scale is interpolated linearly in the number of turns within the original context
    (Meta's `apply_scaling` in `llama-models`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled = unscaled.clamp(0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head (arXiv:2305.13245)."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rope: RotaryEmbedding):
        """Create the layers. `dim` must be a multiple of `n_heads`, and `n_heads` a multiple of `n_kv_heads`."""
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        # [batch, tokens, heads, head_dim]; the number of heads follows from the weights
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        q, k = self.rope(q), self.rope(k)
        attended = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(attended.transpose(1, 2).flatten(-2))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return causal attention of `q` (batch, heads, tokens, head_dim), in its shape. `k`, `v` may have fewer heads."""
    num_groups = q.shape[1] // k.shape[1]
    if num_groups > 1 and takes_equal_heads_only(q):
        k, v = (t.repeat_interleave(num_groups, dim=1) for t in (k, v))
        num_groups = 1
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_groups > 1)


def takes_equal_heads_only(q: Tensor) -> bool:
    """Return True for fp32 on CUDA: the fused kernel requires as many heads of keys and values as of queries.

    With `enable_gqa`, PyTorch would use the kernel that stores all tokens x tokens scores. Once a release contains
    https://github.com/pytorch/pytorch/pull/191085, this function is unnecessary.
    """
    return q.is_cuda and q.dtype == torch.float32


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel over all tokens of the microbatch. Evaluation uses the running statistics.

    The input may be bf16 while parameters and statistics are fp32. The kernels then compute in fp32, and the output is
    bf16.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape; training needs at least two tokens."""
        normalized = super().forward(x.reshape(-1, x.shape[-1]))
        # FSDP2 warns if an output is a view for autograd, because an in-place operation on it would drop FSDP2's hooks.
        # For autograd, the result of `_unsafe_view` is not a view. It copies nothing. `nn.Linear` uses it too.
        return torch.ops.aten._unsafe_view(normalized, x.shape)


class RMSNorm(nn.RMSNorm):
    """Division of each token's channels by their root mean square (arXiv:1910.07467).

    On a CPU the norm consists of several operations, and each contributes to the input's gradient. `view_as` makes
    autograd add these contributions before the gradient of the residual connection. The order is then the same as for
    a norm that is its own FSDP2 unit, so the gradient is bitwise equal in both cases.
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


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape."""
        return self.w2(F.silu(self.w1(x)) * self.w3(x))
