"""`[kernels]`: which of CUDA's kernels compute attention and matrix products, and how exactly."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Section

AttentionBackend = Literal["cudnn", "flash", "efficient", "math"]


class KernelsConfig(Section):
    """Which kernels compute attention and matrix products, and how exactly. The defaults are exact where a precision
    rule says float32."""

    attention: Literal["auto", AttentionBackend] = "auto"
    """What `F.scaled_dot_product_attention` runs. `auto`: on a GPU the first that can be used of `cudnn`, `flash`,
    `efficient` and `math` (before Hopper, `flash` comes first), which the log names with the reasons against those
    before it; on a CPU PyTorch's own choice, or this launcher's blocks of tokens for causal attention in short
    sequences, where these are faster. One of them: PyTorch's, or an error. `math` stores all scores."""

    float32_precision: Literal["ieee", "tf32"] = "ieee"
    """Matrix products and convolutions of float32 tensors on a GPU. `tf32`: their factors are rounded to 10 bits of
    mantissa, on matrix units that are several times faster; sums stay float32. What a rule computes in float32 is then
    no more exact than that. (PyTorch itself takes `tf32` for convolutions only.)"""

    bf16_reduced_precision_reduction: bool = True
    """Whether cuBLAS may add up the parts of a divided bfloat16 product in bfloat16, which is PyTorch's default and
    faster. The sums within a part are float32 in any case."""
