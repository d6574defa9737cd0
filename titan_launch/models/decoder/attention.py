"""The computation of attention: the one place that chooses among PyTorch's implementations.

    attention                          CUDA                      CPU
    plain causal                       scaled_dot_product_attention with is_causal, on both
    sliding window, documents          FlexAttention, compiled   scaled_dot_product_attention with a mask
    soft cap, attention sinks          FlexAttention, compiled   explicit scores in fp32, for 256 queries at a time
    in generation and evaluation       the paths of the CPU, on both

FlexAttention (arXiv:2412.05496) skips blocks of tokens that a mask excludes, and never stores the scores. On a CPU it
has no backward. The paths for CPUs are exact, and serve small models and tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_launch.models.documents import positions_in

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

_QUERIES = 256
"""Number of queries for which `_explicit_attention` computes scores at a time."""


@dataclass(frozen=True)
class ScoreOptions:
    """The options of a layer's attention scores."""

    scale: float | None = None
    """Factor of the scores; None for `head_dim ** -0.5`, where `head_dim` is the width of a head of queries and
    keys."""

    window: int | None = None
    """Number of tokens that a token attends to, itself included; None for all earlier tokens."""

    soft_cap: float | None = None
    """Scores become `soft_cap * tanh(score / soft_cap)`; None for no cap."""

    pads_values: bool = True
    """True: plain causal attention pads queries, keys and values with zeros to one width. False: the kernel takes
    values of another width than queries and keys, so nothing is padded."""

    has_many_lengths: bool = False
    """True: sequences have many lengths, as in generation and evaluation. FlexAttention is compiled for each length, so
    it is not used."""


class Documents:
    """The documents of the tokens in a microbatch. A token attends only to tokens of its own document.

    A decoder makes one object for each microbatch and passes the object to all layers. On CUDA, the object has a block
    mask for each window, which all layers and the second forward of activation checkpointing share. The class is not a
    dataclass, because each FSDP2 unit copies the dataclasses among its inputs.
    """

    def __init__(self, numbers: Tensor, windows: Iterable[int | None]):
        """Build the block masks if the tokens are on CUDA. `numbers`: the document number of each token (batch,
        tokens). `windows`: the sliding window of each layer; None for a layer without a window."""
        self.numbers = numbers
        self.positions = positions_in(numbers)
        """The position of each token in its document (batch, tokens)."""

        self.block_masks: dict[int | None, BlockMask] = {}
        if numbers.is_cuda:
            num_tokens, device = numbers.shape[1], numbers.device
            self.block_masks = {window: make_block_mask(num_tokens, window, numbers, device) for window in set(windows)}


def attend(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions = ScoreOptions(), documents: Documents | None = None
) -> Tensor:
    """Return causal attention: (batch, heads, tokens, width of `v`), in the dtype of `q`.

    `q`: (batch, heads, tokens, head_dim). `k` and `v` may have fewer heads, and `v` may have a different width. If `k`
    and `v` also have earlier tokens, from a `KeyValueCache`, `documents` has no effect. Soft cap and softmax are
    computed in fp32.
    """
    if q.shape[2] < k.shape[2]:
        return _explicitly_masked(q, k, v, options)
    is_cut = options.window is not None and options.window < q.shape[2]
    if is_cut or options.soft_cap is not None or documents is not None:
        return masked_attention(q, k, v, options, documents)
    return causal_attention(q, k, v, options.scale, options.pads_values)


class Attended(NamedTuple):
    """The result of attention, and the logarithms of the denominators of its softmax."""

    values: Tensor
    """Weighted sums of the values: (batch, heads, tokens, width of a value)."""

    logsumexp: Tensor
    """Logarithm of the sum of the exponentials of each query's scores: fp32 (batch, heads, tokens)."""


