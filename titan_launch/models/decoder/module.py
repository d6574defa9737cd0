"""Decoders: Llama 3 (arXiv:2407.21783), Qwen 2.5 and 3, Mistral, Mixtral, Gemma 2 and 3, GPT-2, GPT-OSS, Phi-3,
OLMo 2 and DeepSeek-V3.

    tokens -> tok_embeddings [-> pos_embeddings]
           -> n_layers x [ x + attention(attention_norm(x)), x + feed_forward(ffn_norm(x)) or x + moe(ffn_norm(x)) ]
           -> norm -> output -> logits

A family is a table of arguments (`titan_launch.models.decoder.args`). The arguments decide which of these modules
exist. Module names are the same as in TorchTitan and in Meta's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from titan_launch.models.decoder.args import DecoderArgs
from titan_launch.models.decoder.attention import Documents
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.models.decoder.layers import (
    ACTIVATIONS,
    Attention,
    CappedLinear,
    FeedForward,
    LatentAttention,
    LearnedPositions,
    RotaryEmbedding,
    ScaledEmbedding,
    build_norm,
    normalized,
)
from titan_launch.models.decoder.mixture_of_experts import MixtureOfExperts
from titan_launch.models.initializers import Fill, InitTable, constant, normal, truncated_normal
from titan_launch.models.spec import AttentionHeads, ModelSpec, TensorStyle


class TransformerBlock(nn.Module):
    """A transformer block: attention and a feed-forward layer, each with a residual connection. With `pre_norms` each
    has a norm before it, and with `post_norms` a norm after it.

    `moe`, a mixture of experts, takes the place of `feed_forward` in the layers that have experts.
    """

    def __init__(self, args: DecoderArgs, window: int | None, rope: RotaryEmbedding | None, has_experts: bool):
        super().__init__()
        self.attention_norm = build_norm(args, args.dim) if args.pre_norms else None
        self.attention = Attention(args, window, rope) if args.latent_attention is None else LatentAttention(args, rope)
        self.attention_post_norm = build_norm(args, args.dim) if args.post_norms else None
        self.ffn_norm = build_norm(args, args.dim) if args.pre_norms else None
        self.feed_forward = None if has_experts else FeedForward(args, args.hidden_dim)
        self.moe = build_experts(args) if has_experts else None
        self.ffn_post_norm = build_norm(args, args.dim) if args.post_norms else None

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        attended = self.attention(normalized(x, self.attention_norm), documents)
        x = x + normalized(attended, self.attention_post_norm)
        layer = self.moe if self.feed_forward is None else self.feed_forward
        assert layer is not None
        return x + normalized(layer(normalized(x, self.ffn_norm)), self.ffn_post_norm)


def build_experts(args: DecoderArgs) -> MixtureOfExperts:
    """Return the mixture of experts of a layer."""
    experts = args.experts
    assert experts is not None
    shared = None if experts.shared_hidden_dim is None else FeedForward(args, experts.shared_hidden_dim)
    return MixtureOfExperts(args.dim, experts, ACTIVATIONS[args.activation], shared)


class Decoder(nn.Module):
    """A decoder model for sequences of up to `max_seq_len` tokens."""

    def __init__(self, args: DecoderArgs, max_seq_len: int):
        super().__init__()
        is_rotary = args.positions == "rope"
        self.rope = self.local_rope = None
        if is_rotary:
            self.rope = RotaryEmbedding(args.rotary_width, max_seq_len, args.rope_theta, args.rope_scaling)
            if args.local_rope_theta is not None:
                self.local_rope = RotaryEmbedding(args.rotary_width, max_seq_len, args.local_rope_theta)
        self.tok_embeddings = (ScaledEmbedding if args.scale_embeddings else nn.Embedding)(args.vocab_size, args.dim)
        self.pos_embeddings = None if is_rotary else LearnedPositions(args.num_positions, args.dim)
        self._windows = [args.window_of(index) for index in range(args.n_layers)]
        self.layers = nn.ModuleList()
        for layer, window in enumerate(self._windows):
            rope = self.rope if window is None or self.local_rope is None else self.local_rope
            self.layers.append(TransformerBlock(args, window, rope, args.has_experts(layer)))
        self.norm = build_norm(args, args.dim)
        if args.logits_soft_cap is None or args.num_labels is not None:
            self.output = nn.Linear(args.dim, args.num_labels or args.vocab_size, bias=False)
        else:
            self.output = CappedLinear(args.dim, args.vocab_size, args.logits_soft_cap)
        if args.tied_by() is not None:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Map token ids (batch, tokens) to logits (batch, tokens, vocab_size), or (batch, tokens, num_labels).
        `documents`: the document number of each token (batch, tokens); None if each sequence is one document."""
        separated = None if documents is None else Documents(documents, self._windows)
        x = self.tok_embeddings(tokens)
        if self.pos_embeddings is not None:
            x = self.pos_embeddings(x, None if separated is None else separated.positions)
        for layer in self.layers:
            x = layer(x, separated)
        return self.output(self.norm(x))


