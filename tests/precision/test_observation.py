"""Compute and storage dtypes that the audit's hooks observe on wrapped models, compared with expected ones."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.precision.steps import train, wrapped
from tests.train.jobs import TINY_ARGS
from titan_launch.config.job import JobConfig
from titan_launch.precision.observation import look_at_storage, observe

Seen = dict[str, dict[str, set[str]]]


def observe_step(precision: dict[str, Any], norm: str) -> Seen:
    """Run a step of a wrapped model. Return, by module, the dtypes of inputs, parameters and outputs during the step,
    and of stored tensors after it."""
    config = JobConfig.model_validate({"model": {"args": {**TINY_ARGS, "norm": norm}}, "precision": precision})
    model, plan, _ = wrapped(config)
    with observe(model, plan) as observed:
        train(model, config)
        look_at_storage(model, observed)
    return {
        path: {what: dtypes for what, dtypes in seen.dtypes.items() if dtypes}
        for path, seen in observed.modules.items()
    }


def all_are(seen: Seen, paths: list[str], **expected: str) -> None:
    for path in paths:
        assert {what: seen[path][what] for what in expected} == {what: {dtype} for what, dtype in expected.items()}, (
            path
        )


def stored(seen: Seen, *kinds: str) -> set[str]:
    """Return all dtypes of stored parameters and gradients (`stored`), or of buffers (`buffer`)."""
    found = [dtypes for things in seen.values() for what, dtypes in things.items() if what.startswith(kinds)]
    assert found
    return set().union(*found)


NORMS = [f"layers.{i}.{name}" for i in range(2) for name in ("attention_norm", "ffn_norm")]
LINEARS = ["layers.0.attention.wq", "layers.1.attention.wo", "layers.1.feed_forward.w2"]


def test_without_rules_everything_computes_in_bf16_and_is_stored_in_fp32() -> None:
    seen = run_ranks(observe_step, 2, {}, "rmsnorm")[0]
    all_are(seen, [*NORMS, *LINEARS, "norm", "output"], inputs="bfloat16", parameters="bfloat16", outputs="bfloat16")
    assert stored(seen, "stored", "buffer") == {"float32"}


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm", "batchnorm"])
def test_fp32_norms_compute_in_fp32_between_bf16_layers(norm: str) -> None:
    rule = {"type": {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm", "batchnorm": "BatchNorm"}[norm]}
    seen = run_ranks(observe_step, 2, {"rules": [{**rule, "param_dtype": "float32"}]}, norm)[0]
    all_are(seen, [*NORMS, "norm"], inputs="float32", parameters="float32", outputs="bfloat16")
    all_are(seen, [*LINEARS, "output"], inputs="bfloat16", parameters="bfloat16", outputs="bfloat16")
    assert stored(seen, "stored", "buffer") == {"float32"}


def test_batchnorm_keeps_fp32_statistics_under_bf16_without_any_rule() -> None:
    seen = run_ranks(observe_step, 2, {}, "batchnorm")[0]
    all_are(seen, [*NORMS, "norm"], inputs="bfloat16", parameters="float32", outputs="bfloat16")
    all_are(seen, [*NORMS, "norm"], **{"buffer running_mean": "float32", "buffer running_var": "float32"})


def test_an_fp32_head_gives_fp32_logits_and_an_inner_rule_returns_the_dtype_of_its_consumer() -> None:
    rules = [
        {"match": "output", "param_dtype": "float32"},
        {"match": "layers.*.attention.wo", "param_dtype": "float32"},
        {"match": "layers.1", "param_dtype": "float32"},
    ]
    seen = run_ranks(observe_step, 1, {"rules": rules}, "rmsnorm")[0]
    all_are(seen, ["output"], inputs="float32", parameters="float32", outputs="float32")
    all_are(seen, ["layers.0.attention.wo"], inputs="float32", parameters="float32", outputs="bfloat16")
    all_are(seen, ["layers.1.attention.wo"], inputs="float32", parameters="float32", outputs="float32")
    all_are(seen, ["layers.1.feed_forward.w2"], inputs="float32", parameters="float32", outputs="float32")
    all_are(seen, ["layers.1", "layers.0"], outputs="bfloat16")


def test_cast_inputs_false_does_not_cast_inputs() -> None:
    rule = {"type": "LayerNorm", "param_dtype": "float32", "cast_forward_inputs": False}
    seen = run_ranks(observe_step, 1, {"rules": [rule]}, "layernorm")[0]
    all_are(seen, NORMS, inputs="bfloat16", parameters="float32", outputs="bfloat16")


def test_storage_and_buffer_dtypes_are_as_configured() -> None:
    precision = {"storage_dtype": "bfloat16", "reduce_dtype": "bfloat16"}
    seen = run_ranks(observe_step, 2, precision, "rmsnorm")[0]
    assert stored(seen, "buffer") == {"float32"}
    assert stored(seen, "stored") == {"bfloat16"}
    rule = {"type": "RotaryEmbedding", "buffer_dtype": "bfloat16"}
    seen = run_ranks(observe_step, 1, {"rules": [rule]}, "rmsnorm")[0]
    all_are(seen, ["rope"], **{"buffer table": "bfloat16"})
