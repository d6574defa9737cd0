"""`[model.args]` of the decoder families: Llama, Qwen, Mistral, Gemma, GPT-2, GPT-OSS, Phi, OLMo and DeepSeek.

`titan_launch.models.decoder.families` has their size tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from titan_launch.core.errors import toml_string
from titan_launch.models.args import MOST_LAYERS, MOST_PARTS, Layers, ModelArgs, NumTokens, Parts, TwinNeeds, Width
from titan_launch.models.decoder.table_args import ExpertArgs, LatentAttentionArgs, PositiveFloat, RopeScaling

Theta = Annotated[float, Field(gt=1, le=1e30)]
NormKind = Literal["rmsnorm", "layernorm", "batchnorm"]
Activation = Literal["silu", "gelu_tanh"]


class DecoderArgs(ModelArgs):
    """Sizes and options of a decoder: a transformer whose tokens attend to earlier tokens."""

    supports_tensor_parallel: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = True  # tokens interact only in attention
    supports_labels: ClassVar[bool] = True

    dim: Width
    """Width of the residual stream."""

    n_layers: Layers
    """Number of blocks."""

    n_heads: Parts
    """Number of query heads. If neither `head_dim` nor `latent_attention` is set, this number must divide `dim`."""

    n_kv_heads: Parts
    """Number of key and value heads (grouped-query attention). It must divide `n_heads`."""

    head_dim: Parts | None = None
    """Width of one attention head. Unset: `dim / n_heads`. `latent_attention` has widths of its own."""

    latent_attention: LatentAttentionArgs | None = None
    """Multi-head latent attention (DeepSeek-V3). Each query head has its own keys, so `n_kv_heads` must equal
    `n_heads`. Unset: grouped-query attention."""

    hidden_dim: Width
    """Width of the hidden layer of the feed-forward layer. It has no effect if all layers have experts."""

    vocab_size: NumTokens
    """Number of rows of the token embedding: at least the tokenizer's vocabulary size."""

    norm: NormKind = "rmsnorm"
    """Kind of the normalization layers. `batchnorm` normalizes each channel over all tokens of a microbatch. A token's
    output then depends on later tokens: see `docs/how_to/batchnorm.md`."""

    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the normalization layers, which is added to the variance (with `rmsnorm`: to the mean square)."""

    batchnorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a microbatch in the running statistics; with `batchnorm.momentum_per = "step"`, weight of a step."""

    norm_unit_offset: bool = False
    """Add 1 to the weights of the norms, and initialize these weights with 0 (Gemma). Only for `rmsnorm`."""

    pre_norms: bool = True
    """Normalize the inputs of attention and of the feed-forward layer. OLMo 2 normalizes the outputs instead."""

    post_norms: bool = False
    """Normalize the outputs of attention and of the feed-forward layer (Gemma, OLMo 2)."""

    positions: Literal["rope", "learned"] = "rope"
    """Kind of the position embedding. `rope`: rotary embedding of queries and keys. `learned`: a table whose rows are
    added to the token embeddings (GPT-2)."""

    rope_theta: Theta = 500_000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, except for layers with `local_rope_theta`. Keys that a job sets replace the
    same keys of the flavor's table. If the job changes `kind`, its table replaces the whole table of the flavor. Unset:
    the flavor's table; if it has none, there is no scaling."""

    local_rope_theta: Theta | None = None
    """Base of the rotary frequencies of layers with a sliding window (Gemma 3). Unset: `rope_theta`."""

    max_positions: NumTokens | None = None
    """Number of rows of the table of `learned` positions. Sequences cannot be longer."""

    qkv_bias: bool = False
    """Add a bias to queries, keys and values (Qwen 2.5, GPT-2, GPT-OSS)."""

    attention_output_bias: bool = False
    """Add a bias to the output of attention (GPT-2, GPT-OSS)."""

    feed_forward_bias: bool = False
    """Add biases in the feed-forward layer (GPT-2)."""

    qk_norm: bool = False
    """Normalize queries and keys before rotary embedding (Qwen 3, Gemma 3, OLMo 2)."""

    qk_norm_over: Literal["head", "all_heads"] = "head"
    """Channels that `qk_norm` normalizes together. `head`: the channels of each head. `all_heads`: the channels of all
    heads of a token, where each channel has its own weight (OLMo 2). Only for `rmsnorm`."""

    sliding_window: NumTokens | None = None
    """Number of tokens that a token attends to, itself included. Unset: all earlier tokens."""

    full_attention_every: NumTokens | None = None
    """If this is N, the layers N, 2 N and so on, counted from 1, have no sliding window. Unset: all layers have the
    window."""

    full_attention_layers: Annotated[list[Layers], Field(max_length=MOST_LAYERS)] | None = None
    """Numbers of the layers without a sliding window, counted from 1, if they are not every N-th layer. Unset:
    `full_attention_every` decides."""

    attention_sinks: bool = False
    """Add a learned logit for each head to the denominator of the softmax, so that a token may attend to nothing
    (GPT-OSS; attention sinks, arXiv:2309.17453)."""

    attention_soft_cap: PositiveFloat | None = None
    """Cap of the attention scores: `cap * tanh(score / cap)` (Gemma 2). Unset: no cap."""

    logits_soft_cap: PositiveFloat | None = None
    """Cap of the logits: `cap * tanh(logit / cap)` (Gemma 2). Unset: no cap."""

    query_scale: PositiveFloat | None = None
    """Factor of the attention scores. Unset: `head_dim ** -0.5`. With `latent_attention`, unset means
    `(qk_nope_head_dim + qk_rope_head_dim) ** -0.5`, times the factor of `mscale_all_dim` in `rope_scaling`."""

    activation: Activation = "silu"
    """Activation function of the feed-forward layer. `gelu_tanh`: GELU in its approximation with tanh."""

    gated: bool = True
    """Gate the feed-forward layer: `w2(activation(w1 x) * w3 x)`. `false`: `w2(activation(w1 x))`, without `w3`."""

    experts: ExpertArgs | None = None
    """Mixture of experts in place of the feed-forward layers. Keys that a job sets replace the same keys of the
    flavor's table. Unset: the flavor's experts; if it has none, all layers are dense."""

    tie_embeddings: bool = False
    """Share one weight between the embedding and the output layer."""

    scale_embeddings: bool = False
    """Multiply token embeddings by `sqrt(dim)` (Gemma)."""

    num_labels: Annotated[int, Field(ge=1, le=MOST_PARTS)] | None = None
    """Number of outputs of the output layer: the classes of a classifier, or 1 for a reward model. The output layer
    then has a weight of its own, whatever `tie_embeddings` is. Unset: a language model, with `vocab_size` outputs."""

    @property
    def head_width(self) -> int:
        """Width of one head of queries and keys, whether or not `head_dim` is set."""
        if self.latent_attention is not None:
            return self.latent_attention.head_width
        return self.head_dim or self.dim // self.n_heads

    @property
    def rotary_width(self) -> int:
        """Number of channels of a head with rotary embedding."""
        return self.head_width if self.latent_attention is None else self.latent_attention.qk_rope_head_dim

    @property
    def score_scale(self) -> float:
        """Factor of the attention scores, whether or not `query_scale` is set."""
        if self.query_scale is not None:
            return self.query_scale
        is_latent, scaling = self.latent_attention is not None, self.rope_scaling
        return self.head_width**-0.5 * (scaling.score_factor if is_latent and scaling is not None else 1.0)

    @property
    def query_width(self) -> int:
        """Width of all query heads together."""
        return self.n_heads * self.head_width

    @property
    def attended_width(self) -> int:
        """Width of the outputs of all heads together."""
        latent = self.latent_attention
        return self.query_width if latent is None else self.n_heads * latent.v_head_dim

    @property
    def kv_width(self) -> int:
        """Width of all key heads together. Without `latent_attention`, it is also the width of all value heads."""
        return self.n_kv_heads * self.head_width

    @property
    def num_positions(self) -> int:
        """Rows of the table of learned positions; 0 with rotary embedding."""
        return (self.max_positions or 0) if self.positions == "learned" else 0

    def window_of(self, layer: int) -> int | None:
        """Return the sliding window of a layer in tokens; None if tokens attend to all earlier tokens in this layer.
        `layer` counts from 0."""
        every, full = self.full_attention_every, self.full_attention_layers or ()
        is_full = layer + 1 in full or (every is not None and (layer + 1) % every == 0)
        return None if is_full else self.sliding_window

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer has a mixture of experts in place of the feed-forward layer. `layer` counts from 0."""
        return self.experts is not None and layer >= self.experts.first_dense_layers

    @property
    def num_expert_layers(self) -> int:
        """Number of layers with a mixture of experts."""
        return sum(map(self.has_experts, range(self.n_layers)))

    # `ModelArgs` documents the methods below that have no docstring.

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        dim, n_heads, n_kv_heads, n_layers = self.dim, self.n_heads, self.n_kv_heads, self.n_layers
        if n_heads % n_kv_heads:
            yield ("n_kv_heads", "n_heads"), f"n_heads ({n_heads}) must be a multiple of n_kv_heads ({n_kv_heads})"
        width = ("n_heads", "dim") if self.head_dim is None else ("head_dim",)
        if self.latent_attention is not None:
            yield from self._problems_of_latent_attention()
        elif self.head_dim is None and dim % n_heads:
            yield width, f"dim ({dim}) must be a multiple of n_heads ({n_heads})"
        elif self.positions == "rope" and self.head_width % 2:
            kind = "the width of a head, dim / n_heads," if self.head_dim is None else "head_dim"
            yield width, f"{kind} must be even for rotary embeddings, but is {self.head_width}"
        if self.positions == "learned" and self.max_positions is None:
            reason = "needs a table of positions; set max_positions to the length of the longest sequence"
            yield ("positions", "max_positions"), reason
        if self.norm_unit_offset and self.norm != "rmsnorm":
            reason = f'norm_unit_offset is for norm = "rmsnorm", but norm = "{self.norm}"; set norm_unit_offset = false'
            yield ("norm_unit_offset", "norm"), reason
        if not (self.pre_norms or self.post_norms):
            reason = "pre_norms = false and post_norms = false leave the blocks without norms; set one of them to true"
            yield ("pre_norms", "post_norms"), reason
        if self.qk_norm_over == "all_heads" and (self.norm != "rmsnorm" or self.norm_unit_offset):
            reason = 'qk_norm_over = "all_heads" is for norm = "rmsnorm" with norm_unit_offset = false'
            yield ("qk_norm_over", "norm", "norm_unit_offset"), f"{reason}; remove qk_norm_over"
        if self.qk_norm and self.norm == "batchnorm":
            reason = (
                'qk_norm normalizes the heads of one token, which norm = "batchnorm" cannot do; set qk_norm = false'
            )
            yield ("qk_norm", "norm"), reason
        if self.full_attention_every is not None and self.full_attention_layers is not None:
            reason = "full_attention_layers and full_attention_every both name the layers without a window; remove one"
            yield ("full_attention_layers", "full_attention_every"), reason
        if beyond := [layer for layer in self.full_attention_layers or () if layer > n_layers]:
            yield ("full_attention_layers", "n_layers"), f"has {beyond[0]}; write numbers up to n_layers ({n_layers})"
        for table, args in self._tables():
            for names, reason in args.problems():
                yield tuple(f"{table}.{name}" for name in names), reason
        if self.experts is not None:
            if self.num_expert_layers == 0:
                reason = f"leaves no layer with experts, because n_layers is {n_layers}; write {n_layers - 1} or less"
                yield ("experts.first_dense_layers", "n_layers"), reason
            if not self.gated:
                yield ("gated", "experts"), "experts must be gated; remove gated = false, or the table experts"

    def _problems_of_latent_attention(self) -> Iterator[tuple[tuple[str, ...], str]]:
        if self.n_kv_heads != self.n_heads:
            reason = f"n_kv_heads ({self.n_kv_heads}) must equal n_heads ({self.n_heads}) with latent_attention"
            yield ("n_kv_heads", "n_heads", "latent_attention"), f"{reason}, in which each head has keys of its own"
        for name, allowed, why in (
            ("positions", "rope", "which needs rotary embedding"),
            ("norm", ("rmsnorm", "layernorm"), "which normalizes the latent of each token"),
            ("sliding_window", None, "whose layers attend to all earlier tokens"),
            ("attention_sinks", False, "which has no sinks"),
            ("qk_norm", False, "which normalizes latents, not heads"),
            ("qkv_bias", False, "whose matrices have no biases"),
        ):
            value = getattr(self, name)
            if value not in (allowed if isinstance(allowed, tuple) else (allowed,)):
                shown = toml_string(value) if isinstance(value, str) else str(value).lower()
                reason = f"{name} = {shown} is not supported with latent_attention, {why}"
                yield (name, "latent_attention"), f"{reason}; remove one of them"

    def unused(self) -> Iterator[tuple[str, str]]:
        rope = ("rope_theta", "rope_scaling", "local_rope_theta")
        of_windows = ("full_attention_every", "full_attention_layers", "local_rope_theta")
        for names, reason, has_no_effect in (
            (rope, 'with positions = "learned"', self.positions == "learned"),
            (("max_positions",), 'with positions = "rope"', self.positions == "rope"),
            (of_windows, "without sliding_window", self.sliding_window is None),
            (("head_dim",), "with latent_attention", self.latent_attention is not None),
            (("qk_norm_over",), "without qk_norm", not self.qk_norm),
            (("logits_soft_cap",), "with num_labels", self.num_labels is not None),
        ):
            for name, _ in self.changed(*names) if has_no_effect else ():
                yield name, f"has no effect {reason}; remove this argument"
        for table, args in self._tables():
            for name, reason in args.unused() if table != "rope_scaling" or self.positions == "rope" else ():
                yield f"{table}.{name}", reason

    def _tables(self) -> Iterator[tuple[str, RopeScaling | LatentAttentionArgs | ExpertArgs]]:
        """Yield (name, table) for each table of arguments that is set."""
        for name in ("rope_scaling", "latent_attention", "experts"):
            if (table := getattr(self, name)) is not None:
                yield name, table

    def effective(self) -> dict[str, Any]:
        table = super().effective()
        table["head_dim"] = self.head_width
        table["query_scale"] = self.score_scale
        if self.experts is not None:
            table["experts"] = self.experts.effective()
            if self.num_expert_layers == self.n_layers:
                del table["hidden_dim"]
        if self.rope_scaling is None and table.get("local_rope_theta") is None:
            table["local_rope_theta"] = self.rope_theta
        if self.norm != "batchnorm":
            del table["batchnorm_momentum"]
        return table

    def longest_sequence(self) -> tuple[str, int] | None:
        return ("max_positions", self.num_positions) if self.num_positions else None

    def beyond_causal_attention(self, seq_len: int) -> str | None:
        if self.attention_soft_cap is not None:
            return f"attention_soft_cap = {self.attention_soft_cap}"
        if self.attention_sinks:
            return "attention_sinks = true"
        if any(self.is_cut(layer, seq_len) for layer in range(self.n_layers)):
            return f"sliding_window = {self.sliding_window}"
        return None

    def is_cut(self, layer: int, seq_len: int) -> bool:
        """Return True if the sliding window of a layer excludes earlier tokens in a sequence of `seq_len` tokens.
        `layer` counts from 0."""
        window = self.window_of(layer)
        return window is not None and window < seq_len

    def num_layers(self) -> int:
        return self.n_layers

    def tied_by(self) -> str | None:
        return "tie_embeddings" if self.tie_embeddings and self.num_labels is None else None

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        sizes = {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads}
        if self.num_expert_layers < self.n_layers:
            sizes["hidden_dim"] = self.hidden_dim
        if self.experts is not None:
            sizes["experts.hidden_dim"] = self.experts.hidden_dim
            if self.experts.shared_hidden_dim is not None:
                sizes["experts.shared_hidden_dim"] = self.experts.shared_hidden_dim
        labels = {} if self.num_labels is None else {"num_labels": self.num_labels}
        return {**sizes, "vocab_size": self.vocab_size, **labels}

    def width(self) -> int | None:
        return self.dim

    def beyond_mup(self) -> Iterator[str]:
        if self.tied_by() is not None:
            yield "a weight that the embedding and the output layer share; set model.args.tie_embeddings = false"
        if self.scale_embeddings:
            yield "embeddings that are multiplied by a function of the width"
        if self.latent_attention is not None:
            yield "latent attention"

    def num_experts(self) -> int | None:
        return None if self.experts is None else self.experts.num_experts

    def experts_per_token(self) -> int | None:
        return None if self.experts is None else self.experts.top_k

    def batchnorm_over_tokens(self) -> str | None:
        return 'norm = "batchnorm"' if self.norm == "batchnorm" else None

    def twin(self, needs: TwinNeeds) -> dict[str, Any]:
        kv_heads = min(self.n_kv_heads, 2)
        heads = kv_heads * min(self.n_heads // self.n_kv_heads, 2)
        has_own_width = self.head_dim is not None and self.head_dim * self.n_heads != self.dim
        width = min(self.head_width, 8)
        sizes: dict[str, Any] = {
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "head_dim": None if self.head_dim is None else width,
            "dim": 4 * width if has_own_width and heads != 4 else heads * width + 8 * has_own_width,
            "hidden_dim": needs.rows(self.hidden_dim, 48),
            "vocab_size": needs.rows(self.vocab_size, 64),
            "query_scale": self.query_scale,
        }
        if self.latent_attention is not None:
            sizes["latent_attention"] = self.latent_attention.twin()
            sizes["dim"] = 32
        if self.max_positions is not None:
            sizes["max_positions"] = min(self.max_positions, max(32, needs.twin_seq_len))
        if self.sliding_window is not None and self.sliding_window < needs.seq_len:
            sizes["sliding_window"] = min(self.sliding_window, needs.twin_seq_len // 2 - 1)
        if self.experts is not None:
            sizes["experts"] = self.experts.twin()
        return {**sizes, **self._twin_layers(needs)}

    def _twin_layers(self, needs: TwinNeeds) -> dict[str, Any]:
        """Return the arguments that reduce the twin's number of layers; {} if it needs all layers. With them, the twin
        has two or more layers, and each combination of (sliding window or not, experts or not) that this decoder's
        layers have."""

        def kinds(args: DecoderArgs) -> set[tuple[bool, bool]]:
            return {(args.window_of(layer) is None, args.has_experts(layer)) for layer in range(args.n_layers)}

        first = self.n_layers if needs.keeps_depth else min(self.n_layers, max(2, needs.stages))
        for n_layers in range(first, self.n_layers):
            changes: dict[str, Any] = {"n_layers": n_layers}
            if self.full_attention_every is not None:
                changes["full_attention_every"] = min(self.full_attention_every, 2)
            if self.full_attention_layers is not None:
                changes["full_attention_layers"] = [n_layers]
            if self.experts is not None:
                dense = min(self.experts.first_dense_layers, 1)
                changes["experts"] = self.experts.model_copy(update={"first_dense_layers": dense})
            if kinds(self.model_copy(update=changes)) == kinds(self):
                if self.experts is not None:
                    changes["experts"] = {**self.experts.twin(), "first_dense_layers": dense}
                return changes
        return {}
