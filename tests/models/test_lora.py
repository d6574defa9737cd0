"""Adapters in one process: the start, the merge, and targets that cannot have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.config.sections.lora import LoRAConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.core.errors import ConfigError
from titan_launch.models.build import build_model
from titan_launch.models.init import allocate, initialize
from titan_launch.models.lora import LoRA, adapters_of, add_adapters, merge

ARGS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}
CAPPED = {"logits_soft_cap": 5.0, "scale_embeddings": True}
CASES: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("llama3", ARGS, ("**",)),
    ("gemma2", {**ARGS, **CAPPED}, ("tok_embeddings", "layers.*.attention.*", "output")),
    ("llama3", {**ARGS, "positions": "learned", "max_positions": 16}, ("pos_embeddings", "layers.*.feed_forward.*")),
    ("llama3", {**ARGS, "experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 24}}, ("layers.*.moe.*",)),
)


def model(name: str, args: dict[str, Any], **lora: Any) -> nn.Module:
    """Return a model with its initial values."""
    built = build_model(ModelConfig(name=name, flavor="none", args=args), 16, lora=LoRAConfig(**lora))
    allocate(built.module, torch.device("cpu"))
    initialize(built.module, built.initializer, 0, torch.device("cpu"))
    return built.module


@pytest.mark.parametrize(("name", "args", "targets"), CASES)
def test_step_0_is_that_of_the_base_and_merged_equals_unmerged(
    name: str, args: dict[str, Any], targets: tuple[str, ...]
) -> None:
    tokens, base = torch.arange(32).view(2, 16), model(name, args)
    adapted = model(name, args, targets=targets, rank=4, rank_stabilized=True)
    assert torch.equal(base(tokens), adapted(tokens))
    adapters = [module for module in adapted.modules() if isinstance(module, LoRA)]
    assert len(adapters) == len(list(adapters_of(adapted))) > 1
    torch.manual_seed(0)
    for adapter in adapters:
        for parameter in adapter.parameters():
            nn.init.normal_(parameter, std=0.05)
    with torch.no_grad():
        before, expected = base(tokens), adapted(tokens)
        merge(adapted)
        merged = adapted(tokens)
    assert float((expected - before).abs().max()) > 1e-2
    assert float((merged - expected).abs().max()) < 1e-5
    assert [(path, type(child)) for path, child in adapted.named_modules()] == [
        (path, type(child)) for path, child in base.named_modules()
    ]


class OwnProduct(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.own = OwnProduct(8, 8, bias=False)
        self.conv = nn.Conv1d(8, 8, 3)
        self.small = nn.Linear(8, 3)
        self.embedding = nn.Embedding(9, 8)
        self.output = nn.Linear(8, 9, bias=False)
        self.output.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("targets", "key", "reason"),
    [
        (["smal"], ("lora", "targets", 0), 'matches no module of the model; did you mean "small"?'),
        (["small", "conv"], ("lora", "targets", 1), "matches only conv (Conv1d); adapters are for linear layers"),
        (["small"], ("lora", "rank"), "is above the smaller side of small, 3; set 3 or less, or name only larger"),
        (["attention.*"], ("lora", "targets"), "whose weight nn.MultiheadAttention reads without a call of the layer"),
        (["own"], ("lora", "targets"), "own (OwnProduct), whose forward (OwnProduct.forward) does not call super()"),
        (["output"], ("lora", "targets"), "output (Linear), which shares its weight with embedding, so it cannot be"),
    ],
)
def test_targets_that_cannot_have_an_adapter(targets: list[str], key: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        add_adapters(Net(), LoRAConfig(targets=tuple(targets), rank=8 if "small" not in targets[0] else 4))
    assert [problem.key for problem in caught.value.problems] == [key]
    assert reason in caught.value.problems[0].reason


def test_rules_that_no_adapter_can_follow() -> None:
    """A rank above the smaller side of a target, a rule behind another that takes its targets, and one without any."""
    rules = [{"match": ["small"], "rank": 4}, {"match": ["sm*"], "rank": 2}, {"match": ["norm"], "alpha": 1.0}]
    config = LoRAConfig.model_validate({"targets": ["small"], "rank": 2, "rules": rules})
    assert config.of("small").rank == 4 and config.of("smart").rank == 2 and config.of("other") is config
    with pytest.raises(ConfigError) as caught:
        add_adapters(Net(), config)
    keys = [("lora", "rules", 0, "rank"), ("lora", "rules", 1, "match"), ("lora", "rules", 2, "match")]
    assert [problem.key for problem in caught.value.problems] == keys
