"""Precision rules change the units of a model. With equal dtypes they change no bit."""

from __future__ import annotations

from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.models.huggingface_folders import CONFIGS, needs_transformers
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal, cross_entropy_sum, full_tensor
from tests.train.jobs import TINY_ARGS, planned_and_sharded, sharded_model
from titan_launch.config.job import JobConfig
from titan_launch.core.torch_release import MIXES_DTYPES_IN_UNIT
from titan_launch.parallel.fsdp import Accumulation

UNITS = ("model", "block", "module")


def gradients(model: nn.Module, mode: str, inputs: list[Tensor], targets: list[Tensor]) -> dict[str, Tensor]:
    """Return full gradients and buffers after the microbatches of a step."""
    strategy = Accumulation(JobConfig.model_validate({"gradient_accumulation": {"mode": mode}}).gradient_accumulation)
    for index, (x, y) in enumerate(zip(inputs, targets, strict=True)):
        strategy.begin_microbatch(model, is_last=index == len(inputs) - 1)
        output = model(x)
        cross_entropy_sum(getattr(output, "logits", output), y).backward()
    found = {name: full_tensor(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    return found | {name: full_tensor(buffer) for name, buffer in model.named_buffers()}


MODELS: dict[str, dict[str, Any]] = {
    **{norm: {"args": {**TINY_ARGS, "norm": norm}} for norm in ("rmsnorm", "layernorm", "batchnorm")},
    "batchnorm2d": {"name": "tests.parallel.conv_model:ConvNet"},
}
CLASSES = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "batchnorm": "BatchNorm1d", "batchnorm2d": "BatchNorm2d"}
CHECKPOINTING: list[dict[str, Any]] = [
    {"mode": "full"},
    {"mode": "selective", "selective_ac_option": "op"},
    {"mode": "selective", "selective_ac_option": 2},
]


def with_and_without_rules(norm: str, replicate: int, param_dtype: str) -> None:
    """Compare a run without rules and one with a rule that gives the norms the dtypes of the model (or, in bf16,
    BatchNorm's default)."""
    rule: dict[str, Any] = {"type": CLASSES[norm], "param_dtype": param_dtype}
    if "batch" in norm:
        rule |= {"param_dtype": "float32", "cast_forward_inputs": False}
    modes = ["immediate", "deferred", *(["deferred_all_reduce"] if replicate > 1 else [])]
    cases = [("immediate", unit_per, {"mode": "none"}) for unit_per in UNITS]
    cases += [(mode, "model", {"mode": "none"}) for mode in modes[1:]]
    cases += [("deferred", "model", checkpointing) for checkpointing in CHECKPOINTING]
    tokens = tokens_of_this_rank()

    def found(mode: str, rules: list[dict[str, Any]], checkpointing: dict[str, Any]) -> dict[str, Tensor]:
        job = {
            "model": MODELS[norm],
            "training": {"seq_len": 16},
            "precision": {"param_dtype": param_dtype, "rules": rules},
            "parallelism": {"data_parallel_replicate_degree": replicate},
            "activation_checkpoint": checkpointing,
        }
        return gradients(sharded_model(JobConfig.model_validate(job), 16), mode, tokens, tokens)

    plain = {mode: found(mode, [], {"mode": "none"}) for mode in modes}
    for mode, unit_per, checkpointing in cases:
        assert_equal(found(mode, [{**rule, "unit_per": unit_per}], checkpointing), plain[mode])


def tokens_of_this_rank() -> list[Tensor]:
    """Return the inputs of two microbatches. Their first token, by which `Unusual` chooses modules, is that of all
    ranks."""
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    tokens = [torch.randint(0, 61, (2, 16), generator=generator) for _ in range(2)]
    for index, microbatch in enumerate(tokens):
        microbatch[0, 0] = index
    return tokens


ON_RANKS = [(1, 1, "bfloat16"), (2, 1, "bfloat16"), (4, 2, "bfloat16"), (2, 1, "float32")]
"""Ranks, replicas, and the dtype of the model."""


@pytest.mark.parametrize(
    ("ranks", "replicate", "param_dtype", "norm"),
    rest_is_slow([(*division, norm) for division in ON_RANKS for norm in MODELS], len(MODELS) + 3),
)
def test_rules_with_the_models_dtypes_change_no_bit(ranks: int, replicate: int, param_dtype: str, norm: str) -> None:
    """Every division with every norm, or each division of one replica once."""
    run_ranks(with_and_without_rules, ranks, norm, replicate, param_dtype)


IN_BF16: dict[str, list[dict[str, Any]]] = {
    "norms": [{"type": "CLASS", "param_dtype": "float32"}],
    "norms, uncast": [{"type": "CLASS", "param_dtype": "float32", "cast_forward_inputs": False}],
    "norms, unset": [{"type": "CLASS"}],
    "attention around norms in bf16": [
        {"type": "CLASS", "param_dtype": "bfloat16"},
        {"match": "layers.*.attention", "param_dtype": "float32"},
    ],
    "head": [{"match": "output", "param_dtype": "float32", "output_dtype": "float32"}],
    "head and the norm before it": [
        {"match": "norm", "param_dtype": "float32", "output_dtype": "float32"},
        {"match": "output", "param_dtype": "float32", "output_dtype": "float32"},
    ],
    "embedding": [{"match": "tok_embeddings", "param_dtype": "float32"}],
}


class Handmade(nn.Module):
    """A block that casts by itself, and calls its modules by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mix = nn.LayerNorm(16), ByKeywords(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm(input=x.float()).to(x.dtype))
        return x + self.attention(states=x, others={"scale": x.float().mean(), "mask": None}).to(x.dtype)


class ByKeywords(nn.Module):
    """A module with a parameter and a norm, whose arguments are all keywords, and whose results are fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(16), nn.Parameter(torch.ones(16))

    def forward(self, *, states: Tensor, others: dict[str, Any]) -> Tensor:
        assert others["mask"] is None
        return self.norm(states).float() * self.scale.float() * others["scale"]


class ModelOfOthers(nn.Module):
    """A model whose blocks cast by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(61, 16), nn.Linear(16, 61)
        self.layers = nn.ModuleList(Handmade() for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(x)


QWEN3_EXPERTS = {
    **CONFIGS["llama"],
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
FP32 = {"param_dtype": "float32"}
BY_OTHERS: dict[str, tuple[dict[str, Any], list[list[dict[str, Any]]]]] = {
    "llama": (
        {"name": "huggingface", "args": CONFIGS["llama"]},
        [[{"type": "LlamaRMSNorm", **FP32}], [{"match": "model.layers.*.self_attn", **FP32}]],
    ),
    "norms in attention, experts": (
        {"name": "huggingface", "args": QWEN3_EXPERTS},
        [
            [{"match": "model.layers.*.self_attn.[qk]_norm", **FP32}],
            [{"type": "Qwen3MoeRMSNorm", **FP32}, {"match": "model.layers.*.mlp.gate", **FP32}],
            [{"match": "model.layers.*.mlp.experts", **FP32}],
        ],
    ),
    "casts and keywords": (
        {"name": f"{__name__}:ModelOfOthers"},
        [
            [{"type": "LayerNorm", **FP32}],
            [{"type": "LayerNorm", **FP32, "cast_forward_inputs": False}],
            [{"match": ["layers.*.norm", "layers.*.attention"], **FP32}],
            [{"type": "LayerNorm", "param_dtype": "bfloat16"}, {"type": "ByKeywords", **FP32}],
        ],
    ),
    "twice, sometimes, never": (
        {"name": f"{__name__}:Unusual"},
        [[{"type": "LayerNorm", **FP32}], [{"match": ["twice", "never"], **FP32}]],
    ),
}
"""Models that were not written for this package, each with lists of rules. They are called by keywords, cast by
themselves, or run several times or not at all."""


def of_class(norm: str, rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**rule, **({"type": CLASSES[norm]} if rule.get("type") == "CLASS" else {})} for rule in rules]


def placements_agree(
    model: dict[str, Any], rules: list[list[dict[str, Any]]], parallelism: dict[str, Any], training: dict[str, Any]
) -> None:
    """Compare rules in place with rules in units of their own, for each list of rules. The activation checkpointing
    mode changes from one list to the next."""
    tokens = tokens_of_this_rank()
    for own, checkpointed in zip(rules, cycle(CHECKPOINTING)):
        for mode, checkpointing in (("immediate", {"mode": "none"}), ("deferred", checkpointed)):
            found = []
            for placement in ("own_unit", "in_place"):
                job = {
                    "model": model,
                    "training": {"seq_len": 16, **training},
                    "precision": {"placement": placement, "rules": own},
                    "parallelism": parallelism,
                    "activation_checkpoint": checkpointing,
                }
                wrapped, plan, _ = planned_and_sharded(JobConfig.model_validate(job), 16)
                assert bool(plan.in_place) == (placement == "in_place")
                found.append(gradients(wrapped, mode, tokens, tokens))
            assert_equal(*found)


needs_placement = pytest.mark.skipif(
    not MIXES_DTYPES_IN_UNIT, reason="before torch 2.15 every rule has units of its own"
)


@needs_placement
@pytest.mark.parametrize(
    ("ranks", "norm", "names", "parallelism", "training"),
    [
        (2, "rmsnorm", [*IN_BF16], {}, {}),
        (2, "layernorm", ["norms"], {}, {"enable_cpu_offload": True}),
        (2, "batchnorm", ["norms", "norms, unset"], {}, {}),
        (2, "batchnorm2d", ["norms, uncast", "norms, unset"], {}, {}),
        (1, "rmsnorm", ["norms", "head"], {}, {}),
        (4, "rmsnorm", ["norms"], {"data_parallel_replicate_degree": 2}, {}),
    ],
)
def test_rules_in_place_and_in_units_of_their_own_give_the_same_bits(
    ranks: int, norm: str, names: list[str], parallelism: dict[str, Any], training: dict[str, Any]
) -> None:
    rules = [of_class(norm, IN_BF16[name]) for name in names]
    run_ranks(placements_agree, ranks, MODELS[norm], rules, parallelism, training)


@needs_placement
@needs_transformers
@pytest.mark.parametrize(("ranks", "name"), rest_is_slow([*product((2, 1), sorted(BY_OTHERS))], 3))
def test_placements_give_the_same_bits_in_models_of_others(name: str, ranks: int) -> None:
    run_ranks(placements_agree, ranks, *BY_OTHERS[name], {}, {})


class Unusual(nn.Module):
    """A model with norms that run twice, out of order, sometimes, and never. One norm owns a parameter directly."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(61, 16)
        self.last = nn.LayerNorm(16)
        self.twice = nn.LayerNorm(16)
        self.sometimes = nn.LayerNorm(16)
        self.never = nn.LayerNorm(16)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(16))
        self.output = nn.Linear(16, 61)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.twice(self.embedding(tokens))
        for layer in self.layers:
            x = x + layer(x)
        if tokens[0, 0] % 2:
            x = self.sometimes(x)
        return self.output(self.last(self.twice(x) * self.scale)) + 0.0

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def unusual_units() -> None:
    tokens = [torch.full((1, 4), number) for number in (2, 3, 4)]  # `sometimes` runs in the second microbatch only
    results = []
    for rule in ({}, *({"type": "LayerNorm", "param_dtype": "float32", "unit_per": units} for units in UNITS)):
        rules = [rule] if rule else []
        config = JobConfig.model_validate(
            {"model": {"name": f"{__name__}:Unusual"}, "precision": {"param_dtype": "float32", "rules": rules}}
        )
        model = sharded_model(config, 16)
        for mode in ("immediate", "deferred"):
            results.append(gradients(model, mode, tokens, tokens))
            assert not any(".never" in name for name in results[-1])
            model.zero_grad()
    for result in results[1:]:
        assert result.keys() == results[0].keys()
        for name, gradient in result.items():
            torch.testing.assert_close(gradient, results[0][name], rtol=1e-5, atol=1e-6)


def outputs_of_unusual_units() -> set[str]:
    """Return the dtypes of fp32 logits, while the unit of norms is incomplete because one norm never runs."""
    rules = [
        {"match": "output", "param_dtype": "float32", "output_dtype": "float32"},
        {"type": "LayerNorm", "param_dtype": "float32"},
    ]
    config = JobConfig.model_validate({"model": {"name": f"{__name__}:Unusual"}, "precision": {"rules": rules}})
    model = sharded_model(config, 16)
    tokens = torch.full((1, 4), 2)
    trained = model(tokens)
    trained.sum().backward()
    return {str(logits.dtype) for logits in (trained, model.eval()(tokens))}


def test_a_module_that_does_not_run_does_not_change_the_models_outputs() -> None:
    assert run_ranks(outputs_of_unusual_units, 2) == [{"torch.float32"}] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_that_run_twice_or_not_at_all_may_share_a_unit(ranks: int) -> None:
    run_ranks(unusual_units, ranks)
