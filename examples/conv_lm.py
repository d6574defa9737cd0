"""A user's own model: any function that returns an `nn.Module`. See configs/custom_model.toml.

The launcher calls `build` on the host of each rank, seeded by `training.seed`, shards the module, and keeps its values.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class CausalBlock(nn.Module):
    """A gated causal convolution, added to the residual stream."""

    def __init__(self, dim: int, kernel_size: int):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.conv = nn.Conv1d(dim, 2 * dim, kernel_size, bias=False)
        self.look_back = kernel_size - 1

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        channels_first = F.pad(self.norm(x).transpose(1, 2), (self.look_back, 0))
        return x + F.glu(self.conv(channels_first), dim=1).transpose(1, 2)


class ConvLM(nn.Module):
    """A convolutional language model over bytes."""

    def __init__(self, vocab_size: int, dim: int, n_layers: int, kernel_size: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(CausalBlock(dim, kernel_size) for _ in range(n_layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, tokens) to logits (batch, tokens, vocab_size)."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(vocab_size: int = 257, dim: int = 128, n_layers: int = 4, kernel_size: int = 8) -> nn.Module:
    """Return the model; `[model] name = "examples.conv_lm:build"` calls this with `[model.args]` as its arguments."""
    return ConvLM(vocab_size, dim, n_layers, kernel_size)
