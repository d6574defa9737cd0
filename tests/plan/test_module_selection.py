"""The modules that are activation-checkpointed, compiled, or converted to float8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.trace.traces import model_inventory
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.torch_release import MIXES_DTYPES_IN_UNIT
from titan_launch.models.build import build_model
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout
from titan_launch.plan.module_selection import check_shards, checkpointed_modules
from titan_launch.plan.types import Inventory, ModelPlan, ModuleInfo, parent
from titan_launch.train.model import plan_precision


def checkpointed(blocks: Sequence[str], **config: Any) -> tuple[str, ...]:
    """Return the checkpointed modules of a model with these blocks in one `list`.

    Each block has a `norm` and an `mlp` of two layers. The first two blocks share a `rope`.
    """
    modules = [ModuleInfo("", ("Model",), True), ModuleInfo("list", ("ModuleList",), False)]
    for index, block in enumerate(blocks):
        inside = ("", ".norm", ".mlp", ".mlp.0", ".mlp.1")
        modules += [ModuleInfo(f"{block}{name}", ("Layer",), True) for name in inside]
        modules += [ModuleInfo(f"{block}.rope", ("Rope",), True, same_as=f"{blocks[0]}.rope" if index else None)]
    config = {"mode": "full", **config}
    return checkpointed_modules(Inventory(tuple(modules), tuple(blocks)), ActivationCheckpointConfig(**config))


BLOCKS = tuple(f"list.{index}" for index in range(7))


def test_of_nested_blocks_the_outer_ones_are_checkpointed() -> None:
    assert checkpointed(("a.0", "a.0.b", "a.1", "a.1.b")) == ("a.0", "a.1")
    assert checkpointed(BLOCKS, mode="selective", selective_ac_option=3) == ("list.2", "list.5")
    assert checkpointed(BLOCKS, mode="none") == checkpointed(BLOCKS, mode="memory_budget") == ()


def test_activation_checkpoint_modules_replaces_the_blocks() -> None:
    mlps = tuple(f"{block}.mlp" for block in BLOCKS)
    assert checkpointed(BLOCKS, modules=("list.*.mlp",)) == mlps
    assert checkpointed(BLOCKS, modules=("list.*.mlp.*", "list.*.mlp")) == mlps
    assert checkpointed(BLOCKS, modules=("**.mlp",), mode="selective", selective_ac_option=3) == mlps[2::3]
    assert checkpointed(BLOCKS, modules=("list.1.rope", "list.3")) == ("list.0.rope", "list.3")
    assert checkpointed(BLOCKS[:2], modules=("**",)) == BLOCKS[:2]


def test_a_mode_that_checkpoints_no_module_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"activation_checkpoint.mode: needs blocks, .* model.blocks"):
        checkpointed(())
    with pytest.raises(ConfigError, match=r"selective_ac_option: exceeds the number of blocks of the model, 2, so"):
        checkpointed(BLOCKS[:2], mode="selective", selective_ac_option=3)
    with pytest.raises(ConfigError, match=r"the number of modules that activation_checkpoint.modules matches, 7, so"):
        checkpointed(BLOCKS, modules=("list.*.norm",), mode="selective", selective_ac_option=8)
    with pytest.raises(ConfigError, match=r'modules.0: matches no module of the model; did you mean "list..\.mlp"'):
        checkpointed(BLOCKS, modules=("list.*.mlpp",))
    with pytest.raises(ConfigError, match=r'modules.1: matches only list, a container .* "list.\*"'):
        checkpointed(BLOCKS, modules=("list.*", "list"))


FP32_NORMS = {"rules": [{"match": ["layers.*.*_norm", "norm"], "param_dtype": "float32"}]}


def planned(checkpointing: dict[str, Any] | None = None, **sections: dict[str, Any]) -> ModelPlan:
    """Return the plan of a compiled Llama of three blocks."""
    model = {"args": {"n_layers": 3, **sections.pop("args", {})}}
    job = {"model": model, "compile": {"enable": True}, "activation_checkpoint": checkpointing or {}, **sections}
    config = JobConfig.model_validate(job)
    return plan_job(config, model_inventory(config))


def test_the_largest_modules_without_fsdp2_units_inside_are_compiled() -> None:
    assert planned().compiled == ("layers.0", "layers.1", "layers.2")
    parts = ("layers.0.attention", "layers.0.feed_forward", "layers.1", "layers.2")
    norms = {"placement": "own_unit", "rules": [{"match": "layers.0.*_norm", "param_dtype": "float32"}]}
    assert planned(precision=norms).compiled == parts
    if MIXES_DTYPES_IN_UNIT:
        assert planned(precision={**norms, "placement": "in_place"}).compiled == ("layers.0", "layers.1", "layers.2")
    whole = {"rules": [{"match": "layers.*", "param_dtype": "float32"}]}
    assert planned(precision=whole).compiled == ("layers.0", "layers.1", "layers.2")
    assert planned(compile={"enable": True, "components": ["loss"]}).compiled == ()
    assert planned(compile={}).compiled == ()


def test_with_tensor_parallelism_no_compiled_module_contains_a_checkpointed_one() -> None:
    modules = {"mode": "full", "modules": ["layers.*.attention"]}
    divided = {"tensor_parallel_degree": 2}
    parts = tuple(f"layers.{index}.{part}" for index in range(3) for part in ("attention", "feed_forward"))
    assert planned(modules).compiled == ("layers.0", "layers.1", "layers.2")
    assert planned(modules, parallelism=divided).compiled == parts
    assert planned({"mode": "full"}, parallelism=divided).compiled == ("layers.0", "layers.1", "layers.2")
    assert planned({**modules, "mode": "selective"}, parallelism=divided).compiled == planned().compiled
    assert planned({"mode": "selective"}, parallelism=divided).compiled == ("layers.0", "layers.1", "layers.2")


def test_a_block_without_a_module_to_compile_is_an_error() -> None:
    linears = {
        "placement": "own_unit",
        "rules": [{"match": ["layers.*.*.w1", "layers.*.*.wo"], "param_dtype": "float32"}],
    }
    with pytest.raises(ConfigError, match=r"no part of layers.0, layers.1, layers.2 .*precision.rules.0.*remove those"):
        planned(precision=linears)
    trained = {"trainable": ["layers.*.*.w2.weight", "layers.*.*.wv.weight"]}
    both = r"units of precision.rules.0, trained parameters in .*remove those.* parameters \(training.trainable\)"
    with pytest.raises(ConfigError, match=both) as error:
        planned(precision=linears, training=trained)
    assert {*error.value.problems[0].also} == {("precision", "rules", 0), ("training", "trainable")}


@pytest.mark.parametrize(
    ("degree", "cause"), [(1, "compiled: there"), (2, "compiled: apart from the FSDP2 units of experts, .* there")]
)
def test_experts_that_leave_nothing_to_compile_are_an_error(degree: int, cause: str) -> None:
    parallelism = {"expert_parallel_degree": degree}
    job = {"model": {"name": "qwen3_moe"}, "compile": {"enable": True}, "parallelism": parallelism}
    config = JobConfig.model_validate(job)
    inventory = model_inventory(config)
    around = tuple(parent(m.path) for m in inventory.modules if m.has_experts)
    with pytest.raises(ConfigError, match=rf"{cause} are only single layers, .* on their own; set compile.enable"):
        plan_job(config, replace(inventory, blocks=around))


def test_checkpointed_layers_that_leave_nothing_to_compile_are_an_error() -> None:
    layers = {"mode": "full", "modules": ["layers.*.*.w?"]}
    with pytest.raises(ConfigError, match=r"apart from the checkpointed modules .*remove these modules from activ"):
        planned(layers, parallelism={"tensor_parallel_degree": 2})


def test_a_compiled_model_without_blocks_is_an_error() -> None:
    config = JobConfig.model_validate({"compile": {"enable": True, "components": ["model", "loss"]}})
    inventory = replace(model_inventory(config), blocks=())
    with pytest.raises(
        ConfigError, match=r'name the blocks in model.blocks, or remove "model" from compile.components'
    ):
        plan_job(config, inventory)


def test_checkpointing_per_operation_around_a_compiled_module_is_an_error() -> None:
    selective, norms = {"mode": "selective"}, {**FP32_NORMS, "placement": "own_unit"}
    with pytest.raises(ConfigError, match=r'modules = \["layers.\*.attention", "layers.\*.feed_forward"\]'):
        planned(selective, precision=norms)
    named = {**selective, "modules": ["layers.*.attention", "layers.*.feed_forward"]}
    assert planned(named, precision=norms).checkpointed == planned(named, precision=norms).compiled
    assert planned({**selective, "selective_ac_option": 2}, precision=norms).checkpointed == ("layers.1",)


FP32_ATTENTION = {"rules": [{"match": "layers.*.attention", "param_dtype": "float32"}]}


def converted(float8: dict[str, Any], args: dict[str, Any] | None = None, **sections: Any) -> tuple[str, ...]:
    """Return the converted layers of a Llama of two blocks."""
    job = {"model": {"args": {"n_layers": 2, **(args or {})}}, "float8": {"enable": True, **float8}, **sections}
    config = JobConfig.model_validate(job)
    return plan_job(config, model_inventory(config)).float8


def test_the_bf16_linear_layers_of_the_blocks_are_converted_to_float8() -> None:
    attention = tuple(f"layers.0.attention.{name}" for name in ("wq", "wk", "wv", "wo"))
    feed_forward = tuple(f"layers.{index}.feed_forward.{name}" for index in range(2) for name in ("w1", "w2", "w3"))
    assert len(converted({})) == 14
    assert converted({"modules": ["layers.0.attention"]}) == attention
    assert converted({"modules": ["output"]}) == ("output",)
    assert converted({}, precision=FP32_ATTENTION) == feed_forward
    assert converted({"enable": False}) == ()


def test_float8_converts_neither_routers_nor_experts() -> None:
    experts = {"num_experts": 16, "top_k": 2, "hidden_dim": 32, "shared_hidden_dim": 32, "first_dense_layers": 1}
    model = {"args": {"n_layers": 2, "experts": experts}}

    def converted(**float8: Any) -> tuple[str, ...]:
        config = JobConfig.model_validate({"model": model, "float8": {"enable": True, **float8}})
        return plan_precision(config, build_model(config.model, 16)).float8

    shared = [f"layers.1.moe.shared_experts.{name}" for name in ("w1", "w2", "w3")]
    assert [path for path in converted() if ".moe." in path] == shared
    assert converted(modules=["layers.1.moe.router"]) == ("layers.1.moe.router",)
    with pytest.raises(ConfigError, match=r"names layers.1.moe.experts, whose products cannot be 8-bit: torchao"):
        converted(modules=["layers.*.moe.experts"])


def test_a_named_layer_that_cannot_be_converted_to_float8_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r'modules.0: matches no module of the model; did you mean "layers.0"'):
        converted({"modules": ["layer.0"]})
    with pytest.raises(ConfigError, match=r"layers.0.attention.wq.*, whose compute dtype is float32 \(precision"):
        converted({"modules": ["layers.*"]}, precision=FP32_ATTENTION)
    with pytest.raises(ConfigError, match=r"feed_forward.w1 has 256 inputs and 520 outputs, .* multiples of 16"):
        converted({}, {"hidden_dim": 520})
    with pytest.raises(ConfigError, match=r"no linear layer of these modules computes in bfloat16"):
        converted({"modules": ["norm"]})


def test_float8_all_gather_requires_even_shards() -> None:
    float8 = {"enable": True, "recipe": "tensorwise", "all_gather": True}
    config = JobConfig.model_validate({"model": {"args": {"n_layers": 1, "hidden_dim": 528}}, "float8": float8})
    plan = plan_job(config, model_inventory(config))
    check_shards(config.float8, plan, Layout(replicate=1, shard=16, local_batch_size=1, num_microbatches=1))
    uneven = Layout(replicate=2, shard=32, local_batch_size=1, num_microbatches=1)
    with pytest.raises(ConfigError, match=r"feed_forward.w1 has 528 outputs, not a multiple of 32 "):
        check_shards(config.float8, plan, uneven)
