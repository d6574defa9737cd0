"""`[model.args.rope_scaling]` and `[model.args.latent_attention]` of decoders."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_launch.config.sections.section import Section
from titan_launch.models.args import NumTokens, Parts, Width

PositiveFloat = Annotated[float, Field(gt=1e-30, le=1e30)]
"""A positive number whose square and inverse square are finite and not 0."""


class RopeScaling(Section):
    """Scaling of rotary frequencies, for sequences longer than those of pre-training."""

    kind: Literal["llama3", "linear", "yarn"] = "llama3"
    """`llama3`: low frequencies are divided by `factor` (Llama 3.1). `linear`: all frequencies are divided by `factor`
    (Gemma 3). `yarn`: low frequencies are divided by `factor`, and rotated queries and keys are multiplied by
    `attention_factor` (YaRN, arXiv:2309.00071; DeepSeek-V3, GPT-OSS)."""

    factor: Annotated[float, Field(ge=1, le=1e30)] = 8.0
    """Divisor of the frequencies."""

    low_freq_factor: PositiveFloat = 1.0
    """With `llama3`: wavelengths longer than `original_max_position / low_freq_factor` are scaled fully."""

    high_freq_factor: PositiveFloat = 4.0
    """With `llama3`: wavelengths shorter than `original_max_position / high_freq_factor` are not scaled. Between the
    two wavelengths the scaling changes smoothly."""

    original_max_position: NumTokens = 8192
    """With `llama3` and `yarn`: sequence length of pre-training."""

    beta_fast: PositiveFloat = 32.0
    """With `yarn`: pairs of channels that make more turns than this within `original_max_position` tokens are not
    scaled."""

    beta_slow: PositiveFloat = 1.0
    """With `yarn`: pairs of channels that make fewer turns than this within `original_max_position` tokens are scaled
    fully. Between the pairs of `beta_fast` and `beta_slow`, the scaling changes linearly with the index of the pair."""

    truncate: bool = True
    """With `yarn`: round the index of the pair of `beta_fast` down, and the index of the pair of `beta_slow` up.
    GPT-OSS does not round."""

    attention_factor: PositiveFloat | None = None
    """With `yarn`: factor of rotated queries and keys. Unset: `m(mscale) / m(mscale_all_dim)` if both are set, else
    `m(1)`, where `m(x)` is `0.1 x ln(factor) + 1`."""

    mscale: PositiveFloat | None = None
    """With `yarn`: see `attention_factor`."""

    mscale_all_dim: PositiveFloat | None = None
    """With `yarn`: see `attention_factor`. With `latent_attention`, the attention scores are also multiplied by
    `m(mscale_all_dim) ** 2` (DeepSeek-V3), unless `query_scale` is set."""

    @property
    def rotated_factor(self) -> float:
        """Factor of rotated queries and keys. With `yarn` it is `attention_factor` or, if that is unset, its default;
        else 1."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is None or self.mscale_all_dim is None:
            return self._magnitude(1.0)
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def score_factor(self) -> float:
        """Factor of the scores of latent attention: `m(mscale_all_dim) ** 2` if `kind` is `yarn` and `mscale_all_dim`
        is set; else 1."""
        is_scaled = self.kind == "yarn" and self.mscale_all_dim is not None
        return self._magnitude(self.mscale_all_dim or 0.0) ** 2 if is_scaled else 1.0

    def _magnitude(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        """Yield (names of the arguments, reason) for each contradiction between arguments."""
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and low >= high:
            reason = f"low_freq_factor ({low}) must be below high_freq_factor ({high})"
            yield ("low_freq_factor", "high_freq_factor"), reason
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            reason = f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow})"
            yield ("beta_fast", "beta_slow"), reason

    def unused(self) -> Iterator[str]:
        """Yield the arguments whose value is not the default, but has no effect with this `kind` of scaling."""
        yield from (name for name, _ in self.changed(*_OF_SCALINGS) if self.kind not in _OF_SCALINGS[name])


_OF_SCALINGS = {
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "original_max_position": ("llama3", "yarn"),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"), ("yarn",)),
}
"""Arguments of `RopeScaling` that have an effect only with some kinds, each with these kinds."""


class LatentAttentionArgs(Section):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). Each head's queries and keys have channels
    with and without rotary embedding. A token's values, and its keys without rotary embedding, are computed for all
    heads from one vector, its latent. All heads share the token's key with rotary embedding."""

    q_lora_rank: Width | None = None
    """Width of the latent vectors of queries. Unset: queries are computed without a latent vector."""

    kv_lora_rank: Width
    """Width of the latent vectors of keys and values."""

    qk_nope_head_dim: Parts
    """Number of channels of a head of queries and keys without rotary embedding."""

    qk_rope_head_dim: Parts
    """Number of channels of a head of queries and keys with rotary embedding."""

    v_head_dim: Parts
    """Width of a head of values."""

    norm_eps: Annotated[float, Field(gt=0)] = 1e-6
    """Epsilon of the norms of the latents, which is added to the variance."""

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

    def twin(self) -> dict[str, Any]:
        """Return all arguments, with small sizes and the same structure."""
        small = {"kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
        if self.q_lora_rank is not None:
            small["q_lora_rank"] = 16
        return {**self.model_dump(mode="json"), **small}