def attend_with_logsumexp(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions = ScoreOptions(), documents: Documents | None = None
) -> Attended:
    """Return the same attention as `attend`, with the logsumexp of the scores. (`trace.cuda_kernels` replaces this
    function.)"""
    if q.is_cuda and not options.has_many_lengths:
        return Attended(*_flex_attention(q, k, v, options, documents, has_logsumexp=True))
    return _explicit_attention(q, k, v, options, documents)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, pads_values: bool = True) -> Tensor:
    """Return plain causal attention, (batch, heads, tokens, width of `v`), by a fused kernel if PyTorch has one for the
    device. `pads_values`: as in `ScoreOptions`."""
    width, scale = v.shape[-1], q.shape[-1] ** -0.5 if scale is None else scale
    if pads_values:
        q, k, v = _of_equal_width(q, k, v)
    num_groups = q.shape[1] // k.shape[1]
    if num_groups > 1 and takes_equal_heads_only(q):
        k, v = (t.repeat_interleave(num_groups, dim=1) for t in (k, v))
        num_groups = 1
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=num_groups > 1)
    return attended[..., :width]


def _of_equal_width(*tensors: Tensor) -> Iterator[Tensor]:
    """Pad queries, keys and values to one width, with zeros that change no result, and yield them.

    Flash attention requires equal widths on all devices (`check_head_dim_size_flash`, PyTorch 2.11 to 2.15). For
    unequal widths, a CPU would use the kernel that stores all tokens x tokens scores, and CUDA the slower
    memory-efficient kernel. Of the fast kernels, only cuDNN on Hopper and later takes other widths, such as 192 and
    128.
    """
    widest = max(tensor.shape[-1] for tensor in tensors)
    for tensor in tensors:
        yield tensor if tensor.shape[-1] == widest else F.pad(tensor, (0, widest - tensor.shape[-1]))


def takes_equal_heads_only(q: Tensor) -> bool:
    """Return True if the fused kernel requires as many heads of keys and values as of queries: in fp32 on CUDA.

    With `enable_gqa`, PyTorch would then use the kernel that stores all tokens x tokens scores. Once a release contains
    https://github.com/pytorch/pytorch/pull/191085, this function is unnecessary.
    """
    return q.is_cuda and q.dtype == torch.float32


def masked_attention(q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, documents: Documents | None) -> Tensor:
    """Return causal attention with a window, a soft cap or documents. (`trace.cuda_kernels` replaces this function.)"""
    if q.is_cuda and not options.has_many_lengths:
        return _flex_attention(q, k, v, options, documents)
    return _explicitly_masked(q, k, v, options, documents)


def _explicitly_masked(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, documents: Documents | None = None
) -> Tensor:
    """Return attention that is computed with a mask tensor; with a soft cap, by `_explicit_attention`. `q` has the last
    tokens of a sequence, or all its tokens."""
    if options.soft_cap is not None:
        return _explicit_attention(q, k, v, options, documents).values
    num_tokens, is_grouped = k.shape[2], q.shape[1] > k.shape[1]
    queries, keys = slice(num_tokens - q.shape[2], num_tokens), slice(0, num_tokens)
    mask = _allowed(queries, keys, options.window, documents, q.device)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=options.scale, enable_gqa=is_grouped)


