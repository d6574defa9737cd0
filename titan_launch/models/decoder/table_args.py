"""The tables in `[model.args]` of decoders: `rope_scaling`, `latent_attention` and `experts`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_launch.models.args import ArgsTable, NumTokens, Parts, Width

PositiveFloat = Annotated[float, Field(gt=1e-30, le=1e30)]
"""A positive number whose square and inverse square are finite and not 0."""

Weight = Annotated[float, Field(ge=0)]


class RopeScaling(ArgsTable):
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
    """With `yarn`: see `attention_factor`. With `latent_attention` and without `query_scale`, the attention scores are
    also multiplied by `m(mscale_all_dim) ** 2` (DeepSeek-V3)."""

    @property
    def rotated_factor(self) -> float:
        """Factor of rotated queries and keys. With `yarn`: `attention_factor` or, if that key is unset, its default.
        With other kinds: 1."""
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
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.kind == "llama3" and low >= high:
            reason = f"low_freq_factor ({low}) must be below high_freq_factor ({high})"
            yield ("low_freq_factor", "high_freq_factor"), reason
        if self.kind == "yarn" and self.beta_fast <= self.beta_slow:
            reason = f"beta_fast ({self.beta_fast}) must be above beta_slow ({self.beta_slow})"
            yield ("beta_fast", "beta_slow"), reason

    def unused(self) -> Iterator[tuple[str, str]]:
        for name, _ in self.changed(*_OF_SCALINGS):
            if self.kind not in _OF_SCALINGS[name]:
                yield name, f'has no effect with kind = "{self.kind}"; remove this argument'


_OF_SCALINGS = {
    "low_freq_factor": ("llama3",),
    "high_freq_factor": ("llama3",),
    "original_max_position": ("llama3", "yarn"),
    **dict.fromkeys(("beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"), ("yarn",)),
}
"""Arguments of `RopeScaling` that have an effect only with some kinds, each with these kinds."""


class LatentAttentionArgs(ArgsTable):
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
        for name in ("qk_rope_head_dim", "qk_nope_head_dim", "kv_lora_rank"):
            if (value := getattr(self, name)) % 2:
                reason = "must be even: rotary embedding rotates pairs of channels"
                yield (name,), f"{name} ({value}) {reason}, and each pair must begin at an even channel"

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


class ExpertArgs(ArgsTable):
    """Sizes, routing and load balancing of the experts (arXiv:1701.06538). A router sends each token to a few experts,
    which are feed-forward layers. The outputs of these experts are added with weights from the router. No token is
    dropped."""

    num_experts: Parts
    """Number of experts in a layer."""

    top_k: Parts
    """Number of experts that process each token."""

    hidden_dim: Width
    """Width of the hidden layer of each expert."""

    shared_hidden_dim: Width | None = None
    """Width of the hidden layer of a shared expert, a feed-forward layer that processes every token (DeepSeek). Unset:
    there is no shared expert."""

    first_dense_layers: Annotated[int, Field(ge=0)] = 0
    """Number of layers at the beginning that have the dense feed-forward layer instead of experts (DeepSeek)."""

    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the router's logits to the scores of the experts."""

    normalize: bool = True
    """Divide the scores of the chosen experts by their sum, so that the weights of a token add up to 1."""

    scale: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the weights, after they are normalized (DeepSeek-V3)."""

    num_groups: Parts = 1
    """Number of groups of consecutive experts. A token uses only experts of `top_k_groups` groups. These are the groups
    whose two best experts have the largest sum of scores and selection biases (DeepSeek-V3)."""

    top_k_groups: Parts = 1
    """Number of groups from which the experts of one token may come."""

    router_bias: bool = False
    """Add a bias to the router's logits (GPT-OSS)."""

    expert_bias: bool = False
    """Add biases in the experts (GPT-OSS)."""

    gate_limit: Annotated[float, Field(gt=0)] | None = None
    """Limit of the inputs of an expert's gate. With a limit L, the hidden layer is `g * sigmoid(1.702 g) * (u + 1)`
    (GPT-OSS). `g` is `w1 x`, clamped to at most L. `u` is `w3 x`, clamped to the range from -L to L. Unset: the hidden
    layer is `activation(w1 x) * w3 x`."""

    selection_bias_rate: Weight | None = None
    """Balance the load by a bias for each expert, which is added to the scores only to choose the experts of a token
    (DeepSeek-V3, arXiv:2408.15664). After each step that is not skipped, the bias of an expert rises by this number if
    its load is below the mean load, and falls by this number if its load is above. With 0, the biases keep their
    values. Unset: there are no biases."""

    balance_loss: Weight = 0.0
    """Weight of the auxiliary loss that balances the load within each sequence (DeepSeek-V3, arXiv:2412.19437). The
    loss is E * sum(f * p) over the E experts of a layer. f is the number of the sequence's tokens that chose an expert,
    divided by `tokens * top_k`. p is the mean, over the tokens, of the expert's score divided by the sum of the token's
    scores. With an equal load, the loss is 1. The losses of all layers are added."""

    z_loss: Weight = 0.0
    """Weight of the router's z-loss: the mean over tokens of the squared logsumexp of the logits (ST-MoE,
    arXiv:2202.08906). The losses of all layers are added."""

    def problems(self) -> Iterator[tuple[tuple[str, ...], str]]:
        experts, groups, chosen, top_k = self.num_experts, self.num_groups, self.top_k_groups, self.top_k
        if top_k > experts:
            yield ("top_k", "num_experts"), f"top_k ({top_k}) must not exceed num_experts ({experts})"
        if experts % groups:
            yield ("num_groups", "num_experts"), f"num_groups ({groups}) must divide num_experts ({experts})"
        elif chosen > groups:
            yield ("top_k_groups", "num_groups"), f"top_k_groups ({chosen}) must not exceed num_groups ({groups})"
        elif groups > 1 and experts // groups < 2:
            reason = f"num_groups ({groups}) leaves one expert in each group, but a group needs two or more"
            yield ("num_groups", "num_experts"), reason
        elif groups > 1 and top_k > chosen * (experts // groups):
            allowed = f"the {chosen * (experts // groups)} experts that top_k_groups ({chosen}) allows"
            reason = f"top_k ({top_k}) must not exceed {allowed}"
            yield ("top_k", "top_k_groups", "num_groups"), reason

    def unused(self) -> Iterator[tuple[str, str]]:
        if self.top_k_groups == self.num_groups > 1:
            reason = f"has no effect with top_k_groups = {self.top_k_groups} (all groups)"
            yield "num_groups", f"{reason}; remove both arguments"
        for name, _ in self.changed("selection_bias_rate", "balance_loss") if self.top_k == self.num_experts else ():
            yield name, f"has no effect with top_k = {self.top_k} (all experts); remove this argument"

    def effective(self) -> dict[str, Any]:
        """Return the arguments that decide the outputs. The auxiliary losses are omitted. `selection_bias_rate` becomes
        0 if it is set, because the biases change the outputs, but their rate does not."""
        table = self.model_dump(mode="json", exclude={"balance_loss", "z_loss"})
        return {**table, "selection_bias_rate": None if self.selection_bias_rate is None else 0.0}

    def twin(self) -> dict[str, Any]:
        """Return all arguments, with small sizes and the same structure: at most 4 experts without groups, else at most
        8 in at most 4 groups. A token of the twin uses one, several or all experts, like a token of the job."""
        groups = min(self.num_groups, 4)
        experts = min(self.num_experts, 4 if groups == 1 else 8 // groups * groups)
        top_k = experts if self.top_k == self.num_experts else min(self.top_k, 2)
        return {
            **self.model_dump(mode="json"),
            "num_experts": experts,
            "top_k": top_k,
            "num_groups": groups,
            "top_k_groups": groups if self.top_k_groups == self.num_groups else min(self.top_k_groups, groups - 1),
            "hidden_dim": min(self.hidden_dim, 16),
            "shared_hidden_dim": None if self.shared_hidden_dim is None else min(self.shared_hidden_dim, 24),
        }
