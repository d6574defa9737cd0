"""Causal attention on a CPU in blocks of tokens, which is faster than PyTorch's kernel for short sequences.

The file replaces PyTorch's CPU kernel behind `F.scaled_dot_product_attention`. That kernel computes one head at a time,
in small matrix products. Blocked attention multiplies a block of queries of several heads by all keys up to the block,
in one batched matrix product. The scores of a block stay in the cache. Neither kernel saves scores for backward:
backward computes them again (arXiv:2205.14135). Tests compare both kernels with the formula in float64
(tests/cpu/test_blocked_attention.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from titan_launch.cpu.kernels import Kernel, Replacement

_BLOCK_ROWS = 128
"""Largest number of queries in a block for each key head: tokens x query heads of this key head."""

_BLOCK_SCORES = 2**19
"""Largest number of scores in a block, over all its heads: 2 MiB in fp32."""


@cache
def lengths() -> Mapping[torch.dtype, range]:
    """Return, by dtype, the sequence lengths in tokens for which blocked attention is used on this CPU.

    At these lengths blocked attention was faster for all measured numbers of heads, widths and threads
    (docs/verification/cpu.md). A dtype is missing if it was not measured on this kind of CPU: fp32 without AVX-512,
    bf16 without AVX-512 BF16, and bf16 with AMX, for which PyTorch has another kernel.
    """
    has = torch.cpu.get_capabilities()
    found = {}
    if has.get("avx512_f"):
        found[torch.float32] = range(384, 513)
    if has.get("avx512_bf16") and not has.get("amx_bf16"):
        found[torch.bfloat16] = range(64, 513)
    return found


_aten = torch.ops.aten
_FORWARD = _aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def blocked_attention() -> AbstractContextManager[None]:
    """Replace PyTorch's CPU kernel for the calls that `takes` accepts, until the `with` block ends.

    Autograd, activation checkpointing, tracing and torch.compile see the same operation as before. Other calls reach
    PyTorch's kernel. Do not use this context with ring attention: backward assumes that each query attended only to
    keys of the same call.
    """
    return _REPLACEMENT.active()


def _kernels() -> dict[torch._ops.OpOverload, Kernel]:
    forward, backward = (torch.library.get_kernel(operation, "CPU") for operation in (_FORWARD, _BACKWARD))

    def attend(dispatch: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any, **others: Any) -> Any:
        if takes(q, k, v, *options, **others):
            return attention(q, k, v, others.get("scale"))
        return forward.call_boxed(dispatch, q, k, v, *options, **others)

    def differentiate(  # noqa: PLR0913 - the signature is PyTorch's
        dispatch: Any,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        sums: Tensor,
        *rest: Any,
        **others: Any,
    ) -> Any:
        if takes(q, k, v, *rest, **others):
            return gradients(grad, q, k, v, others.get("scale"))
        return backward.call_boxed(dispatch, grad, q, k, v, out, sums, *rest, **others)

    return {_FORWARD: attend, _BACKWARD: differentiate}


_REPLACEMENT = Replacement(_kernels)


def takes(  # noqa: PLR0913 - the signature is PyTorch's
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> bool:
    """Return True if blocked attention replaces PyTorch's kernel in a call: causal self-attention of short sequences
    (`lengths`), without dropout and without a mask."""
    return (
        is_causal
        and attn_mask is None
        and dropout_p == 0.0
        and q.shape[2] == k.shape[2]
        and q.numel() > 0
        and q.shape[2] in lengths().get(q.dtype, ())
    )


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """Return causal attention of `q` (batch, heads, tokens, width), and the log-sum-exp of each query's scores.

    `k` and `v` may have fewer heads. The attention has the shape and dtype of `q`. The log-sum-exp is fp32 (batch,
    heads, tokens). Factors of matrix products are rounded to the dtype of `q`, as in PyTorch's kernel. Scores are fp32.
    """
    blocks = _Blocks(q, k, scale)
    queries, keys, values = map(blocks.rows, (q, k, v))
    results, sums = torch.empty_like(queries), torch.empty_like(queries[..., :1])
    with _products_of(q.dtype):
        for heads, rows, seen in blocks:
            scores, shares = blocks.scores(queries[heads, rows], keys[heads, seen])
            results[heads, rows] = torch.bmm(shares, values[heads, seen])
            # Log-sum-exp = largest score - log(largest softmax value).
            sums[heads, rows] = scores.amax(-1, keepdim=True) - shares.amax(-1, keepdim=True).log_()
    return (
        blocks.put(results, torch.empty_like(q)),
        blocks.put(sums, _tokens_first(sums, (*q.shape[:3], 1))).squeeze(-1),
    )


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v`, with their shapes. `grad`: gradient of `attention`'s first result."""
    blocks = _Blocks(q, k, scale)
    queries, keys, values, of_results = map(blocks.rows, (q, k, v, grad))
    of_queries, of_keys, of_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    with _products_of(q.dtype):
        for heads, rows, seen in blocks:
            scores, shares = blocks.scores(queries[heads, rows], keys[heads, seen])
            of_values[heads, seen].baddbmm_(shares.mT, of_results[heads, rows])
            of_shares = torch.bmm(of_results[heads, rows], values[heads, seen].mT, out=scores)
            of_scores = _aten._softmax_backward_data.out(of_shares, shares, -1, torch.float32, grad_input=of_shares)
            of_queries[heads, rows] = torch.bmm(of_scores, keys[heads, seen])
            of_keys[heads, seen].baddbmm_(of_scores.mT, queries[heads, rows])
    of_queries *= blocks.scale
    of_keys *= blocks.scale
    return (
        blocks.put(of_queries, _tokens_first(q, q.shape)),
        blocks.put(of_keys, _tokens_first(k, k.shape)),
        blocks.put(of_values, _tokens_first(v, v.shape)),
    )


