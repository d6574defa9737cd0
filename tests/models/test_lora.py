"""Adapters in one process: the start, merged weights, and targets that cannot have one."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models import parity
from titan_launch.config.sections.model import LoRAConfig, ModelConfig
from titan_launch.core.errors import ConfigError
from titan_launch.models.blocks import choose_blocks
from titan_launch.models.build import build_model
from titan_launch.models.decoder.huggingface_classes import FAMILIES
from titan_launch.models.decoder.huggingface_tensors import pieces_of
from titan_launch.models.huggingface.config_json import arguments_of
from titan_launch.models.init import allocate, initialize
from titan_launch.models.lora import LoRA, adapters_of, add_adapters, delta

ARGS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}
CAPPED = {"logits_soft_cap": 5.0, "scale_embeddings": True}
MIXTURE = {**ARGS, "experts": {"num_experts": 4, "top_k": 2, "hidden_dim": 24, "first_dense_layers": 1}}
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
    for module in adapters:
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.05)
    with torch.no_grad():
        before, expected = base(tokens), adapted(tokens)
        parameters, weights = dict(adapted.named_parameters()), dict(base.named_parameters())
        for adapter in adapters_of(adapted):
            a, b = parameters[adapter.a], parameters[adapter.b]
            weights[adapter.weight] += delta(a, b, adapter.scale, adapter.is_embedding)
        merged = base(tokens)
    assert float((expected - before).abs().max()) > 1e-2
    assert float((merged - expected).abs().max()) < 1e-5


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
        (
            ["small"],
            ("lora", "rank"),
            "is above 3, the smaller dimension of the weight of small; set 3 or less, or name only larger",
        ),
        (["attention.*"], ("lora", "targets"), "whose weight nn.MultiheadAttention reads without a call of the layer"),
        (["own"], ("lora", "targets"), "own (OwnProduct), whose forward (OwnProduct.forward) does not call super()"),
        (["all-linear"], ("lora", "targets", 0), "finds no linear layers in the model's blocks; name other blocks"),
        (["output"], ("lora", "targets"), "output (Linear), which shares its weight with embedding, so no adapter"),
    ],
)
def test_targets_that_cannot_have_an_adapter(targets: list[str], key: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        add_adapters(Net(), LoRAConfig(targets=tuple(targets), rank=8 if "small" not in targets[0] else 4))
    assert [problem.key for problem in caught.value.problems] == [key]
    assert reason in caught.value.problems[0].reason


NAMES_OF_PEFT = (
    ("Llama 2", ["q_proj", "v_proj", "mlp.down_proj"]),
    ("Llama 2", ["all-linear"]),
    ("Llama 2", ["model.layers.1.self_attn.o_proj", "embed_tokens", "lm_head"]),
    ("Gemma 2", ["self_attn.o_proj", "gate_proj"]),
    ("Gemma 2", ["all-linear"]),
    ("GPT-2", ["c_attn", "c_proj"]),
    ("Phi-3", ["qkv_proj", "gate_up_proj"]),
    ("GPT-OSS", ["k_proj", "o_proj"]),
    ("Mixtral", ["all-linear"]),
    ("DeepSeek-V3", ["q_a_proj", "kv_b_proj", "o_proj"]),
)


@pytest.mark.parametrize(("case", "names"), NAMES_OF_PEFT)
def test_names_as_in_peft_choose_the_modules_that_peft_chooses(case: str, names: list[str]) -> None:
    """For the model of this package, compared by the tensors of the adapted weights, and for that of `transformers`."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    model_type, keys = parity.CASES[case]
    table = transformers.AutoConfig.for_model(model_type, **keys)
    with torch.device("meta"):
        theirs, same = (transformers.AutoModelForCausalLM.from_config(table) for _ in range(2))
    wanted = "all-linear" if names == ["all-linear"] else names
    peft.inject_adapter_in_model(peft.LoraConfig(r=1, target_modules=wanted), theirs)
    adapted = (path for path, module in theirs.named_modules() if isinstance(module, peft.tuners.lora.LoraLayer))
    expected = {path.removesuffix(".base_layer") for path in adapted if not path.endswith("mlp.gate")}  # no routers

    config = LoRAConfig(targets=tuple(names), rank=1)
    own = ModelConfig(name=FAMILIES[model_type].name, flavor="none", args=arguments_of(table.to_dict()))
    module = build_model(own, 16, lora=config).module
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    pieces = pieces_of(model_type, shapes, None)
    tensors = (pieces[adapter.weight].tensor.removesuffix(".weight") for adapter in adapters_of(module))
    assert {re.sub(r"block_sparse_moe.experts.*", "mlp.experts", tensor) for tensor in tensors} == expected
    if model_type not in ("gpt2", "mixtral"):  # Conv1D computes its own product, and so do the experts
        add_adapters(same, config, choose_blocks(same).paths)
        assert {adapter.weight.removesuffix(".weight") for adapter in adapters_of(same)} == expected


