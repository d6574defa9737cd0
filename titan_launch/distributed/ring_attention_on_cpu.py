"""PyTorch's ring attention on the CPU, for `titan_launch.prove` and tests. Training runs do not support it. This module
adds CPU handlers to DTensor's dispatcher, only for attention without dropout and without an attention mask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.distributed.torch_private import ring_attention_module

_aten = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_TOKENS = 2
"""The dim of the tokens in queries, keys and values."""


@contextmanager
def ring_attention_on_cpu() -> Iterator[None]:
    """Until the end of the block, let this process train with context parallelism on the CPU."""
    handlers = {
        _FORWARD: lambda op, args, kwargs: _forward(*args, **kwargs),
        _BACKWARD: lambda op, args, kwargs: _backward(*args, **kwargs),
    }
    ops = ring_attention_module().custom_ops
    ops.update(handlers)
    try:
        yield
    finally:
        for op in handlers:
            del ops[op]


def _forward(q: DTensor, k: DTensor, v: DTensor, dropout: float = 0.0, is_causal: bool = False, **kwargs: Any) -> Any:
    assert not dropout and kwargs.get("attn_mask") is None

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
        return _FORWARD(query, key, value, 0.0, is_causal, scale=kwargs.get("scale"))

    group, locals_ = q.device_mesh.get_group(), [tensor.to_local() for tensor in (q, k, v)]
    results = ring_attention_module()._templated_ring_attention(group, _TOKENS, attend, *locals_, is_causal=is_causal)
    return tuple(_like(q, result) for result in results)


def _backward(  # noqa: PLR0913 - the signature is PyTorch's
    grad: DTensor,
    q: DTensor,
    k: DTensor,
    v: DTensor,
    out: DTensor,
    log_sums: DTensor,
    dropout: float,
    is_causal: bool,
    **kwargs: Any,
) -> Any:
    def attend(  # noqa: PLR0913 - PyTorch's ring passes these names
        query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor, is_causal: bool, grad_out: Tensor
    ) -> tuple[Tensor, ...]:
        return _BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal, scale=kwargs.get("scale"))

    group = q.device_mesh.get_group()
    grad_, *others = (tensor.to_local().contiguous() for tensor in (grad, q, k, v, out, log_sums))
    results = ring_attention_module()._templated_ring_attention_backward(
        group, _TOKENS, attend, grad_, "grad_out", *others, is_causal
    )
    return tuple(_like(q, result) for result in results[:3])


def _like(q: DTensor, local: Tensor) -> DTensor:
    return DTensor.from_local(local, q.device_mesh, q.placements, run_check=False)
