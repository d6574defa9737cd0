"""A user's models, for the tests of traces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

UNFIT: dict[str, Callable[[Tensor, Tensor], object]] = {
    "item": lambda tokens, x: x * tokens.max().item(),
    "numpy": lambda tokens, x: tokens.numpy(),
    "condition": lambda tokens, x: 1 if tokens.sum() > 3 else 0,
    "nonzero": lambda tokens, x: torch.nonzero(tokens),
    "mask": lambda tokens, x: x[tokens > 3],
    "unsupported": lambda tokens, x: torch.ops.titan_tests.without_fake(x.detach()),
    "shape": lambda tokens, x: x @ torch.zeros(3, 3),
}
"""Forward passes that a trace cannot run. The last one is wrong everywhere."""


class Chain(nn.Module):
    """A model with an embedding, linear layers, and a head."""

    def __init__(
        self,
        n_layers: int,
        does: str | None = None,
        counts: bool = False,
        dense: str | None = None,
        twice: bool = False,
    ):
        """Set what the forward does. `counts`: it reads its number of layers. `dense`: every layer reads the `outputs`
        of all earlier ones, or only their `values`, without gradients. `twice`: every layer runs two times."""
        super().__init__()
        self.embedding = nn.Embedding(61, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(n_layers))
        self.head = nn.Linear(8, 61)
        self.n_layers, self.does, self.counts, self.dense, self.twice = n_layers, does, counts, dense, twice

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.does is not None:
            UNFIT[self.does](tokens, x)
        before = [x.detach() if self.dense == "values" else x]
        for layer in [self.layers[i] for i in range(self.n_layers)] if self.counts else self.layers:
            if self.dense is not None:
                x = (x * torch.stack(before)).tanh().sum(0)
            x = torch.tanh(layer(x))
            x = torch.tanh(layer(x)) if self.twice else x
            before.append(x.detach() if self.dense == "values" else x)
        return self.head(x)


class Saving(nn.Module):
    """Layers of two kinds, by letters: those of kind `b` save their output, which the next layer then need not save."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.ReLU()) if kind == "b" else nn.Linear(16, 16)
            for kind in kinds
        )
        self.output = nn.Linear(16, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.output(x)
        return logits
