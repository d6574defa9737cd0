"""Causal grouped-query attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.models.layers.rope import RotaryEmbedding


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head (arXiv:2305.13245)."""

    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rope: RotaryEmbedding):
        """`dim` is a multiple of `n_heads`, which is a multiple of `n_kv_heads`."""
        super().__init__()
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, dim) to the same shape."""
        # [batch, tokens, heads, head_dim]; the number of heads follows from the weights
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.wq, self.wk, self.wv))
        q, k = self.rope(q), self.rope(k)
        attended = causal_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.wo(attended.transpose(1, 2).flatten(-2))


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of (batch, heads, tokens, head_dim) over keys and values with the same or a smaller number of heads."""
    num_groups = q.shape[1] // k.shape[1]
    if num_groups > 1 and takes_equal_heads_only(q):
        k, v = (t.repeat_interleave(num_groups, dim=1) for t in (k, v))
        num_groups = 1
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=num_groups > 1)


def takes_equal_heads_only(q: Tensor) -> bool:
    """Whether keys and values must be repeated: the fused fp32 kernel on CUDA takes as many heads as there are queries.

    `enable_gqa` would fall back to the one that stores all tokens x tokens scores. Not needed with
    https://github.com/pytorch/pytorch/pull/191085.
    """
    return q.is_cuda and q.dtype == torch.float32
