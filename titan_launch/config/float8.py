"""`[float8]`: matrix products in 8-bit floating point, by torchao."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Array, Section


class Float8Config(Section):
    """The products of linear layers, forward and backward, in 8-bit floating point, on factors scaled as they come, by
    torchao (`pip install torchao`). Parameters stay as they are, and are gathered in `precision.param_dtype`, or with
    `all_gather` in 8 bits. For GPUs with such units: NVIDIA from compute capability 8.9 (H100, H200, B200, L40S)."""

    enable: bool = False
    """Convert. Worth it with `compile.enable` only: without it every scaling is a kernel of its own."""

    recipe: Literal["rowwise", "rowwise_with_gw_hp", "tensorwise"] = "rowwise"
    """A scale for each row, which is the most exact; the same with the gradients of the weights in bfloat16; or one for
    each tensor, which is the fastest."""

    modules: Array[str] = ()
    """Globs of the modules whose linear layers are converted, those inside included. Default: those of all blocks that
    no rule computes in another dtype than bfloat16. Not the head, which is the most sensitive."""

    all_gather: bool = False
    """Gather converted weights in 8 bits instead of `precision.param_dtype`: each rank rounds its shards before. For
    `tensorwise` only: the scale of a weight is that of its shards on all ranks, found once after each step."""

    emulate: bool = False
    """Round to 8 bits, and multiply in the computation's dtype: for trying out numerics where there are no such
    units."""
