from __future__ import annotations

from typing import Any

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.job import plan_job
from titan_launch.plan.memory.analytic.engine import model_inventory
from titan_launch.plan.types import ModelPlan

FP32_NORMS = {"rules": [{"match": ["layers.*.*_norm", "norm"], "param_dtype": "float32"}]}


def planned(checkpointing: dict[str, Any] | None = None, **sections: dict[str, Any]) -> ModelPlan:
    """A compiled Llama of three layers."""
    model = {"args": {"n_layers": 3, **sections.pop("args", {})}}
    job = {"model": model, "compile": {"enable": True}, "activation_checkpoint": checkpointing or {}, **sections}
    config = JobConfig.model_validate(job)
    return plan_job(config, model_inventory(config))


def test_the_largest_modules_without_units_inside_are_compiled() -> None:
    assert planned().compiled == ("layers.0", "layers.1", "layers.2")
    parts = ("layers.0.attention", "layers.0.feed_forward", "layers.1", "layers.2")
    assert planned(precision={"rules": [{"match": "layers.0.*_norm", "param_dtype": "float32"}]}).compiled == parts
    whole = {"rules": [{"match": "layers.*", "param_dtype": "float32"}]}
    assert planned(precision=whole).compiled == ("layers.0", "layers.1", "layers.2")
    assert planned(compile={"enable": True, "components": ["loss"]}).compiled == ()
    assert planned(compile={}).compiled == ()


def test_under_tensor_parallelism_no_checkpointed_module_is_inside_of_a_graph() -> None:
    modules = {"mode": "full", "modules": ["layers.*.attention"]}
    divided = {"tensor_parallel_degree": 2}
    parts = tuple(f"layers.{index}.{part}" for index in range(3) for part in ("attention", "feed_forward"))
    assert planned(modules).compiled == ("layers.0", "layers.1", "layers.2")
    assert planned(modules, parallelism=divided).compiled == parts
    assert planned({"mode": "full"}, parallelism=divided).compiled == ("layers.0", "layers.1", "layers.2")
    assert planned({**modules, "mode": "selective"}, parallelism=divided).compiled == planned().compiled
    assert planned({"mode": "selective"}, parallelism=divided).compiled == ("layers.0", "layers.1", "layers.2")


def test_a_block_without_a_module_to_compile_is_an_error() -> None:
    linears = {"rules": [{"match": ["layers.*.*.w1", "layers.*.*.wo"], "param_dtype": "float32"}]}
    with pytest.raises(ConfigError, match=r"nothing of layers.0, layers.1, layers.2 .*precision.rules.0.*remove those"):
        planned(precision=linears)


def test_what_keeps_results_of_operations_must_see_them() -> None:
    selective = {"mode": "selective"}
    with pytest.raises(ConfigError, match=r'modules = \["layers.\*.attention", "layers.\*.feed_forward"\]'):
        planned(selective, precision=FP32_NORMS)
    named = {**selective, "modules": ["layers.*.attention", "layers.*.feed_forward"]}
    assert planned(named, precision=FP32_NORMS).checkpointed == planned(named, precision=FP32_NORMS).compiled
    assert planned({**selective, "selective_ac_option": 2}, precision=FP32_NORMS).checkpointed == ("layers.1",)
