"""Tensors and states of models, whole, to be compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    """Two states are the same, bit for bit."""
    assert a.keys() == b.keys()
    assert [name for name, tensor in a.items() if not torch.equal(tensor, b[name])] == []


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, gathered from their shards."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(tensor) for name, tensor in tensors.items()}


def whole(tensor: Tensor) -> Tensor:
    """A tensor gathered from its shards."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
