"""Layers of decoders: position embeddings, attention, norms, and the feed-forward layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.models.decoder.args import Activation, DecoderArgs
from titan_launch.models.decoder.attention import Documents, KeyValueCache, ScoreOptions, attend, attend_with_logsumexp
from titan_launch.models.decoder.table_args import RopeScaling


class RotaryEmbedding(nn.Module):
    """Rotation of each pair of neighbouring channels of a head by an angle proportional to the token's position.

    All layers with the same frequencies share one instance. The table of angles is a buffer, not an argument: FSDP2
    casts every floating argument of a wrapped module to the compute dtype, and in bf16 many pairs would have the same
    rotation at the positions 8000 and 8001. Checkpoints do not contain the table. `reset_parameters` computes the table
    of a model that was built on the meta device.
    """

    position: int = 0
    """Position of the first token of the input. It is not 0 while a cache has earlier tokens."""

    table: Tensor
    """Cosine and sine of each angle, times `RopeScaling.rotated_factor`: (max_seq_len, head_dim / 2, 2)."""

    def __init__(self, head_dim: int, max_seq_len: int, theta: float, scaling: RopeScaling | None = None):
        """Compute the table. `head_dim` must be even; `theta` is the base of the frequencies."""
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        self.scaling = scaling
        table = torch.empty((max_seq_len, head_dim // 2, 2), dtype=torch.float32)
        self.register_buffer("table", table, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the table in fp32, as the published models do."""
        frequencies = rotary_frequencies(self.head_dim, self.theta, self.scaling, self.table.device)
        positions = torch.arange(self.table.shape[0], dtype=torch.float32, device=self.table.device)
        angles = torch.outer(positions, frequencies)
        factor = 1.0 if self.scaling is None else self.scaling.rotated_factor
        self.table.copy_(torch.stack((angles.cos(), angles.sin()), dim=-1) * factor)

    def extend(self, num_tokens: int) -> None:
        """Replace the table by a larger one if it has fewer rows than `num_tokens`."""
        if num_tokens > self.table.shape[0]:
            self.table = self.table.new_empty(num_tokens, *self.table.shape[1:])
            self.reset_parameters()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate (batch, tokens, heads, head_dim) in fp32; the result has the input's dtype.

        `positions`: (batch, tokens); None for consecutive positions from `self.position`. Raise ValueError if the table
        has too few rows for the tokens.
        """
        stop, max_tokens = self.position + x.shape[1], self.table.shape[0]
        if stop > max_tokens:
            reason = f"got {stop} tokens, but the rotary table has {max_tokens} rows"
            raise ValueError(f"{reason}; increase training.seq_len, which sets the number of rows")
        rows = self.table[self.position : stop] if positions is None else self.table[positions]
        table = rows.unsqueeze(-3).float()  # [1 or batch, tokens, 1, head_dim / 2, 2]; the first axis may be missing
        pairs = x.float().unflatten(-1, (-1, 2))
        rotated = _rotated_by_parts(pairs, table) if torch.compiler.is_compiling() else _rotated(pairs, table)
        return rotated.flatten(-2).to(x.dtype)


def _rotated(pairs: Tensor, table: Tensor) -> Tensor:
    """Return the rotated pairs, by one product of complex numbers. In eager mode this function runs a seventh of the
    kernels that `_rotated_by_parts` runs. On a CPU, its kernels are vectorized."""
    return torch.view_as_real(torch.view_as_complex(pairs) * torch.view_as_complex(table))


def _rotated_by_parts(pairs: Tensor, table: Tensor) -> Tensor:
    """Return the rotated pairs, by real products. Inductor fuses real products, but cannot compile complex ones."""
    (first, second), (cos, sin) = pairs.unbind(-1), table.unbind(-1)
    return torch.stack((first * cos - second * sin, first * sin + second * cos), dim=-1)


def rotary_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | None = None
) -> Tensor:
    """Return the angle per token of each channel pair in radians, [head_dim / 2]. It is theta^(-2 i / head_dim) without
    scaling.

    Linear scaling divides all frequencies by `factor`. Llama 3.1 divides the frequencies of slow pairs, and keeps the
    frequencies of fast pairs. Between slow and fast pairs, the scaling changes linearly with the number of turns within
    the original context (Meta's `apply_scaling` in `llama-models`). With YaRN, the scaling changes linearly with the
    index of the pair (arXiv:2309.00071, section 3.2; `_compute_yarn_parameters` of `transformers`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
    frequencies = 1.0 / theta**exponents
    if scaling is None:
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        first, last = _scaled_pairs(head_dim, theta, scaling)
        pairs = torch.arange(len(frequencies), dtype=torch.float32, device=device)
        unscaled = 1 - ((pairs - first) / (last - first)).clamp(0.0, 1.0)
        return frequencies * unscaled + 1.0 / (scaling.factor * theta**exponents) * (1 - unscaled)
    turns = scaling.original_max_position * frequencies / (2 * math.pi)
    unscaled = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    unscaled = unscaled.clamp(0.0, 1.0)
    return frequencies * (unscaled + (1 - unscaled) / scaling.factor)


def _scaled_pairs(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """Return (first, last), two indices of pairs of channels. YaRN does not scale the pairs up to `first`, and fully
    scales the pairs from `last` on. An index need not be a whole number."""
    turns_of_first = scaling.original_max_position / (2 * math.pi)
    first, last = (
        head_dim * math.log(turns_of_first / turns) / (2 * math.log(theta))
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    return first, last + 0.001 if first == last else last


class LearnedPositions(nn.Embedding):
    """A table with a vector for each position. The vectors are added to the token embeddings (GPT-2)."""

    position: int = 0
    """Position of the first token of the input. It is not 0 while a cache has earlier tokens."""

    rows: Tensor
    """The row in the table for each token of a sequence, 0, 1, 2 and so on: int64 (max_positions). Ranks that divide
    the tokens of a sequence divide this buffer in the same way."""

    def __init__(self, max_positions: int, dim: int):
        super().__init__(max_positions, dim)
        self.register_buffer("rows", torch.arange(max_positions), persistent=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Map (batch, tokens, dim) to the same shape. `positions`: (batch, tokens); None for consecutive positions from
        `self.position`."""
        rows = self.rows[self.position : self.position + x.shape[1]] if positions is None else positions
        return x + super().forward(rows)


class ScaledEmbedding(nn.Embedding):
    """An embedding whose vectors are multiplied by `sqrt(dim)` (Gemma)."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, tokens) to (batch, tokens, dim)."""
        return super().forward(tokens) * self.embedding_dim**0.5


class CappedLinear(nn.Linear):
    """An output layer whose logits are `cap * tanh(logit / cap)` (Gemma 2)."""

    def __init__(self, dim: int, num_classes: int, cap: float):
        super().__init__(dim, num_classes, bias=False)
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to (..., num_classes)."""
        return self.adjust_logits(super().forward(x))

    def adjust_logits(self, logits: Tensor) -> Tensor:
        """Return capped logits. With `loss.chunks`, this elementwise function is applied to each chunk of logits."""
        return self.cap * torch.tanh(logits / self.cap)


class AttentionSinks(nn.Module):
    """A learned logit for each head, the sink. Its exponential is added to the denominator of the softmax.

    Let L be the logsumexp of a query's scores, and s the sink. The outputs of attention are then multiplied by exp(L) /
    (exp(L) + exp(s)) = sigmoid(L - s).
    """

    def __init__(self, num_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_heads))

    def forward(self, attended: Tensor, logsumexp: Tensor) -> Tensor:
        """Return the attention with sinks: the same shape and dtype as `attended`.

        `attended`: the attention without sinks, (batch, heads, tokens, head_dim). `logsumexp`: logsumexp of
        each query's scores, fp32 (batch, heads, tokens). The product is computed in fp32.
        """
        shares = torch.sigmoid(logsumexp - self.weight[:, None])
        return (attended * shares[..., None]).to(attended.dtype)


class Attention(nn.Module):
    """Causal self-attention in which groups of query heads share a key and value head (arXiv:2305.13245)."""

    cache: KeyValueCache | None = None
    """Keys and values of earlier tokens, during generation."""

    def __init__(self, args: DecoderArgs, window: int | None, rope: RotaryEmbedding | None):
        """`window`: the sliding window of this layer; None for no window. `rope`: None for learned positions."""
        super().__init__()
        self.head_dim = args.head_width
        self.options = ScoreOptions(args.query_scale, window, args.attention_soft_cap)
        self.wq = nn.Linear(args.dim, args.query_width, bias=args.qkv_bias)
        self.wk = nn.Linear(args.dim, args.kv_width, bias=args.qkv_bias)
        self.wv = nn.Linear(args.dim, args.kv_width, bias=args.qkv_bias)
        self.wo = nn.Linear(args.query_width, args.dim, bias=args.attention_output_bias)
        self.normalizes_all_heads = args.qk_norm and args.qk_norm_over == "all_heads"
        self.q_norm = build_head_norm(args, args.query_width) if args.qk_norm else None
        self.k_norm = build_head_norm(args, args.kv_width) if args.qk_norm else None
        self.sinks = AttentionSinks(args.n_heads) if args.attention_sinks else None
        self.rope = rope

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        if self.normalizes_all_heads:
            q, k = normalized(q, self.q_norm), normalized(k, self.k_norm)
        # [batch, tokens, heads, head_dim]; the number of heads follows from the weights
        q, k, v = (projected.unflatten(-1, (-1, self.head_dim)) for projected in (q, k, v))
        if not self.normalizes_all_heads:
            q, k = normalized(q, self.q_norm), normalized(k, self.k_norm)
        if self.rope is not None:
            positions = None if documents is None else documents.positions
            q, k = self.rope(q, positions), self.rope(k, positions)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.cache is not None:
            k, v = self.cache.append(k, v, self.options.window)
        if self.sinks is None:
            attended = attend(q, k, v, self.options, documents)
        else:
            attended = self.sinks(*attend_with_logsumexp(q, k, v, self.options, documents))
        return self.wo(attended.transpose(1, 2).flatten(-2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1). The module names are the same as in the authors'
    code.

    The cache has the keys and values of all heads, not the latents. So generation computes keys and values only for the
    new token. A cache of latents would take less memory.
    """

    cache: KeyValueCache | None = None
    """Keys and values of earlier tokens, during generation."""

    def __init__(self, args: DecoderArgs, rope: RotaryEmbedding | None):
        super().__init__()
        latent = args.latent_attention
        assert latent is not None
        self.options = ScoreOptions(args.score_scale, None, args.attention_soft_cap)
        self.query_widths = latent.qk_nope_head_dim, latent.qk_rope_head_dim
        self.latent_widths = latent.kv_lora_rank, latent.qk_rope_head_dim
        self.expanded_widths = latent.qk_nope_head_dim, latent.v_head_dim
        n_heads, rank = args.n_heads, latent.q_lora_rank
        queries = n_heads * sum(self.query_widths)
        self.wq = nn.Linear(args.dim, queries, bias=False) if rank is None else None
        self.wq_a = None if rank is None else nn.Linear(args.dim, rank, bias=False)
        self.q_norm = None if rank is None else build_norm(args, rank, latent.norm_eps)
        self.wq_b = None if rank is None else nn.Linear(rank, queries, bias=False)
        self.wkv_a = nn.Linear(args.dim, sum(self.latent_widths), bias=False)
        self.kv_norm = build_norm(args, latent.kv_lora_rank, latent.norm_eps)
        self.wkv_b = nn.Linear(latent.kv_lora_rank, n_heads * sum(self.expanded_widths), bias=False)
        self.wo = nn.Linear(args.attended_width, args.dim, bias=args.attention_output_bias)
        self.rope = rope

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        # [batch, tokens, heads, width of a head]; the number of heads follows from the weights
        q, q_rotated = self._queries(x).unflatten(-1, (-1, sum(self.query_widths))).split(self.query_widths, -1)
        latent, k_rotated = self.wkv_a(x).split(self.latent_widths, -1)
        expanded = self.wkv_b(self.kv_norm(latent)).unflatten(-1, (-1, sum(self.expanded_widths)))
        k, v = expanded.split(self.expanded_widths, -1)
        k_rotated = k_rotated.unsqueeze(-2)  # one head, which all heads share
        assert self.rope is not None
        positions = None if documents is None else documents.positions
        q_rotated, k_rotated = self.rope(q_rotated, positions), self.rope(k_rotated, positions)
        q = torch.cat((q, q_rotated), -1)
        k = torch.cat((k, k_rotated.expand(-1, -1, k.shape[-2], -1)), -1)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.cache is not None:
            k, v = self.cache.append(k, v, None)
        attended = attend(q, k, v, self.options, documents)
        return self.wo(attended.transpose(1, 2).flatten(-2))

    def _queries(self, x: Tensor) -> Tensor:
        if self.wq is not None:
            return self.wq(x)
        assert self.wq_a is not None and self.q_norm is not None and self.wq_b is not None
        return self.wq_b(self.q_norm(self.wq_a(x)))


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm of each channel over all tokens of the microbatch. Evaluation uses the running statistics. The input
    may be bf16 while parameters and statistics are fp32. The kernels then compute in fp32, and the output is bf16."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape; training needs at least two tokens."""
        normalized = super().forward(x.reshape(-1, x.shape[-1]))
        # FSDP2 warns if an output is a view for autograd, because an in-place operation on it would drop FSDP2's hooks.
        # `_unsafe_view`, which `nn.Linear` uses too, copies nothing, but for autograd its result is not a view.
        return torch.ops.aten._unsafe_view(normalized, x.shape)


class RMSNorm(nn.RMSNorm):
    """Division of each token's channels by their root mean square (arXiv:1910.07467)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape."""
        # On a CPU the norm consists of several operations, and each contributes to the input's gradient. `view_as`
        # makes autograd add these contributions first, and then the gradient of the residual connection. A norm that is
        # an FSDP2 unit has the same order, so the gradient is bitwise equal in both cases.
        return super().forward(x.view_as(x))


class AllHeadsRMSNorm(RMSNorm):
    """RMSNorm of the channels of all heads of a token together (OLMo 2, arXiv:2501.00656)."""

    add_ranks: Callable[[Tensor], Tensor] | None = None
    """Function that sums a tensor over the ranks among which the heads are divided; None if this rank has all heads."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, channels of this rank's heads) to the same shape."""
        if self.add_ranks is None:
            return super().forward(x)
        wide, num_channels, eps = x.float(), self.normalized_shape[0], self.eps or torch.finfo(x.dtype).eps
        squares = self.add_ranks(wide.square().sum(-1, keepdim=True))
        return (wide * torch.rsqrt(squares / num_channels + eps) * self.weight).to(x.dtype)


class UnitOffsetRMSNorm(RMSNorm):
    """RMSNorm with the factor 1 + weight, which is computed in the weight's dtype (Gemma)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape."""
        # `view_as`: see `RMSNorm`
        return F.rms_norm(x.view_as(x), self.normalized_shape, self.weight + 1, self.eps)


def normalized(x: Tensor, norm: nn.Module | None) -> Tensor:
    """Return the result of a norm; the input if `norm` is None."""
    return x if norm is None else norm(x)


def build_norm(args: DecoderArgs, dim: int, eps: float | None = None) -> nn.Module:
    """Return a norm over `dim` channels, of the kind that the arguments name. `eps`: None for `norm_eps`."""
    eps = args.norm_eps if eps is None else eps
    if args.norm == "batchnorm":
        return BatchNorm(dim, eps=eps, momentum=args.batchnorm_momentum)
    if args.norm == "layernorm":
        return nn.LayerNorm(dim, eps=eps)
    return (UnitOffsetRMSNorm if args.norm_unit_offset else RMSNorm)(dim, eps=eps)


def build_head_norm(args: DecoderArgs, width: int) -> nn.Module:
    """Return a norm of queries or keys (`qk_norm`): over each head, or over all heads. `width`: number of channels of
    all heads together."""
    is_over_all = args.qk_norm_over == "all_heads"
    return AllHeadsRMSNorm(width, args.norm_eps) if is_over_all else build_norm(args, args.head_width)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class FeedForward(nn.Module):
    """The feed-forward layer: w2(activation(w1 x) * w3 x), such as SwiGLU (arXiv:2002.05202). Without a gate, it is
    w2(activation(w1 x))."""

    def __init__(self, args: DecoderArgs, hidden_dim: int):
        super().__init__()
        self.activation = ACTIVATIONS[args.activation]
        self.w1 = nn.Linear(args.dim, hidden_dim, bias=args.feed_forward_bias)
        self.w2 = nn.Linear(hidden_dim, args.dim, bias=args.feed_forward_bias)
        self.w3 = nn.Linear(args.dim, hidden_dim, bias=args.feed_forward_bias) if args.gated else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., dim) to the same shape."""
        if self.w3 is None:
            return self.w2(self.activation(self.w1(x)))
        return self.w2(self.activation(self.w1(x)) * self.w3(x))
