from __future__ import annotations

from typing import Any

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.analytic.engine import model_inventory
from titan_launch.plan.module_selection import check_shards

FP32_ATTENTION = {"rules": [{"match": "layers.*.attention", "param_dtype": "float32"}]}


def converted(float8: dict[str, Any], args: dict[str, int] | None = None, **sections: Any) -> tuple[str, ...]:
    """Return the converted layers of a Llama of two blocks."""
    job = {"model": {"args": {"n_layers": 2, **(args or {})}}, "float8": {"enable": True, **float8}, **sections}
    config = JobConfig.model_validate(job)
    return plan_job(config, model_inventory(config)).float8


def test_the_bf16_matrices_of_the_blocks_are_converted() -> None:
    attention = tuple(f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo"))
    feed_forward = tuple(f"layers.{index}.feed_forward.{name}" for index in range(2) for name in ("w1", "w2", "w3"))
    assert len(converted({})) == 14
    assert converted({"modules": ["layers.0.attention"]}) == attention
    assert converted({"modules": ["output"]}) == ("output",)
    assert converted({}, precision=FP32_ATTENTION) == feed_forward
    assert converted({"enable": False}) == ()


def test_a_named_layer_that_cannot_be_converted_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'modules.0: matches no module of the model; did you mean "layers.0"'):
        converted({"modules": ["layer.0"]})
    with pytest.raises(ConfigError, match=r"layers.0.attention.wq.* which precision.rules.0 computes in float32"):
        converted({"modules": ["layers.*"]}, precision=FP32_ATTENTION)
    with pytest.raises(ConfigError, match=r"feed_forward.w1 has 256 inputs and 520 outputs, .* multiples of 16"):
        converted({}, {"hidden_dim": 520})
    with pytest.raises(ConfigError, match=r"no linear layer that computes in bfloat16"):
        converted({"modules": ["norm"]})


def test_weights_gathered_in_8_bits_are_shared_evenly() -> None:
    float8 = {"enable": True, "recipe": "tensorwise", "all_gather": True}
    config = JobConfig.model_validate({"model": {"args": {"n_layers": 1, "hidden_dim": 528}}, "float8": float8})
    plan = plan_job(config, model_inventory(config))
    check_shards(config.float8, plan, Layout(replicate=1, shard=16, local_batch_size=1, num_microbatches=1))
    uneven = Layout(replicate=2, shard=32, local_batch_size=1, num_microbatches=1)
    with pytest.raises(ConfigError, match=r"feed_forward.w1 has 528 outputs, which 32 shards .* do not divide"):
        check_shards(config.float8, plan, uneven)