class KeyValueCache:
    """Keys and values of one layer, for all tokens of a sequence so far. Generation attaches a cache to a layer."""

    def __init__(self, max_tokens: int):
        """`max_tokens`: number of tokens for which memory is allocated at first. For more tokens, the memory is at
        least doubled."""
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._tensors: tuple[Tensor, ...] = ()

    def append(self, k: Tensor, v: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens, (batch, heads, tokens, head_dim). Return the keys and values of all
        tokens to which any new token attends. `window`: the sliding window in tokens; None for no window."""
        start, stop = self._num_tokens, self._num_tokens + k.shape[2]
        if not self._tensors or stop > self._max_tokens:
            self._grow(k, v, stop)
        for kept, new in zip(self._tensors, (k, v), strict=True):
            kept[:, :, start:stop] = new
        self._num_tokens = stop
        first = 0 if window is None else max(0, start - window + 1)
        keys, values = (kept[:, :, first:stop] for kept in self._tensors)
        return keys, values

    def shorten(self, num_tokens: int) -> None:
        """Forget all tokens but the first `num_tokens`."""
        self._num_tokens = num_tokens

    def _grow(self, k: Tensor, v: Tensor, needed: int) -> None:
        """Allocate memory for at least `needed` tokens, and copy the keys and values so far."""
        if needed > self._max_tokens:
            self._max_tokens = max(needed, 2 * self._max_tokens)
        grown = tuple(x.new_empty(*x.shape[:2], self._max_tokens, x.shape[3]) for x in (k, v))
        for old, new in zip(self._tensors, grown, strict=False):
            new[:, :, : self._num_tokens] = old[:, :, : self._num_tokens]
        self._tensors = grown


def _allowed(
    queries: slice, keys: slice, window: int | None, documents: Documents | None, device: torch.device
) -> Tensor:
    """Return a mask that is True where the query may attend to the key: bool (1 or batch, queries, keys). `queries`,
    `keys`: ranges of tokens."""
    offset = queries.start - keys.start
    pairs = torch.ones((queries.stop - queries.start, keys.stop - keys.start), dtype=torch.bool, device=device)
    pairs = pairs.tril_(offset)
    if window is not None:
        pairs = pairs.triu_(offset - window + 1)
    if documents is None:
        return pairs[None]
    return pairs & (documents.numbers[:, queries, None] == documents.numbers[:, None, keys])


def _explicit_attention(
    q: Tensor, k: Tensor, v: Tensor, options: ScoreOptions, documents: Documents | None
) -> Attended:
    """Return attention from explicit scores in fp32, for `_QUERIES` queries at a time. Keys before the window of the
    first such query, and keys after the last such query, are skipped."""
    (num_heads, num_tokens, width), num_kv_heads, window = q.shape[1:], k.shape[1], options.window
    scale, first = width**-0.5 if options.scale is None else options.scale, k.shape[2] - num_tokens
    wide_q, wide_k, wide_v = (x.float() for x in (q, k, v))
    results: list[tuple[Tensor, Tensor]] = []
    for start in range(0, num_tokens, _QUERIES):
        stop = min(start + _QUERIES, num_tokens)
        queries = slice(first + start, first + stop)
        keys = slice(0 if window is None else max(0, queries.start - window + 1), queries.stop)
        # [batch, key heads, query heads of a key head x queries, width]
        rows = wide_q[:, :, start:stop].unflatten(1, (num_kv_heads, -1)).flatten(2, 3)
        products = rows @ wide_k[:, :, keys].mT
        if options.soft_cap is None:
            scores = products * scale
        else:
            scores = options.soft_cap * torch.tanh(products * (scale / options.soft_cap))
        scores = scores.unflatten(2, (num_heads // num_kv_heads, -1))
        allowed = _allowed(queries, keys, window, documents, q.device)[:, None, None]
        scores = scores.masked_fill(~allowed, -torch.inf)
        values = (scores.softmax(-1).flatten(2, 3) @ wide_v[:, :, keys]).unflatten(2, (num_heads // num_kv_heads, -1))
        results.append((values, scores.logsumexp(-1)))
    values, logsumexp = (torch.cat(parts, dim=3).flatten(1, 2) for parts in zip(*results, strict=True))
    return Attended(values.to(q.dtype), logsumexp)


def _flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: ScoreOptions,
    documents: Documents | None,
    has_logsumexp: bool = False,
) -> Any:
    """Return FlexAttention's result. With `has_logsumexp`, return the pair (result, logsumexp of the scores)."""
    num_tokens, window, is_compiling = q.shape[2], options.window, torch.compiler.is_compiling()
    if documents is not None:
        block_mask = documents.block_masks[window]
    elif is_compiling:  # the graph of `[compile]` contains FlexAttention and the block mask
        block_mask = make_block_mask(num_tokens, window, None, q.device)
    else:
        block_mask = _block_mask_of_length(num_tokens, window, q.device)
    given: dict[str, Any] = {
        "score_mod": None if options.soft_cap is None else soft_capped(options.soft_cap),
        "block_mask": block_mask,
        "scale": options.scale,
        "enable_gqa": q.shape[1] > k.shape[1],
    }
    if has_logsumexp:
        from torch.nn.attention.flex_attention import AuxRequest

        given["return_aux"] = AuxRequest(lse=True)
    if is_compiling:
        result = flex_attention()(q, k, v, **given)
    else:
        with torch.compiler.set_stance("default"):  # compile FlexAttention even in the precision audit, which is eager
            result = _compiled_flex_attention()(q, k, v, **given)
    return (result[0], result[1].lse) if has_logsumexp else result


def flex_attention() -> Callable[..., Any]:
    """Return PyTorch's FlexAttention, which is imported at its first use."""
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    """Return FlexAttention as a fused kernel. Code that cannot be compiled raises an error, because FlexAttention
    without compilation would store all scores."""
    import torch._dynamo.config as limits

    # By default, PyTorch compiles a function at most 8 times. All layers share this function, and each window, soft
    # cap, dtype, shape and grad mode is a variant.
    limits.recompile_limit = max(limits.recompile_limit, _VARIANTS)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, _VARIANTS)
    # With this option, the graph is one operation for selective activation checkpointing, which saves its result.
    options: dict[str, Any] = {"wrap_inductor_compiled_regions": True}
    return torch.compile(flex_attention(), fullgraph=True, dynamic=False, options=options)