def _tokens_first(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an empty tensor (batch, heads, tokens, width) with tokens before heads in memory.

    PyTorch's kernel returns its outputs with these strides, except for the attention, which has the strides of the
    queries. `like`: a tensor with the dtype and device of the result.
    """
    batch, heads, tokens, width = shape
    return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)


class _Blocks:
    """The blocks of one call. A block has the queries of neighbouring tokens, for all query heads of some key heads."""

    def __init__(self, q: Tensor, k: Tensor, scale: float | None):
        self._batch, self._heads, self._tokens, width = k.shape
        self._heads_per_key = q.shape[1] // self._heads
        self.scale = width**-0.5 if scale is None else scale
        self._length = min(max(1, _BLOCK_ROWS // self._heads_per_key), self._tokens)
        longest = self._length * self._heads_per_key * self._tokens
        self._key_heads_per_block = min(max(1, _BLOCK_SCORES // longest), self._batch * self._heads)
        # All blocks write into the same memory, which stays in the cache.
        self._scores, self._shares = q.new_empty((2, self._key_heads_per_block * longest), dtype=torch.float32)
        self._future = q.new_full((self._length, self._length), -torch.inf, dtype=torch.float32).triu_(1)

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield three slices for each block, which index the results of `rows`: the key heads of the block (counted
        over all sequences), its queries, and the tokens to which these queries attend."""
        for head in range(0, self._batch * self._heads, self._key_heads_per_block):
            heads = slice(head, head + self._key_heads_per_block)
            for start in range(0, self._tokens, self._length):
                end = min(start + self._length, self._tokens)
                yield heads, slice(start * self._heads_per_key, end * self._heads_per_key), slice(0, end)

    def rows(self, x: Tensor) -> Tensor:
        """Return `x` (batch, heads, tokens, width) as fp32 (batch x key heads, tokens x heads per key head, width)."""
        by_key = x.unflatten(1, (self._heads, -1)).transpose(2, 3)
        return by_key.float().reshape(self._batch * self._heads, -1, x.shape[-1])

    def put(self, rows: Tensor, x: Tensor) -> Tensor:
        """Copy `rows`, which has the shape of a result of `rows()`, into `x` of any dtype and strides. Return `x`."""
        by_key = rows.view(self._batch, self._heads, self._tokens, -1, rows.shape[-1])
        x.unflatten(1, (self._heads, -1)).transpose(2, 3).copy_(by_key)
        return x

    def scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores of a block (key heads, queries, tokens), and their softmax.

        The scores of tokens after the query's token are -inf. The next block overwrites both tensors.
        """
        shape = (len(key), query.shape[1], key.shape[1])
        scores, shares = (kept[: math.prod(shape)].view(shape) for kept in (self._scores, self._shares))
        torch.baddbmm(scores, query, key.mT, beta=0, alpha=self.scale, out=scores)
        own = query.shape[1] // self._heads_per_key  # number of tokens in the block
        scores.unflatten(1, (own, -1))[..., -own:] += self._future[:own, None, :own]
        return scores, torch.softmax(scores, -1, out=shares)


_PRECISION = Lock()
"""Held while the precision of matrix products is changed, because all threads share this setting."""


@contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """Round the factors of fp32 matrix products to `dtype` until the `with` block ends. Sums and results stay fp32.

    PyTorch has no CPU product of bf16 tensors with an fp32 result. The caller therefore casts bf16 factors to fp32. The
    rounding does not change such factors.
    """
    if dtype != torch.bfloat16:
        yield
        return
    products: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _PRECISION:
        before = products.fp32_precision
        try:
            products.fp32_precision = "bf16"
            yield
        finally:
            products.fp32_precision = before
