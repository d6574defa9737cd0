"""Causal attention on a CPU, a block of tokens at a time: faster than PyTorch's kernel where sequences are short.

PyTorch's flash attention for CPUs goes through the heads one by one, in products that are small. Here a block of tokens
of several heads is one batched product with the keys up to it, and its scores stay in the cache. As there, scores are
not kept for backward, which computes them again (arXiv:2205.14135).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

_BLOCK_ROWS = 128
"""Queries of a block for a head of keys, where the sequence has as many."""

_BLOCK_SCORES = 2**19
"""Of the longest block, over all its heads: 2 MiB in fp32."""


@cache
def lengths() -> Mapping[torch.dtype, range]:
    """Return by dtype the lengths of sequences, in tokens, for which this CPU takes the blocked kernel: it was faster
    for all measured heads, widths and threads (docs/verification/cpu.md). CPUs with AMX, for which PyTorch's kernel
    has a path of its own, and CPUs without AVX-512 were not measured.
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

_in_place: list[torch.library.Library] = []
"""The one library that holds the kernels, as often as there are blocks that want it: PyTorch takes one at a time."""


@contextmanager
def blocked_attention() -> Iterator[None]:
    """Let this compute PyTorch's operation, where `takes` says so, until the end of the block.

    What calls the operation, its derivative, what it keeps, and its shapes on the meta device stay as they are. Calls
    that are not taken reach PyTorch's kernel holding Python's lock. Not for ring attention: backward takes it that a
    query has seen no keys but those it is given.
    """
    library = _in_place[0] if _in_place else _registered()
    _in_place.append(library)
    try:
        yield
    finally:
        _in_place.pop()
        if not _in_place:
            library._destroy()


def _registered() -> torch.library.Library:
    forward, backward = (torch.library.get_kernel(operation, "CPU") for operation in (_FORWARD, _BACKWARD))

    def attend(dispatch: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any, **others: Any) -> Any:
        if takes(q, k, v, *options, **others):
            return attention(q, k, v, others.get("scale"))
        return forward.call_boxed(dispatch, q, k, v, *options, **others)

    def differentiate(
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

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        library.impl(_FORWARD, attend, "CPU", with_keyset=True)
        library.impl(_BACKWARD, differentiate, "CPU", with_keyset=True)
    return library


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> bool:
    """Whether a call of the operation is for this: causal attention of short sequences to themselves."""
    return (
        is_causal
        and attn_mask is None
        and dropout_p == 0.0
        and q.shape[2] == k.shape[2]
        and q.numel() > 0
        and q.shape[2] in lengths().get(q.dtype, ())
    )


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """(batch, heads, tokens, width) attends to its own and earlier tokens; keys and values may have fewer heads.

    Returns the result, like `q`, and the logarithm of each query's sum of exponentials, fp32 (batch, heads, tokens).
    Factors of products are of the dtype of `q`, as in PyTorch's kernel; scores and sums are fp32.
    """
    blocks = _Blocks(q, k, scale)
    queries, keys, values = map(blocks.rows, (q, k, v))
    results, sums = torch.empty_like(queries), torch.empty_like(queries[..., :1])
    with _products_of(q.dtype):
        for heads, rows, seen in blocks:
            scores, shares = blocks.scores(queries[heads, rows], keys[heads, seen])
            results[heads, rows] = torch.bmm(shares, values[heads, seen])
            # The largest share is that of the largest score.
            sums[heads, rows] = scores.amax(-1, keepdim=True) - shares.amax(-1, keepdim=True).log_()
    return (
        blocks.put(results, torch.empty_like(q)),
        blocks.put(sums, _tokens_first(sums, (*q.shape[:3], 1))).squeeze(-1),
    )


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, each like its tensor, from that of the result."""
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
    """(batch, heads, tokens, width), in memory with tokens before heads: so PyTorch's kernel leaves all but its result,
    which is like the queries there."""
    batch, heads, tokens, width = shape
    return like.new_empty((batch, tokens, heads, width)).transpose(1, 2)


class _Blocks:
    """One call, in blocks. A block has queries of neighbouring tokens, of all the heads that share one of keys."""

    def __init__(self, q: Tensor, k: Tensor, scale: float | None):
        self._batch, self._heads, self._tokens, width = k.shape
        self._shared = q.shape[1] // self._heads
        self.scale = width**-0.5 if scale is None else scale
        self._length = min(max(1, _BLOCK_ROWS // self._shared), self._tokens)
        longest = self._length * self._shared * self._tokens
        self._together = min(max(1, _BLOCK_SCORES // longest), self._batch * self._heads)
        # One place for all blocks, which stays in the cache.
        self._scores, self._shares = q.new_empty((2, self._together * longest), dtype=torch.float32)
        self._hides = q.new_full((self._length, self._length), -torch.inf, dtype=torch.float32).triu_(1)

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Heads of keys, over all sequences; their queries; the tokens that these see."""
        for head in range(0, self._batch * self._heads, self._together):
            heads = slice(head, head + self._together)
            for start in range(0, self._tokens, self._length):
                end = min(start + self._length, self._tokens)
                yield heads, slice(start * self._shared, end * self._shared), slice(0, end)

    def rows(self, x: Tensor) -> Tensor:
        """(batch, heads, tokens, width) as fp32 [batch x heads of keys, tokens x heads that share them, width]."""
        by_key = x.unflatten(1, (self._heads, -1)).transpose(2, 3)
        return by_key.float().reshape(self._batch * self._heads, -1, x.shape[-1])

    def put(self, rows: Tensor, x: Tensor) -> Tensor:
        """The way back, into a tensor of any dtype and strides."""
        by_key = rows.view(self._batch, self._heads, self._tokens, -1, rows.shape[-1])
        x.unflatten(1, (self._heads, -1)).transpose(2, 3).copy_(by_key)
        return x

    def scores(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """[heads of keys, queries, tokens] of a block, those of tokens to come -inf, and their softmax. Until the next
        block."""
        shape = (len(key), query.shape[1], key.shape[1])
        scores, shares = (kept[: math.prod(shape)].view(shape) for kept in (self._scores, self._shares))
        torch.baddbmm(scores, query, key.mT, beta=0, alpha=self.scale, out=scores)
        own = query.shape[1] // self._shared  # the tokens of the block itself
        scores.unflatten(1, (own, -1))[..., -own:] += self._hides[:own, None, :own]
        return scores, torch.softmax(scores, -1, out=shares)


_PRECISION = Lock()
"""Of products is one setting for all threads."""


@contextmanager
def _products_of(dtype: torch.dtype) -> Iterator[None]:
    """Let products of fp32 tensors round their factors to `dtype`, which loses nothing where these come from it: sums
    and results stay fp32. PyTorch has no product of bf16 tensors on a CPU that gives fp32."""
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
