"""Comparison of tensors and model states, gathered from their shards, and counts of operations."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


def cross_entropy_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross-entropy over all targets that are not ignored, in fp32."""
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), targets.flatten(), reduction="sum")


class Operations(TorchDispatchMode):
    """A dispatch mode that counts the operations on tensors, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.is_counting = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_counting:
            self.counts[str(func).removeprefix("aten.").removesuffix(".default")] += 1
        return func(*args, **(kwargs or {}))


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Check that two states are equal bit for bit."""
    assert a.keys() == b.keys()
    assert [name for name, tensor in a.items() if not torch.equal(tensor, b[name])] == []


def full_state(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers, gathered from their shards."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: full_tensor(tensor) for name, tensor in tensors.items()}


def full_tensor(tensor: Tensor) -> Tensor:
    """Return a tensor gathered from its shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
