"""`[model.args]` of `llama3`, and its size table."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from titan_launch.config.base import Section

Positive = Annotated[int, Field(ge=1)]


class RopeScaling(Section):
    """How Llama 3.1 stretches its rotary frequencies to sequences longer than those of pre-training."""

    factor: Annotated[float, Field(ge=1)] = 8.0
    """The low frequencies are divided by it."""

    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    """Wavelengths longer than `original_max_position / low_freq_factor` are scaled fully."""

    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    """Wavelengths shorter than `original_max_position / high_freq_factor` are not scaled; between the two, smoothly."""

    original_max_position: Positive = 8192
    """Sequence length of pre-training."""


class Llama3Args(Section):
    """The shape of a Llama 3."""

    dim: Positive
    """Width of the residual stream."""

    n_layers: Positive
    """Number of blocks."""

    n_heads: Positive
    """Query heads; `dim` is divided among them."""

    n_kv_heads: Positive
    """Key and value heads (grouped-query attention); divides `n_heads`."""

    hidden_dim: Positive
    """Width of the feed-forward layer (SwiGLU)."""

    vocab_size: Positive
    """Rows of the embedding; at least the tokenizer's vocabulary."""

    norm: Literal["rmsnorm", "layernorm", "batchnorm"] = "rmsnorm"
    """The normalization. `batchnorm` normalizes each channel over all tokens of a microbatch, which lets a token see
    statistics of later ones: see `docs/precision.md`."""

    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the variance."""

    batchnorm_momentum: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of a microbatch in the running statistics of `batchnorm`."""

    rope_theta: Annotated[float, Field(gt=1)] = 500_000.0
    """Base of the rotary frequencies."""

    rope_scaling: RopeScaling | None = None
    """Llama 3.1's frequency scaling. Unset: none."""

    tie_embeddings: bool = False
    """Whether the output layer shares the embedding's weight."""


_LLAMA_3: dict[str, Any] = {"n_kv_heads": 8, "vocab_size": 128_256}
_LLAMA_3_1 = {**_LLAMA_3, "rope_scaling": {"factor": 8.0}}
_LLAMA_3_2 = {**_LLAMA_3, "rope_scaling": {"factor": 32.0}, "tie_embeddings": True}

# Llama 3.1 (8B, 70B, 405B) and 3.2 (1B, 3B) as published with their weights; `debug` is for the byte tokenizer on a CPU.
FLAVORS: dict[str, dict[str, Any]] = {
    "debug": {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4, "hidden_dim": 768, "vocab_size": 320},
    "1B": {"dim": 2048, "n_layers": 16, "n_heads": 32, "hidden_dim": 8192, **_LLAMA_3_2},
    "3B": {"dim": 3072, "n_layers": 28, "n_heads": 24, "hidden_dim": 8192, **_LLAMA_3_2},
    "8B": {"dim": 4096, "n_layers": 32, "n_heads": 32, "hidden_dim": 14_336, **_LLAMA_3_1},
    "70B": {"dim": 8192, "n_layers": 80, "n_heads": 64, "hidden_dim": 28_672, **_LLAMA_3_1},
    "405B": {"dim": 16_384, "n_layers": 126, "n_heads": 128, "hidden_dim": 53_248, **_LLAMA_3_1},
}
