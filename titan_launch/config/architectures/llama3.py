"""`[model.args]` of `llama3`, and its size table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from titan_launch.config.architectures.base import ModelArgs
from titan_launch.config.sections.base import Section

Positive = Annotated[int, Field(ge=1)]
NormKind = Literal["rmsnorm", "layernorm", "batchnorm"]


class RopeScaling(Section):
    """Scaling of rotary frequencies in Llama 3.1, for sequences longer than those of pre-training."""

    factor: Annotated[float, Field(ge=1)] = 8.0
    """Divisor of the low frequencies."""

    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths longer than `original_max_position / low_freq_factor` are scaled fully."""

    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths shorter than `original_max_position / high_freq_factor` are not scaled. Between the two wavelengths
    the scaling changes smoothly."""

    original_max_position: Positive = 8192
    """Sequence length of pre-training."""


class Llama3Args(ModelArgs):
    """Sizes and options of a Llama 3 model."""

    supports_tensor_parallel: ClassVar[bool] = True
    supports_context_parallel: ClassVar[bool] = True  # tokens interact only in attention

    dim: Positive
    """Width of the residual stream."""

    n_layers: Positive
    """Number of blocks."""

    n_heads: Positive
    """Number of query heads. It must divide `dim`."""

    n_kv_heads: Positive
    """Number of key and value heads (grouped-query attention). It must divide `n_heads`."""

    hidden_dim: Positive
    """Width of the feed-forward layer (SwiGLU)."""

    vocab_size: Positive
    """Number of rows of the embedding: at least the tokenizer's vocabulary size."""

    norm: NormKind = "rmsnorm"
    """Kind of the normalization layers. `batchnorm` normalizes each channel over all tokens of a microbatch. A token's
    output then depends on later tokens: see `docs/how_to/batchnorm.md`."""

    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Number added to the variance."""

    batchnorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a microbatch in the running statistics of `batchnorm`."""

    rope_theta: Annotated[float, Field(gt=1)] = 500_000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Frequency scaling of Llama 3.1. Unset: no scaling."""

    tie_embeddings: bool = False
    """Share one weight between the embedding and the output layer."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.n_heads

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield a problem for each contradiction between `dim`, `n_heads` and `n_kv_heads`."""
        dim, n_heads, n_kv_heads = self.dim, self.n_heads, self.n_kv_heads
        if n_heads % n_kv_heads:
            yield ("n_kv_heads", "n_heads"), f"n_heads ({n_heads}) must be a multiple of n_kv_heads ({n_kv_heads})"
        if dim % n_heads:
            yield ("n_heads", "dim"), f"dim ({dim}) must be a multiple of n_heads ({n_heads})"
        elif self.head_dim % 2:
            reason = f"the width of a head, dim / n_heads, must be even for rotary embeddings, but is {self.head_dim}"
            yield ("n_heads", "dim"), reason

    def flops_per_sample(self, seq_len: int) -> int:
        """Return the FLOPs of forward and backward for one sequence."""
        return seq_len * flops_per_token(self, seq_len)

    def checkpointed_block_flops(self, seq_len: int, saves_costly_ops: bool) -> int:
        """Return the FLOPs per sequence that activation checkpointing of one block adds."""
        return seq_len * checkpointed_flops_per_token(self, seq_len, saves_costly_ops)

    def num_layers(self) -> int:
        """Return the number of blocks."""
        return self.n_layers

    def tied_by(self) -> str | None:
        """Return the argument that ties the output layer to the embedding."""
        return "tie_embeddings" if self.tie_embeddings else None

    def tensor_parallel_sizes(self) -> Mapping[str, int]:
        """Return the numbers of heads, the width of the feed-forward layer, and the vocabulary size, by argument."""
        names = ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
        return {name: int(getattr(self, name)) for name in names}

    def batchnorm_over_tokens(self) -> str | None:
        """Return the setting in `[model.args]` that selects BatchNorm, such as `norm = "batchnorm"`; None for other
        norms."""
        return 'norm = "batchnorm"' if self.norm == "batchnorm" else None


def num_parameters(args: Llama3Args) -> int:
    """Return the number of parameters of the model. Shared parameters count once.

    D = `dim`, F = `hidden_dim`, V = `vocab_size`, L = `n_layers`, K = `n_kv_heads * head_dim`:

        embedding   V D
        block       attention 2 D D + 2 D K (wq, wo; wk, wv), feed-forward 3 D F, two norms
        head        one norm, output V D unless tied

    A norm has D weights; `layernorm` and `batchnorm` also have D biases.
    """
    norm = args.dim if args.norm == "rmsnorm" else 2 * args.dim
    embedding = args.vocab_size * args.dim
    output = 0 if args.tie_embeddings else embedding
    return embedding + args.n_layers * (_block_matmul_weights(args) + 2 * norm) + norm + output


def flops_per_token(args: Llama3Args, seq_len: int) -> int:
    """Return the FLOPs of forward and backward per token: 6 N + 12 L D T.

    N is the number of weights that are multiplied with every token: the matrices of the blocks and the output layer
    (tied or not). The embedding is a look-up, and does not count. Each weight takes a multiplication and an addition in
    forward, and twice that in backward. Attention adds 4 D T per layer in forward (scores and weighted sum: D T
    multiply-adds each), and twice that in backward. Every pair of tokens counts, although causal attention needs half
    of the pairs. Activation checkpointing does not count. PaLM (arXiv:2204.02311, appendix B) and TorchTitan use the
    same convention, so MFUs can be compared.
    """
    matmul_weights = args.n_layers * _block_matmul_weights(args) + args.vocab_size * args.dim
    return 6 * matmul_weights + 12 * args.n_layers * args.dim * seq_len


def checkpointed_flops_per_token(args: Llama3Args, seq_len: int, saves_costly_ops: bool) -> int:
    """Return the FLOPs per token that activation checkpointing of one block adds, counted as in `flops_per_token`.

    The second forward stops after the last tensor that backward needs: the input of `w2`. It repeats all products but
    that of `w2`: 2 (N_block - D F) + 4 D T. `selective_ac_option = "op"` saves attention and every second matrix
    product. Of wq, wk, wv, wo, w1, w3, w2, in this order, the second forward then repeats wk, wo and w3.
    """
    dim, kv_dim = args.dim, args.n_kv_heads * args.head_dim
    if saves_costly_ops:
        return 2 * (dim * kv_dim + dim * dim + dim * args.hidden_dim)
    return 2 * (_block_matmul_weights(args) - dim * args.hidden_dim) + 4 * dim * seq_len


def _block_matmul_weights(args: Llama3Args) -> int:
    kv_dim = args.n_kv_heads * args.head_dim
    return 2 * args.dim * args.dim + 2 * args.dim * kv_dim + 3 * args.dim * args.hidden_dim


_LLAMA_3: dict[str, Any] = {"n_kv_heads": 8, "vocab_size": 128_256}
_LLAMA_3_1 = {**_LLAMA_3, "rope_scaling": {"factor": 8.0}}
_LLAMA_3_2 = {**_LLAMA_3, "rope_scaling": {"factor": 32.0}, "tie_embeddings": True}

# Llama 3.1 (8B, 70B, 405B) and 3.2 (1B, 3B) have the sizes published with their weights. `debug` is for the byte
# tokenizer on a CPU.
FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 768, "vocab_size": 320},
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "hidden_dim": 8192, **_LLAMA_3_2},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "hidden_dim": 8192, **_LLAMA_3_2},
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "hidden_dim": 14_336, **_LLAMA_3_1},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "hidden_dim": 28_672, **_LLAMA_3_1},
    "405B": {"dim": 16_384, "n_layers": 126, "n_heads": 128, "hidden_dim": 53_248, **_LLAMA_3_1},
}
