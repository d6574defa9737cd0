"""`[model.args.experts]`: the mixture of experts that replaces the feed-forward layers of a decoder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from titan_launch.config.sections.section import Section
from titan_launch.models.args import Parts, Width

NonNegative = Annotated[int, Field(ge=0)]
Weight = Annotated[float, Field(ge=0)]


class ExpertArgs(Section):
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

    first_dense_layers: NonNegative = 0
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
        """Yield (names of the arguments, reason) for each contradiction between arguments."""
        experts, groups, chosen, top_k = self.num_experts, self.num_groups, self.top_k_groups, self.top_k
        if top_k > experts:
            yield ("top_k", "num_experts"), f"top_k ({top_k}) must not exceed num_experts ({experts})"
        if experts % groups:
            yield ("num_groups", "num_experts"), f"num_groups ({groups}) must divide num_experts ({experts})"
        elif chosen > groups:
            yield ("top_k_groups", "num_groups"), f"top_k_groups ({chosen}) must not exceed num_groups ({groups})"
        elif groups > 1 and experts // groups < 2:
            reason = f"num_groups ({groups}) leaves one expert in each group, but a group needs two"
            yield ("num_groups", "num_experts"), reason
        elif groups > 1 and top_k > chosen * (experts // groups):
            allowed = f"the {chosen * (experts // groups)} experts that top_k_groups ({chosen}) allows"
            reason = f"top_k ({top_k}) must not exceed {allowed}"
            yield ("top_k", "top_k_groups", "num_groups"), reason

    def unused(self) -> Iterator[tuple[str, str]]:
        """Yield (argument, reason and remedy) for each argument whose value is not the default, but has no effect
        because of other arguments."""
        balance = ("selection_bias_rate", "balance_loss")
        for names, others, has_no_effect in (
            (("num_groups",), f"top_k_groups = {self.top_k_groups}, all groups", self.top_k_groups == self.num_groups),
            (balance, f"top_k = {self.top_k}, all experts", self.top_k == self.num_experts),
        ):
            for name, _ in self.changed(*names) if has_no_effect else ():
                yield name, f"has no effect with {others}; remove this argument"

    def effective(self) -> dict[str, Any]:
        """Return the arguments that decide the outputs. The auxiliary losses are omitted. `selection_bias_rate` becomes
        0 if it is set, because the biases change the outputs, but their rate does not."""
        table = self.model_dump(mode="json", exclude={"balance_loss", "z_loss"})
        return {**table, "selection_bias_rate": None if self.selection_bias_rate is None else 0.0}

    def twin(self) -> dict[str, Any]:
        """Return all arguments, with small sizes and the same structure: at most 4 experts without groups, else at most
        8 in at most 4 groups. If a token of the job uses one, several or all experts, so does a token of the twin."""
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