def llama_values(args: DecoderArgs) -> InitTable:
    """Return TorchTitan's initial values: logits have a standard deviation near 1, and deeper blocks add less to the
    residual stream.

    A tied embedding gets the values of the output layer. With the standard deviation of an untied embedding, 1, the
    logits would have a standard deviation of `sqrt(dim)`.
    """
    output, linear = truncated_normal(args.dim**-0.5), truncated_normal(0.02)
    return _init_table(
        args,
        embedding=output if args.tied_by() is not None else normal(1.0),
        positions=linear,
        linear=linear,
        into_stream=[truncated_normal(0.02 / (2 * (index + 1)) ** 0.5) for index in range(args.n_layers)],
        output=output,
    )


def gpt2_values(args: DecoderArgs) -> InitTable:
    """Return GPT-2's initial values: normal, with a smaller standard deviation for the matrices whose outputs are added
    to the residual stream."""
    linear, into_stream = normal(0.02), normal(0.02 / (2 * args.n_layers) ** 0.5)
    return _init_table(args, linear, normal(0.01), linear, [into_stream] * args.n_layers, linear)


def normal_values(args: DecoderArgs) -> InitTable:
    """Return the initial values of Hugging Face's models: normal, with the published `initializer_range` of 0.02."""
    linear = normal(0.02)
    return _init_table(args, linear, linear, linear, [linear] * args.n_layers, linear)


def _init_table(
    args: DecoderArgs, embedding: Fill, positions: Fill, linear: Fill, into_stream: Sequence[Fill], output: Fill
) -> InitTable:
    """Return the table of initial values. `into_stream`: for each layer, the values of `wo` and `w2`, whose outputs are
    added to the residual stream."""
    norms = ("layers.*.*_norm", "layers.*.attention.*_norm", "norm")
    norm_values = {
        "weight": constant(0.0 if args.norm_unit_offset else 1.0),
        "bias": constant(0.0),
        "running_mean": constant(0.0),
        "running_var": constant(1.0),
        "num_batches_tracked": constant(0),
    }
    return InitTable(
        [
            ("*rope.*", None),
            ("tok_embeddings.weight", embedding),
            ("pos_embeddings.weight", positions),
            ("pos_embeddings.rows", lambda rows: torch.arange(len(rows), out=rows)),
            ("output.weight", output),
            ("layers.*.attention.w[qkv].weight", linear),
            ("layers.*.attention.w*_[ab].weight", linear),
            ("layers.*.feed_forward.w[13].weight", linear),
            ("layers.*.moe.shared_experts.w[13].weight", linear),
            ("layers.*.moe.experts.w[13]", linear),
            ("layers.*.moe.router.weight", linear),
            ("layers.*.moe.experts.b?", constant(0.0)),
            ("layers.*.moe.selection_bias", constant(0.0)),
            ("layers.*.moe.load", constant(0.0)),
            ("layers.*.moe.auxiliary_losses", constant(0.0)),
            ("layers.**.bias", constant(0.0)),
            ("layers.*.attention.sinks.weight", linear),
            *((f"{norm}.{name}", fill) for norm in norms for name, fill in norm_values.items()),
            *(
                (f"layers.{index}.{name}", fill)
                for index, fill in enumerate(into_stream)
                for name in (
                    "attention.wo.weight",
                    "feed_forward.w2.weight",
                    "moe.experts.w2",
                    "moe.shared_experts.w2.weight",
                )
            ),
        ]
    )


TENSOR_PARALLEL: dict[str, TensorStyle] = {
    "tok_embeddings": "embedding",
    "pos_embeddings": "positions",
    "layers.*.*_norm": "sequence",
    "layers.*.attention": "input",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.w*_a": "latent",
    "layers.*.attention.*_norm": "heads",
    "layers.*.attention.w*_b": "by_head",
    "layers.*.attention.sinks": "by_head",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward": "input",
    "layers.*.feed_forward.w[13]": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "layers.*.moe": "mixture",
    "layers.*.moe.router": "router",
    "layers.*.moe.experts": "experts",
    "layers.*.moe.shared_experts.w[13]": "shared_colwise",
    "layers.*.moe.shared_experts.w2": "shared_rowwise",
    "norm": "sequence",
    "output": "head",
}


def attention_heads(args: DecoderArgs, seq_len: int) -> AttentionHeads | None:
    """Return the numbers of heads and features of plain causal attention; None if no layer has plain causal
    attention."""
    is_cut = all(args.is_cut(layer, seq_len) for layer in range(args.n_layers))
    if is_cut or args.attention_soft_cap is not None or args.attention_sinks:
        return None
    latent = args.latent_attention
    queries_from = "wq" if latent is None or latent.q_lora_rank is None else "wq_b"
    value_width = args.head_width if latent is None else latent.v_head_dim
    return AttentionHeads(
        args.n_heads, args.n_kv_heads, args.head_width, value_width, f"layers.*.attention.{queries_from}"
    )


def _spec(initial_values: Callable[[DecoderArgs], InitTable]) -> ModelSpec:
    return ModelSpec(
        build=Decoder,
        blocks=("layers.*",),
        head=("norm", "output"),
        embeddings=("tok_embeddings", "pos_embeddings"),
        initializer=initial_values,
        pipeline_order=("tok_embeddings", "pos_embeddings", "layers.*", "norm", "output"),
        tensor_parallel=TENSOR_PARALLEL,
        context_parallel={"rope.table": 0, "local_rope.table": 0, "pos_embeddings.rows": 0},
        attention=attention_heads,
    )


SPECS = {
    **{family: _spec(normal_values) for family in FAMILIES},
    "llama3": _spec(llama_values),
    "gpt2": _spec(gpt2_values),
}
