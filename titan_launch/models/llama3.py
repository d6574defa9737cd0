"""Llama 3, 3.1 and 3.2 (arXiv:2407.21783): a decoder-only transformer.

    tokens -> tok_embeddings -> n_layers x [ x + attention(attention_norm(x)), x + feed_forward(ffn_norm(x)) ]
           -> norm -> output -> logits

Module names are those of TorchTitan and Meta, not of Hugging Face. The arguments, and the formulas of parameters and
FLOPs, are in `titan_launch.config.architectures.llama3`.
"""

from __future__ import annotations

from torch import Tensor, nn

from titan_launch.config.architectures.llama3 import Llama3Args
from titan_launch.models.initializers import InitTable, constant, from_reset_parameters, normal, truncated_normal
from titan_launch.models.layers import Attention, FeedForward, RotaryEmbedding, build_norm
from titan_launch.models.spec import AttentionHeads, ModelSpec, TensorStyle


class TransformerBlock(nn.Module):
    """A transformer block: attention and a feed-forward layer, each with a norm before it and a residual connection."""

    def __init__(self, args: Llama3Args, rope: RotaryEmbedding):
        super().__init__()
        self.attention_norm = _norm(args)
        self.attention = Attention(args.dim, args.n_heads, args.n_kv_heads, rope)
        self.ffn_norm = _norm(args)
        self.feed_forward = FeedForward(args.dim, args.hidden_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map (batch, tokens, dim) to the same shape."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama3(nn.Module):
    """A Llama model for sequences of up to `max_seq_len` tokens."""

    def __init__(self, args: Llama3Args, max_seq_len: int):
        super().__init__()
        self.rope = RotaryEmbedding(args.head_dim, max_seq_len, args.rope_theta, args.rope_scaling)
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(TransformerBlock(args, self.rope) for _ in range(args.n_layers))
        self.norm = _norm(args)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids (batch, tokens) to logits (batch, tokens, vocab_size)."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def _norm(args: Llama3Args) -> nn.Module:
    return build_norm(args.norm, args.dim, args.norm_eps, args.batchnorm_momentum)


def initial_values(args: Llama3Args) -> InitTable:
    """Return TorchTitan's initial values: the logits' standard deviation is near 1, and deeper blocks add less.

    A tied embedding gets the values of the output matrix. With an embedding's usual standard deviation of 1, the
    logits would have a standard deviation of `sqrt(dim)`.
    """
    output = truncated_normal(args.dim**-0.5)
    linear = truncated_normal(0.02)
    norms = ("layers.*.*_norm", "norm")
    into_stream = ("attention.wo", "feed_forward.w2")
    return InitTable(
        [
            ("rope.*", from_reset_parameters),
            ("tok_embeddings.weight", output if args.tie_embeddings else normal(1.0)),
            ("output.weight", output),
            ("layers.*.attention.w[qkv].weight", linear),
            ("layers.*.feed_forward.w[13].weight", linear),
            *((f"{norm}.{name}", fill) for norm in norms for name, fill in _NORM_VALUES.items()),
            *(
                (f"layers.{index}.{name}.weight", truncated_normal(0.02 / (2 * (index + 1)) ** 0.5))
                for index in range(args.n_layers)
                for name in into_stream
            ),
        ]
    )


_NORM_VALUES = {
    "weight": constant(1.0),
    "bias": constant(0.0),
    "running_mean": constant(0.0),
    "running_var": constant(1.0),
    "num_batches_tracked": constant(0),
}

TENSOR_PARALLEL: dict[str, TensorStyle] = {
    "tok_embeddings": "embedding",
    "layers.*.*_norm": "sequence",
    "layers.*.attention": "input",
    "layers.*.attention.w[qkv]": "colwise",
    "layers.*.attention.wo": "rowwise",
    "layers.*.feed_forward": "input",
    "layers.*.feed_forward.w[13]": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
    "norm": "sequence",
    "output": "head",
}

SPEC = ModelSpec(
    build=Llama3,
    blocks=("layers.*",),
    head=("norm", "output"),
    embeddings=("tok_embeddings",),
    initializer=initial_values,
    pipeline_order=("tok_embeddings", "layers.*", "norm", "output"),
    tensor_parallel=TENSOR_PARALLEL,
    context_parallel={"**.rope.table": 0},
    attention=lambda args: AttentionHeads(args.n_heads, args.n_kv_heads, args.head_dim, "layers.*.attention.wq"),
)