@pytest.mark.parametrize(
    ("name", "args", "target", "hint"),
    [
        ("llama3", ARGS, "self_attn", "self_attn of transformers is layers.*.attention.wq, layers.*.attention.wk, "),
        ("llama3", ARGS, "post_attention_layernorm", "matches only layers.0.ffn_norm (RMSNorm)"),
        ("gemma2", {**ARGS, "post_norms": True}, "post_attention_layernorm", "only layers.0.attention_post_norm"),
        ("qwen3_moe", MIXTURE, "up_proj", "write: layers.*.feed_forward.w3, layers.*.moe.experts"),
        ("llama3", ARGS, "experts", "matches no module of the model"),
        ("resnet", {}, "all-linear", "finds no linear layers in the model's blocks"),
    ],
)
def test_names_of_transformers_without_an_adapter(name: str, args: dict[str, Any], target: str, hint: str) -> None:
    flavor = "debug" if name == "resnet" else "none"
    with pytest.raises(ConfigError) as caught:
        build_model(ModelConfig(name=name, flavor=flavor, args=args), 16, lora=LoRAConfig(targets=(target,)))
    (problem,) = caught.value.problems
    assert problem.key == ("lora", "targets", 0) and hint in problem.reason


def test_an_end_of_a_path_is_no_glob_that_matches() -> None:
    """`output` is the output layer alone, although a path inside of the model ends in it, too."""
    module = nn.ModuleDict({"output": nn.Linear(4, 4), "block": nn.ModuleDict({"output": nn.Linear(4, 4)})})
    add_adapters(module, LoRAConfig(targets=("output",), rank=2))
    assert [adapter.weight for adapter in adapters_of(module)] == ["output.weight"]


def test_rules_that_no_adapter_can_follow() -> None:
    """A rank above the smaller side of a target, a rule behind another that takes its targets, and one without any."""
    rules = [{"match": ["small"], "rank": 4}, {"match": ["sm*"], "rank": 2}, {"match": ["norm"], "alpha": 1.0}]
    config = LoRAConfig.model_validate({"targets": ["small"], "rank": 2, "rules": rules})
    assert config.of("small").rank == 4 and config.of("smart").rank == 2 and config.of("other") is config
    with pytest.raises(ConfigError) as caught:
        add_adapters(Net(), config)
    keys = [("lora", "rules", 0, "rank"), ("lora", "rules", 1, "match"), ("lora", "rules", 2, "match")]
    assert [problem.key for problem in caught.value.problems] == keys


def test_a_rule_with_a_name_of_transformers_is_told_the_glob() -> None:
    config = LoRAConfig.model_validate({"targets": ["q_proj"], "rules": [{"match": ["q_proj"], "rank": 2}]})
    with pytest.raises(ConfigError, match=r"; q_proj of transformers is layers\.\*\.attention\.wq here"):
        build_model(ModelConfig(name="llama3"), 16, lora=config)
