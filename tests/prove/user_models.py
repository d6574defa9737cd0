"""User models with and without bugs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, DIM = 64, 24


class Mixer(nn.Module):
    """A block with a residual stream: one matrix from the mean of earlier tokens, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        past = y.cumsum(1) / torch.arange(1, y.shape[1] + 1)[:, None]
        return x + self.down(F.gelu(self.up(past)))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.norm(x))


class Model(nn.Module):
    """A language model of mixers, with plans for tensor parallelism and pipelines."""

    def __init__(self, mixer: type[nn.Module] = Mixer, plan: dict[str, str] | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, DIM)
        self.blocks = nn.ModuleList(mixer() for _ in range(4))
        self.head = Head()
        self.pipeline_order = ("embedding", "blocks.*", "head")
        self.tensor_parallel = PLAN if plan is None else plan

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = {
    "embedding": "embedding",
    "blocks.*.norm": "sequence",
    "blocks.*.up": "input",
    "blocks.*.down": "sequence",
    "head.norm": "sequence",
    "head.output": "head",
}


def correct() -> nn.Module:
    return Model()


class Steep(Mixer):
    """A rounding of its input changes its output as if the input were another one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.1 * torch.sin(1e8 * x.detach()))


def chaotic() -> nn.Module:
    return Model(Steep)


# Bugs


class OverTheBatch(Mixer):
    """Subtracts the mean over the samples of the microbatch."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0, keepdim=True))


class ScaledByRanks(Mixer):
    """Divides the gradient of a weight by the number of ranks, as code of plain data parallelism does."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad and dist.get_world_size() > 1:
            x = Scale.apply(x, 1 / dist.get_world_size())
        return super().forward(x)


class Scale(torch.autograd.Function):
    """The input; its gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class CountsCalls(Mixer):
    """Scales by a number of calls, which the second forward of activation checkpointing changes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x * (1 + 0.1 * (self.calls % 2)))


class Random(Mixer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0.01 * torch.randn(x.shape))


class Unused(Mixer):
    """Has a bias that has no effect."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + 0 * self.shift)


class Decayed(Mixer):
    """Has a weight whose only gradient is that of a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return _Penalty.apply(super().forward(x), self.shift)


class _Penalty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.saved_tensors[0] * 1e-2


class Remembers(Mixer):
    """Adds the mean of the microbatch before, which other microbatches have than one batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x + self.last)
        self.last = x.detach().mean((0, 1))
        return y


def over_the_batch() -> nn.Module:
    return Model(OverTheBatch)


def scaled_by_ranks() -> nn.Module:
    return Model(ScaledByRanks)


def counts_calls() -> nn.Module:
    return Model(CountsCalls)


def random() -> nn.Module:
    return Model(Random)


def unused() -> nn.Module:
    return Model(Unused)


def decayed() -> nn.Module:
    return Model(Decayed)


def remembers() -> nn.Module:
    return Model(Remembers)


def mixes_tokens() -> nn.Module:
    """Return a model whose plan says that the mixers work per token: each rank sums its own tokens only."""
    plan = {"embedding": "embedding", "blocks.*.*": "sequence", "head.norm": "sequence", "head.output": "head"}
    return Model(Mixer, plan)