_VARIANTS = 256
"""Largest number of compiled variants of FlexAttention in this process."""


def soft_capped(soft_cap: float) -> Callable[..., Tensor]:
    """Return the `score_mod` of FlexAttention that caps a score. The score is fp32 and scaled."""
    return lambda score, batch, head, query, key: soft_cap * torch.tanh(score / soft_cap)


_BLOCK = 128
"""Tokens in a block of FlexAttention's table."""


def make_block_mask(num_tokens: int, window: int | None, documents: Tensor | None, device: torch.device) -> BlockMask:
    """Return FlexAttention's table of the blocks of tokens that contain allowed pairs.

    `documents`: the document number of each token (batch, tokens), which never decreases along the sequence.

    PyTorch's `create_block_mask` computes a mask of tokens x tokens first: 8.6 GB for 32,768 tokens. Here, two pairs of
    tokens decide for a block of queries and an earlier block of keys. If the nearest pair (first query, last key) is
    allowed, the blocks contain allowed pairs. If the furthest pair (last query, first key) is allowed, all pairs are
    allowed.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def is_allowed(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        allowed = query >= key
        if window is not None:
            allowed = allowed & (query - key < window)
        if documents is not None:
            allowed = allowed & (documents[batch, query] == documents[batch, key])
        return allowed

    batch = torch.arange(1 if documents is None else len(documents), device=device)[:, None, None, None]
    first_key = torch.arange(0, num_tokens, _BLOCK, device=device)[None, None, None]
    last_key = (first_key + (_BLOCK - 1)).clamp(max=num_tokens - 1)
    first_query, last_query = first_key.mT, last_key.mT
    is_earlier = first_key < first_query
    some = is_allowed(batch, batch, first_query, last_key) & is_earlier | (first_key == first_query)
    every = is_allowed(batch, batch, last_query, first_key) & is_earlier
    every = every & (first_query + _BLOCK <= num_tokens)  # an incomplete block has pairs beyond the end
    return BlockMask.from_kv_blocks(
        *_listed(some & ~every),
        *_listed(every),
        BLOCK_SIZE=_BLOCK,
        mask_mod=is_allowed,
        seq_lengths=(num_tokens, num_tokens),
    )


def _listed(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row of a bool table, the number of true entries, and the indices of all columns. The columns of
    true entries come first."""
    columns = pairs.int().argsort(dim=-1, descending=True, stable=True)
    return pairs.sum(-1, dtype=torch.int32), columns.int()


@lru_cache(maxsize=16)
def _block_mask_of_length(num_tokens: int, window: int | None, device: torch.device) -> BlockMask:
    """Return a block mask that all layers with this window share."""
    with torch.inference_mode(False):  # training may use a mask that validation has made
        return make_block_mask(num_tokens, window, None, device)
