"""What modules really compute in, seen by hooks on wrapped models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.train.jobs import TINY_ARGS, sharded_model
from titan_launch.config.job import JobConfig
from titan_launch.loss import cross_entropy_sum

Seen = dict[str, dict[str, str]]


def observe(precision: dict[str, Any], norm: str) -> tuple[Seen, dict[str, str]]:
    """One forward and backward of a wrapped model: dtypes of inputs, weights and outputs by module while it computes,
    and the dtypes of what is stored afterwards (parameters, gradients, buffers)."""
    config = JobConfig.model_validate({"model": {"args": {**TINY_ARGS, "norm": norm}}, "precision": precision})
    model = sharded_model(config, 16)
    seen: Seen = {}
    for path, module in model.named_modules():
        module.register_forward_hook(recorder(seen, path))
    tokens = torch.randint(0, 61, (2, 16))
    cross_entropy_sum(model(tokens), tokens).backward()
    stored = {name: dtype(p) for name, p in model.named_parameters()}
    stored |= {f"{name}.grad": dtype(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    stored |= {name: dtype(b) for name, b in model.named_buffers()}
    return seen, stored


def recorder(seen: Seen, path: str) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        weight = getattr(module, "weight", None)
        seen[path] = {"output": dtype(output)} | ({"input": dtype(inputs[0])} if inputs else {})
        if weight is not None:
            seen[path]["weight"] = dtype(weight)

    return hook


def dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def all_are(seen: Seen, paths: list[str], **expected: str) -> None:
    for path in paths:
        assert {key: seen[path][key] for key in expected} == expected, path


NORMS = [f"layers.{i}.{name}" for i in range(2) for name in ("attention_norm", "ffn_norm")]
LINEARS = ["layers.0.attention.wq", "layers.1.attention.wo", "layers.1.feed_forward.w2"]


def test_without_rules_everything_computes_in_bf16_and_is_stored_in_fp32() -> None:
    seen, stored = run_ranks(observe, 2, {}, "rmsnorm")[0]
    all_are(seen, [*NORMS, *LINEARS, "norm", "output"], input="bfloat16", weight="bfloat16", output="bfloat16")
    assert set(stored.values()) == {"float32"}


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "batchnorm"])
def test_fp32_norms_compute_in_fp32_between_bf16_layers(norm: str) -> None:
    rule = {"type": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "batchnorm": "BatchNorm"}[norm]}
    seen, stored = run_ranks(observe, 2, {"rules": [{**rule, "param_dtype": "float32"}]}, norm)[0]
    all_are(seen, [*NORMS, "norm"], input="float32", weight="float32", output="bfloat16")
    all_are(seen, [*LINEARS, "output"], input="bfloat16", weight="bfloat16", output="bfloat16")
    assert {v for k, v in stored.items() if "num_batches" not in k} == {"float32"}


def test_batchnorm_keeps_fp32_statistics_under_bf16_without_any_rule() -> None:
    seen, stored = run_ranks(observe, 2, {}, "batchnorm")[0]
    all_are(seen, [*NORMS, "norm"], input="bfloat16", weight="float32", output="bfloat16")
    statistics = [name for name in stored if "running" in name]
    assert len(statistics) == 10 and {stored[name] for name in statistics} == {"float32"}


def test_an_fp32_head_gives_fp32_logits_and_an_inner_rule_hands_on_what_its_consumer_takes() -> None:
    rules = [
        {"match": "output", "param_dtype": "float32"},
        {"match": "layers.*.attention.wo", "param_dtype": "float32"},
        {"match": "layers.1", "param_dtype": "float32"},
    ]
    seen, _ = run_ranks(observe, 1, {"rules": rules}, "rmsnorm")[0]
    all_are(seen, ["output"], input="float32", weight="float32", output="float32")
    all_are(seen, ["layers.0.attention.wo"], input="float32", weight="float32", output="bfloat16")
    all_are(seen, ["layers.1.attention.wo"], input="float32", weight="float32", output="float32")
    all_are(seen, ["layers.1.feed_forward.w2"], input="float32", weight="float32", output="float32")
    all_are(seen, ["layers.1", "layers.0"], output="bfloat16")


def test_inputs_stay_as_they_come_when_a_rule_says_so() -> None:
    rule = {"type": "LayerNorm", "param_dtype": "float32", "cast_forward_inputs": False}
    seen, _ = run_ranks(observe, 1, {"rules": [rule]}, "layernorm")[0]
    all_are(seen, NORMS, input="bfloat16", weight="float32", output="bfloat16")


def test_storage_and_buffer_dtypes_are_as_configured() -> None:
    precision = {"storage_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    _, stored = run_ranks(observe, 2, precision, "rmsnorm")[0]
    buffers = {name: d for name, d in stored.items() if "rope" in name}
    assert set(buffers.values()) == {"float32"}
    assert {d for name, d in stored.items() if name not in buffers} == {"bfloat16"}
    rule = {"type": "RotaryEmbedding", "buffer_dtype": "bfloat16"}
    _, stored = run_ranks(observe, 1, {"rules": [rule]}, "rmsnorm")[0]
    assert {d for name, d in stored.items() if "rope" in name} == {"bfloat16"}
