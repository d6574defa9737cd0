"""A user's transformer that declares its tensor-parallel and context-parallel plans."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DIM, HEADS, WIDTH, CLASSES, MAX_TOKENS = 24, 4, 6, 64, 32


class Attention(nn.Module):
    """Causal attention with biases, normalized queries and keys in every head, and positions added to both."""

    def __init__(self, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = nn.Dropout(dropout)
        self.qkv = nn.ModuleList(nn.Linear(DIM, HEADS * WIDTH) for _ in range(3))
        self.q_norm = nn.LayerNorm(WIDTH)
        self.k_norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(HEADS * WIDTH, DIM)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Map (batch, tokens, features) to the same shape."""
        q, k, v = (project(x).unflatten(-1, (self.heads, WIDTH)) for project in self.qkv)
        own = positions[: q.shape[1], None]
        q, k = self.q_norm(q) + own, self.k_norm(k) + own
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.out(self.dropout(y.transpose(1, 2).flatten(-2)))


class Model(nn.Module):
    """A model with one block, a table of positions, and an output that is tied to the embedding. `heads` is the number
    of heads of a rank; -1 derives it from the shape."""

    positions: Tensor

    def __init__(
        self, norm: str = "LayerNorm", plan: dict[str, Any] | None = None, heads: int = -1, dropout: float = 0.0
    ) -> None:
        super().__init__()
        kind = {"LayerNorm": nn.LayerNorm, "TokenBatchNorm": TokenBatchNorm}[norm]
        self.embedding = nn.Embedding(CLASSES, DIM)
        self.norm = kind(DIM)
        self.attention = Attention(heads, dropout)
        self.dropout = nn.Dropout(dropout)
        self.last_norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, CLASSES, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(MAX_TOKENS).unsqueeze(-1) / MAX_TOKENS, persistent=False)
        self.tensor_parallel = PLAN if plan is None else plan
        self.context_parallel = {"positions": 0}

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids to logits."""
        x = self.dropout(self.embedding(tokens))
        y = self.attention(self.norm(x), self.positions)
        return self.output(self.last_norm(x + y))


class TokenBatchNorm(nn.BatchNorm1d):
    """A BatchNorm over all tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """(batch, tokens, features) to the same."""
        return super().forward(x.flatten(0, 1)).view_as(x)


PLAN = {
    "embedding": "embedding",
    "*norm": "sequence",
    "attention": "input",
    "attention.*_norm": "heads",
    "attention.qkv.*": "colwise",
    "attention.out": "rowwise",
    "output": "head",
}
