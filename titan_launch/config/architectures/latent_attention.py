"""`[model.args.latent_attention]`: multi-head latent attention, in place of grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from titan_launch.config.architectures.base import Parts, Width
from titan_launch.config.sections.base import Section


class LatentAttentionArgs(Section):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The keys and values of all heads are
    computed from one vector of a token, its latent. Each head's queries and keys have channels with and without rotary
    embedding, and all heads share a token's rotated key."""

    q_lora_rank: Width | None = None
    """Width of the latents of queries. Unset: queries are computed without a latent."""

    kv_lora_rank: Width
    """Width of the latents of keys and values."""

    qk_nope_head_dim: Parts
    """Number of channels of a head of queries and keys without rotary embedding."""

    qk_rope_head_dim: Parts
    """Number of channels of a head of queries and keys with rotary embedding."""

    v_head_dim: Parts
    """Width of a head of values."""

    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Number added to the variance of the latents, which are normalized."""

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (names of the arguments, reason) for each contradiction between arguments."""
        for name in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"):
            if (value := getattr(self, name)) % 2:
                yield (
                    (name,),
                    f"{name} must be even, because rotary embedding rotates pairs of channels, but is {value}",
                )

    @property
    def head_width(self) -> int:
        """Width of a head of queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim
