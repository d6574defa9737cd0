"""FSDP2 units from precision rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.jobs import tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.config.sections.training import TrainingConfig
from titan_launch.core.errors import ConfigError
from titan_launch.models.build import build_model, take_inventory
from titan_launch.models.decoder.mixture_of_experts import MixtureOfExperts
from titan_launch.models.decoder.table_args import ExpertArgs
from titan_launch.plan.freezing import freeze
from titan_launch.plan.job import with_unsharded_parameters
from titan_launch.plan.layout import Layout
from titan_launch.plan.report.unit_table import describe_units, format_units
from titan_launch.plan.types import Inventory, ModelPlan, ModuleInfo, Policy, Unit
from titan_launch.plan.units.fsdp_units import UnitLimits, plan_model
from titan_launch.plan.units.order import Resharding
from titan_launch.plan.units.rule_assignment import BATCH_NORM_DEFAULT, nothing_matched
from titan_launch.train.model import build_job_model, plan_precision

RESHARDING = Resharding(blocks=True, late=False)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module], dim: int):
        super().__init__()
        self.norm1 = norm(dim)
        self.mix = nn.Linear(dim, dim)
        self.act = nn.SiLU()
        self.inner = nn.Sequential(nn.Linear(dim, dim), norm(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Model(nn.Module):
    def __init__(self, norm: type[nn.Module] = nn.LayerNorm, tied: bool = False, dim: int = 8):
        super().__init__()
        self.embedding = nn.Embedding(16, dim)
        self.layers = nn.ModuleList(Block(norm, dim) for _ in range(3))
        self.norm = norm(dim)
        self.output = nn.Linear(dim, 16, bias=False)
        if tied:
            self.output.weight = self.embedding.weight


def inventory_of(**kwargs: object) -> Inventory:
    with torch.device("meta"):
        model = Model(**kwargs)  # type: ignore[arg-type]
    return take_inventory(model, tuple(f"layers.{i}" for i in range(3)), ("norm", "output"))


def units_of(*rules: dict[str, object], model: dict[str, object] | None = None, **precision: object) -> list[Unit]:
    config = PrecisionConfig.model_validate({**precision, "rules": list(rules)})
    return list(plan_model(inventory_of(**(model or {})), config, RESHARDING).units)


def by_reason(units: list[Unit], reason: str) -> Unit:
    (unit,) = [unit for unit in units if unit.reason == reason]
    return unit


def test_without_rules_blocks_head_and_root_are_the_units() -> None:
    units = units_of()
    assert [unit.reason for unit in units] == ["block"] * 3 + ["head", "root"]
    assert by_reason(units, "head").modules == ("norm", "output")
    assert [unit.reshard_after_forward for unit in units] == [True, True, False, False, None]
    assert {unit.policy for unit in units} == {Policy("bfloat16", "float32")}


def test_every_parameter_is_counted_once() -> None:
    for tied in (False, True):
        inventory = inventory_of(tied=tied)
        units = plan_model(inventory, PrecisionConfig(rules=(PrecisionRule(type="LayerNorm"),)), RESHARDING).units
        assert sum(unit.num_parameters for unit in units) == inventory.num_parameters


def test_all_modules_of_a_rule_share_one_unit_wrapped_before_their_parents() -> None:
    units = units_of({"type": "LayerNorm", "param_dtype": "float32"})
    assert units[0].reason == "precision.rules.0"
    assert len(units[0].modules) == 7
    assert units[0].policy == Policy("float32", "float32", output_dtype="bfloat16")
    assert by_reason(units, "head").modules == ("output",)


def test_without_shared_units_every_module_of_a_rule_has_its_own_unit() -> None:
    rules = (PrecisionRule(type="LayerNorm", param_dtype="float32"),)
    units = plan_model(inventory_of(), PrecisionConfig(rules=rules), RESHARDING, UnitLimits(share_units=False)).units
    assert [unit.name for unit in units if unit.reason == "precision.rules.0"][:2] == [
        "layers.0.norm1",
        "layers.0.inner.1",
    ]
    assert [len(unit.modules) for unit in units] == [1] * 12


def test_an_unset_param_dtype_stays_unset() -> None:
    units = units_of({"type": "LayerNorm"})
    assert units[0].policy == Policy(None, "float32", output_dtype="bfloat16")


def test_batchnorm_gets_an_fp32_unit_by_default_where_computation_is_reduced() -> None:
    unit = by_reason(units_of(model={"norm": nn.BatchNorm1d}), BATCH_NORM_DEFAULT)
    assert len(unit.modules) == 7
    assert unit.policy == Policy(None, "float32", output_dtype="bfloat16")
    full = units_of(model={"norm": nn.BatchNorm1d}, param_dtype="float32")
    assert all(unit.reason != BATCH_NORM_DEFAULT for unit in full)


def test_a_rule_for_batchnorm_takes_the_place_of_the_default() -> None:
    units = units_of({"type": "BatchNorm", "param_dtype": "float32"}, model={"norm": nn.BatchNorm1d})
    assert by_reason(units, "precision.rules.0").policy.param_dtype == "float32"
    assert all(unit.reason != BATCH_NORM_DEFAULT for unit in units)


def test_inside_an_fp32_block_the_output_is_fp32_and_batchnorm_needs_no_unit() -> None:
    rules = [{"match": "layers.1", "param_dtype": "float32"}, {"match": "**.norm1", "param_dtype": "float32"}]
    units = units_of(*rules)
    outputs = {unit.modules: unit.policy.output_dtype for unit in units if unit.reason == "precision.rules.1"}
    assert outputs == {("layers.0.norm1", "layers.2.norm1"): "bfloat16", ("layers.1.norm1",): "float32"}
    batchnorm = units_of(rules[0], model={"norm": nn.BatchNorm1d})
    assert not any(m.startswith("layers.1.") for m in by_reason(batchnorm, BATCH_NORM_DEFAULT).modules)


def test_a_block_under_a_rule_stays_a_unit_of_its_own() -> None:
    units = units_of({"match": "layers.*", "param_dtype": "float32"})
    assert [unit.modules for unit in units[:3]] == [("layers.0",), ("layers.1",), ("layers.2",)]
    assert {unit.policy.output_dtype for unit in units[:3]} == {"bfloat16"}


def test_the_output_of_the_model_is_not_cast() -> None:
    units = units_of({"match": "output", "param_dtype": "float32"})
    assert by_reason(units, "precision.rules.0").policy.output_dtype is None
    assert all(unit.reason != "head" for unit in units)


def test_the_first_rule_that_matches_wins() -> None:
    units = units_of({"match": "layers.0.norm1"}, {"type": "LayerNorm", "param_dtype": "float32"})
    assert by_reason(units, "precision.rules.0").modules == ("layers.0.norm1",)
    assert len(by_reason(units, "precision.rules.1").modules) == 6


def test_a_module_inside_another_of_the_same_rule_is_not_listed_twice() -> None:
    units = units_of({"match": "layers.0.inner.**", "param_dtype": "float32"})
    assert by_reason(units, "precision.rules.0").modules == ("layers.0.inner",)


class Holder(nn.Module):
    def __init__(self, inside: nn.Module | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Left(Holder):
    pass


class Right(Holder):
    pass


def test_units_nested_in_each_other_are_split_by_module_and_inner_units_come_first() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = Left(Right())
            self.b = Right(Left())

    rules = (PrecisionRule(type=f"{__name__}.Left"), PrecisionRule(type="Right"))
    units = plan_model(take_inventory(Both(), ()), PrecisionConfig(rules=rules), RESHARDING).units
    position = {path: i for i, unit in enumerate(units) for path in unit.modules}
    assert position["a.inside"] < position["a"] and position["b.inside"] < position["b"]
    assert [len(unit.modules) for unit in units] == [1] * 5
    assert units[-1].reason == "root"


def test_units_that_are_split_by_module_count_the_parameters_of_their_own_modules() -> None:
    class Outer(nn.Module):
        def __init__(self, inside: str) -> None:
            super().__init__()
            self.add_module(inside, nn.Linear(2, 2, bias=False))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.Module()
    model.a, model.b = Outer("x"), Outer("y")
    rules = (PrecisionRule(match=("a", "b.y"), param_dtype="float32"), PrecisionRule(match=("b", "a.x")))
    units = plan_model(take_inventory(model, ()), PrecisionConfig(param_dtype="float32", rules=rules), RESHARDING).units
    counts = {unit.name: (unit.num_parameters, unit.is_trained, unit.gradient_dtype) for unit in units}
    own, none = (4, True, "float32"), (0, False, None)
    assert counts == {"a.x": own, "b.y": own, "a": none, "b": none, "(root)": none}


def test_a_unit_larger_than_a_block_is_divided_by_blocks() -> None:
    rule = {"type": "Linear", "param_dtype": "float32"}
    units = units_of(rule, model={"dim": 1024})
    linear = [unit.modules for unit in units if unit.reason == "precision.rules.0"]
    assert linear == [(f"layers.{i}.mix", f"layers.{i}.inner.0") for i in range(3)] + [("output",)]
    small = [len(unit.modules) for unit in units_of(rule) if unit.reason == "precision.rules.0"]
    assert small == [6, 1]  # the dtype of the output layer differs


def test_a_head_that_is_named_as_a_block_is_in_one_unit() -> None:
    inventory = inventory_of()
    inventory = Inventory(inventory.modules, (*inventory.blocks, "output"), inventory.head)
    units = plan_model(inventory, PrecisionConfig(), RESHARDING).units
    assert sorted(path for unit in units for path in unit.modules) == ["", "layers.0", "layers.1", "layers.2", "output"]


def test_a_module_shared_between_blocks_is_an_error_that_names_both() -> None:
    with torch.device("meta"):
        model = Model()
        model.layers[1].norm1 = model.layers[0].norm1
    inventory = take_inventory(model, ("layers.0", "layers.1", "layers.2"), ("norm", "output"))
    with pytest.raises(ConfigError, match=r"model\.blocks: layers\.1\.norm1 and layers\.0\.norm1 share"):
        plan_model(inventory, PrecisionConfig(), RESHARDING)
    rules = (PrecisionRule(type="LayerNorm", param_dtype="float32"),)
    units = plan_model(inventory, PrecisionConfig(rules=rules), RESHARDING).units
    assert len(units[0].modules) == 6  # one unit holds the module, so no block does
    with pytest.raises(ConfigError, match=r"layers\.1\.norm1 is the same module as layers\.0\.norm1"):
        plan_model(inventory, PrecisionConfig(rules=(PrecisionRule(match="layers.1.norm1"),)), RESHARDING)


def test_an_output_dtype_is_not_for_the_blocks_inside() -> None:
    units = units_of({"match": "layers.*", "param_dtype": "float32", "output_dtype": "float32"})
    assert {unit.policy.output_dtype for unit in units[:3]} == {"float32"}


def test_tied_embeddings_stay_in_the_root() -> None:
    units = units_of(model={"tied": True})
    assert [unit.reason for unit in units] == ["block"] * 3 + ["root"]
    declared = plan_model(declare_embedding(tied=True), PrecisionConfig(), RESHARDING).units
    assert [unit.reason for unit in declared] == ["block"] * 3 + ["root"]


def declare_embedding(**kwargs: object) -> Inventory:
    return replace(inventory_of(**kwargs), embeddings=("embedding",))


def test_a_declared_embedding_is_a_unit_that_backward_does_not_gather() -> None:
    units = plan_model(declare_embedding(), PrecisionConfig(), RESHARDING).units
    assert [unit.reason for unit in units] == ["embedding"] + ["block"] * 3 + ["head", "root"]
    assert (units[0].reshard_after_forward, units[0].unshard_in_backward, units[0].num_gathers) == (True, False, 1)
    assert (units[-1].num_parameters, units[-1].is_trained) == (0, False)


def test_a_declared_embedding_is_unsharded_if_all_parameters_are() -> None:
    unsharded = plan_model(declare_embedding(), PrecisionConfig(), Resharding(blocks=False, late=False)).units[0]
    assert (unsharded.reshard_after_forward, unsharded.unshard_in_backward, unsharded.num_gathers) == (False, True, 1)


def test_a_rule_or_a_block_overrides_the_unit_of_a_declared_embedding() -> None:
    ruled = plan_model(declare_embedding(), PrecisionConfig(rules=(PrecisionRule(type="Embedding"),)), RESHARDING)
    assert ruled.unit_of["embedding"].reason == "precision.rules.0"
    block = plan_model(replace(declare_embedding(), blocks=("embedding",)), PrecisionConfig(), RESHARDING)
    assert block.unit_of["embedding"].reason == "block"


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({"match": "layers.*.nrom1"}, ["precision.rules.0.match", "matches no module", 'did you mean "layers.']),
        ({"match": "mix"}, ['matches no module of the model; did you mean "**.mix"?']),
        ({"type": "LayerNrom"}, ["precision.rules.0.type", 'did you mean "LayerNorm"']),
        ({"match": "layers"}, ["matches only layers, a container without a forward", 'did you mean "layers.*"']),
        (
            {"match": "layers.*.act"},
            ["layers.0.act, layers.1.act, layers.2.act", "matches only modules without parameters"],
        ),
        ({"match": "layers.*", "type": "Linear"}, ["matches no module of class Linear"]),
        ({"type": "Model"}, ["precision.rules.0.type", "only the model itself"]),
        ({"match": "layers.0", "reshard_after_forward": False}, ["layers.0.mix, layers.0.inner.0", "set param_dtype"]),
    ],
)
def test_a_rule_that_does_nothing_is_an_error(rule: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        units_of(rule)
    for word in words:
        assert word in str(caught.value)


def test_all_containers_that_a_glob_matches_are_named() -> None:
    reason = nothing_matched("layers.*", [], ["layers.0", "layers.1"])
    assert reason == 'matches only layers.0, layers.1, containers without a forward; did you mean "layers.0.*"?'


@pytest.mark.parametrize("storage", ["float32", "bfloat16"])
def test_a_rule_that_would_round_running_statistics_is_an_error(storage: str) -> None:
    dtype = "bfloat16" if storage == "float32" else None
    with pytest.raises(ConfigError, match=r"precision\.rules\.0\.type: .* and float32 running statistics"):
        units_of({"type": "BatchNorm", "param_dtype": dtype}, model={"norm": nn.BatchNorm1d}, storage_dtype=storage)


def test_batchnorm_is_fp32_by_default_with_bf16_storage_too() -> None:
    unit = by_reason(units_of(model={"norm": nn.BatchNorm1d}, storage_dtype="bfloat16"), BATCH_NORM_DEFAULT)
    assert unit.policy == Policy("float32", "float32", output_dtype="bfloat16", cast_forward_inputs=False)


def frozen_plan(*rules: dict[str, object], norm: type[nn.Module] = nn.LayerNorm, **precision: object) -> ModelPlan:
    """Return a plan in which the parameters of the blocks are frozen and stored in bfloat16."""
    inventory = freeze(inventory_of(norm=norm), TrainingConfig(frozen=("layers.**",)))
    config = PrecisionConfig.model_validate({"frozen_storage_dtype": "bfloat16", **precision, "rules": list(rules)})
    return plan_model(inventory, config, RESHARDING)


def test_a_frozen_batchnorm_with_bf16_storage_computes_in_fp32_by_default() -> None:
    for rules in ((), ({"match": "layers.*"},)):
        plan = frozen_plan(*rules, norm=nn.BatchNorm1d)
        unit = plan.unit_of["layers.0.norm1"]
        assert (unit.reason, unit.storage_dtype, unit.compute_dtype) == (BATCH_NORM_DEFAULT, "bfloat16", "float32")


def test_rules_for_frozen_modules_are_checked_with_their_storage_dtype() -> None:
    with pytest.raises(ConfigError, match="bfloat16 parameters and float32 running statistics"):
        frozen_plan({"match": "layers.*.norm1"}, norm=nn.BatchNorm1d)
    with pytest.raises(ConfigError, match="float32 inputs with bfloat16 weights"):
        frozen_plan({"match": "layers.*.mix"}, param_dtype="float32")
    assert frozen_plan({"match": "layers.*.mix"}).unit_of["layers.0.mix"].compute_dtype == "bfloat16"


def test_a_rule_for_a_frozen_module_is_also_checked_for_its_adapter() -> None:
    precision = {"frozen_storage_dtype": "bfloat16", "rules": [{"match": "**.wq", "reduce_dtype": "float32"}]}
    job = tiny_job(Path(), lora={"targets": ["**.wq"]}, precision={"param_dtype": "bfloat16", **precision})
    config = JobConfig.model_validate({**job, "model": {**job["model"], "weights": "weights"}})
    with pytest.raises(ConfigError, match=r"layers\.0\.attention\.wq\.lora, .* bfloat16 inputs with float32 weights"):
        plan_precision(config, build_job_model(config))


def test_modules_without_parameters_get_no_unit() -> None:
    class WithTable(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.BatchNorm1d(4, affine=False)
            self.layer = nn.Linear(4, 4)

    rules = (PrecisionRule(match="**", param_dtype="float32"),)
    units = plan_model(take_inventory(WithTable(), ()), PrecisionConfig(rules=rules), RESHARDING).units
    assert [unit.modules for unit in units] == [("layer",), ("",)]


def test_a_rule_behind_another_that_takes_all_its_modules_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"already follows precision\.rules\.0"):
        units_of({"type": "LayerNorm"}, {"match": "norm"})


def test_a_rule_for_one_of_two_tied_modules_is_an_error() -> None:
    with pytest.raises(ConfigError, match="output and embedding share a parameter"):
        units_of({"match": "output", "param_dtype": "float32"}, model={"tied": True})


class Tables(nn.Module):
    """A model with floating-point and other buffers at two depths, a BatchNorm and a mixture of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.inner = nn.Module()
        self.inner.register_buffer("table", torch.ones(3))
        self.norm = nn.BatchNorm1d(4)
        self.mix = nn.Linear(4, 4)
        args = ExpertArgs(num_experts=4, top_k=1, hidden_dim=4, selection_bias_rate=0.1)
        self.moe = MixtureOfExperts(4, args, nn.functional.silu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def buffers_of(*rules: dict[str, object], **precision: object) -> dict[str, str]:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Tables(), Tables()

    config = PrecisionConfig.model_validate({**precision, "rules": list(rules)})
    return dict(plan_model(take_inventory(Model(), ()), config, RESHARDING).buffer_dtypes)


def test_buffers_keep_their_dtype_by_default() -> None:
    buffers = buffers_of()
    assert set(buffers.values()) == {"float32"} and not any("count" in name for name in buffers)


def test_a_rules_buffer_dtype_covers_what_is_inside_but_for_running_statistics() -> None:
    buffers = buffers_of({"match": "a", "param_dtype": "bfloat16", "buffer_dtype": "bfloat16"})
    assert {name for name, dtype in buffers.items() if dtype == "bfloat16"} == {"a.scale", "a.inner.table"}


def test_the_default_buffer_dtype_covers_all_but_rules_with_their_own_and_running_statistics() -> None:
    rule = {"match": "a", "param_dtype": "bfloat16", "buffer_dtype": "float32"}
    buffers = buffers_of(rule, buffer_dtype="bfloat16")
    assert {name for name, dtype in buffers.items() if dtype == "bfloat16"} == {"b.scale", "b.inner.table"}


def test_no_rule_rounds_the_selection_biases_and_loads_of_experts() -> None:
    with pytest.raises(ConfigError, match=r"applies to no floating buffer: .* a mixture of experts stay float32"):
        buffers_of({"match": "a.moe", "param_dtype": "bfloat16", "buffer_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"a\.moe\.experts would have bfloat16 inputs with float32 weights"):
        buffers_of({"match": "a.moe.experts", "param_dtype": "float32", "cast_forward_inputs": False})


def test_running_statistics_follow_a_rule_that_names_the_batchnorm_and_its_parameters() -> None:
    rule = {"match": "a.norm", "param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}
    reduced = {name for name, dtype in buffers_of(rule).items() if dtype == "bfloat16"}
    assert reduced == {"a.norm.running_mean", "a.norm.running_var"}
    with pytest.raises(ConfigError, match="float32 parameters and bfloat16 running statistics"):
        buffers_of({**rule, "param_dtype": "float32"})


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int64, "int64"), (torch.complex64, "complex64")])
def test_a_parameter_that_is_not_floating_is_an_error(dtype: torch.dtype, kind: str) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_parameter("index", nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False))
    with pytest.raises(ConfigError, match=rf"the parameter 0\.index is {kind}.* register it as a buffer"):
        plan_model(take_inventory(model, ()), PrecisionConfig(), RESHARDING)


def test_a_rule_can_store_its_parameters_in_another_dtype() -> None:
    units = units_of({"type": "LayerNorm", "storage_dtype": "float32"}, storage_dtype="bfloat16")
    unit = by_reason(units, "precision.rules.0")
    assert (unit.storage_dtype, unit.compute_dtype, unit.policy.output_dtype) == ("float32", "float32", "bfloat16")
    assert {other.storage_dtype for other in units if other is not unit} == {"bfloat16"}


@pytest.mark.parametrize(("unit_per", "sizes"), [("model", [7]), ("block", [2, 2, 2, 1]), ("module", [1] * 7)])
def test_unit_per_sets_the_number_of_units_of_a_rule(unit_per: str, sizes: list[int]) -> None:
    units = units_of({"type": "LayerNorm", "param_dtype": "float32", "unit_per": unit_per})
    ruled = [unit for unit in units if unit.reason == "precision.rules.0"]
    assert [len(unit.modules) for unit in ruled] == sizes
    for unit in ruled:
        in_earlier_blocks = all(path.startswith(("layers.0.", "layers.1.")) for path in unit.modules)
        assert unit.reshard_after_forward is in_earlier_blocks


def test_a_unit_over_several_blocks_is_not_resharded_after_forward_by_default() -> None:
    rule = {"type": "LayerNorm", "param_dtype": "float32"}
    assert units_of(rule)[0].reshard_after_forward is False
    assert units_of({**rule, "reshard_after_forward": True})[0].reshard_after_forward is True
    config = PrecisionConfig.model_validate({"rules": [rule]})
    always = plan_model(inventory_of(), config, Resharding(blocks=True, late=True)).units
    assert always[0].reshard_after_forward is True


ALONE = Layout(replicate=1, shard=1, local_batch_size=1, num_microbatches=1)


def test_the_table_shows_every_unit_and_where_its_rule_stands() -> None:
    table = format_units(plan_model(inventory_of(norm=nn.BatchNorm1d), PrecisionConfig(), RESHARDING), ALONE)
    assert "2 x 1" in table and "BatchNorm default" in table and "float32 (inputs not cast)" in table
    config = PrecisionConfig.model_validate({"rules": [{"type": "LayerNorm"}]})
    table = format_units(plan_model(inventory_of(), config, RESHARDING), ALONE, lambda key: f"job.toml:{key[-1]}")
    assert "precision.rules.0 (job.toml:0)" in table


def test_a_rule_may_match_several_paths_and_each_must_match() -> None:
    units = units_of({"match": ["layers.0.mix", "layers.*.inner.0"], "param_dtype": "float32"})
    modules = by_reason(units, "precision.rules.0").modules
    assert modules == ("layers.0.mix", "layers.0.inner.0", "layers.1.inner.0", "layers.2.inner.0")
    with pytest.raises(ConfigError, match=r"precision\.rules\.0\.match\.1: matches no module .*did you mean \"norm\""):
        units_of({"match": ["layers.0.mix", "nrom"]})


def test_tied_modules_may_be_in_one_rule() -> None:
    rule: dict[str, object] = {"match": ["embedding", "output"], "param_dtype": "float32"}
    with pytest.raises(ConfigError, match="write one precision rule for both"):
        units_of({**rule, "match": "output"}, model={"tied": True})
    with pytest.raises(ConfigError, match="set output_dtype"):
        units_of(rule, model={"tied": True})
    units = units_of({**rule, "output_dtype": "float32"}, model={"tied": True})
    assert by_reason(units, "precision.rules.0").modules == ("embedding", "output")


def test_a_rule_for_an_absent_class_names_the_classes_of_the_model() -> None:
    with pytest.raises(ConfigError, match=r"no module of class LayerNorm: layers\.0\.mix is a Linear"):
        units_of({"match": "layers.*.mix", "type": "LayerNorm"})


def test_classes_of_pytorch_match_by_their_public_names() -> None:
    units = units_of({"type": "torch.nn.LayerNorm", "param_dtype": "float32"})
    assert len(by_reason(units, "precision.rules.0").modules) == 7


class Table(nn.Module):
    """A module with a floating-point buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class SharesTable(nn.Module):
    """A model in which one module with a buffer has three parents."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(2))
        for layer in self.layers:
            layer.append(self.table)


def test_buffers_of_a_shared_module_are_listed_under_its_first_path() -> None:
    inventory = take_inventory(SharesTable(), ("layers.0", "layers.1"))
    rules = [{"match": "table", "buffer_dtype": "bfloat16"}]
    plan = plan_model(inventory, PrecisionConfig.model_validate({"rules": rules}), RESHARDING)
    assert plan.buffer_dtypes["table.scale"] == "bfloat16" and not any("layers" in name for name in plan.buffer_dtypes)
    assert [row["buffer_dtypes"] for row in describe_units(plan, ALONE) if row["reason"] == "block"] == [[], []]
    rules = [{"match": "layers.*", "param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}]
    with pytest.raises(ConfigError, match=r"precision\.rules\.0\.buffer_dtype: applies to no floating buffer"):
        plan_model(inventory, PrecisionConfig.model_validate({"rules": rules}), RESHARDING)


def test_the_norms_unit_of_a_model_without_blocks_is_not_resharded_after_forward() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4))
    config = PrecisionConfig.model_validate({"rules": [{"type": "LayerNorm", "param_dtype": "float32"}]})
    units = list(plan_model(take_inventory(model, ()), config, RESHARDING).units)
    assert by_reason(units, "precision.rules.0").reshard_after_forward is False


def test_parameters_are_not_resharded_if_they_are_not_sharded() -> None:
    def resharding(choice: str, *degrees: int, **sections: Any) -> str:
        config = JobConfig.model_validate({"parallelism": {"fsdp_reshard_after_forward": choice}} | sections)
        layout = Layout(*degrees, local_batch_size=1, num_microbatches=1)
        return with_unsharded_parameters(config, layout).parallelism.fsdp_reshard_after_forward

    assert resharding("default", 1, 1) == resharding("default", 2, 1) == "never"
    assert resharding("default", 1, 2) == resharding("default", 2, 2) == "default"
    assert resharding("always", 1, 1) == "always"
    assert resharding("default", 1, 1, training={"enable_cpu_offload": True}) == "default"
    assert resharding("default", 1, 1, activation_checkpoint={"mode": "auto"}) == "default"


def inventory_of_experts(config: JobConfig) -> Inventory:
    built = build_model(config.model, seq_len=16)
    return take_inventory(built.module, built.blocks, built.head, built.embeddings)


EXPERTS = [f"layers.{index}.moe.experts" for index in range(2)]


@pytest.mark.parametrize(
    ("rules", "dtype", "reasons"),
    [
        ([], "bfloat16", ["experts"] * 2),
        ([{"match": "layers.*.moe.experts", "param_dtype": "float32"}], "float32", ["precision.rules.0"] * 2),
        ([{"match": "layers.*", "param_dtype": "float32"}], "float32", ["precision.rules.0"] * 2),
        ([{"match": "layers.*.moe", "param_dtype": "float32"}], "float32", ["precision.rules.0"] * 2),
    ],
)
def test_experts_that_are_divided_over_ranks_are_units(rules: list[Any], dtype: str, reasons: list[str]) -> None:
    model = {"name": "qwen3_moe", "args": {"n_layers": 2}}
    config = JobConfig.model_validate({"model": model, "precision": {"rules": rules}})
    inventory = inventory_of_experts(config)
    together = plan_model(inventory, config.precision, RESHARDING)
    assert all(unit.expert_parallel == 1 and unit.reason != "experts" for unit in together.units)
    plan = plan_model(inventory, config.precision, RESHARDING, UnitLimits(expert_parallel=4))
    units = [unit for unit in plan.units if unit.expert_parallel > 1]
    assert [unit.modules for unit in units] == [(path,) for path in EXPERTS]
    assert [(unit.expert_parallel, unit.compute_dtype) for unit in units] == [(4, dtype)] * 2
    assert [unit.reason for unit in units] == reasons
    assert [unit.reshard_after_forward for unit in units] == [True, False]
    assert sum(unit.num_parameters for unit in plan.units) == inventory.num_parameters
    table = format_units(plan, replace(ALONE, shard=8, expert=4))
    assert f"{units[0].num_parameters:,} (over 4 ranks x 2 shards)" in table


def test_expert_parallelism_needs_experts_that_divide() -> None:
    with pytest.raises(
        ConfigError, match=r"expert_parallel_degree: divides experts over ranks, but the model has no experts"
    ):
        plan_model(inventory_of(), PrecisionConfig(), RESHARDING, UnitLimits(expert_parallel=2))
    config = JobConfig.model_validate({"model": {"name": "qwen3_moe"}})
    with pytest.raises(ConfigError, match=r"must divide the number of experts in layers.0.moe.experts \(8\)"):
        plan_model(inventory_of_experts(config), PrecisionConfig(), RESHARDING, UnitLimits(expert_parallel=3))


def test_units_inside_of_each_other_are_divided_by_module() -> None:
    """`layers.0.inner` of the first rule contains a module of the second, and `layers.1.inner` the other way round."""
    first = {"match": ["layers.0.inner", "layers.1.inner.0"], "param_dtype": "float32", "unit_per": "model"}
    second = {**first, "match": ["layers.1.inner", "layers.0.inner.0"], "reduce_dtype": "bfloat16"}
    order = [unit.name for unit in units_of(first, second) if unit.reason.startswith("precision")]
    assert sorted(order) == ["layers.0.inner", "layers.0.inner.0", "layers.1.inner", "layers.1.inner.0"]
    assert all(order.index(f"layers.{index}.inner.0") < order.index(f"layers.{index}.inner") for index in range(2))


def in_place(*rules: dict[str, object], model: dict[str, object] | None = None, **precision: object) -> ModelPlan:
    config = PrecisionConfig.model_validate({**precision, "rules": list(rules)})
    return plan_model(inventory_of(**(model or {})), config, RESHARDING, UnitLimits(mixes_dtypes=True))


NORMS = {"type": "LayerNorm", "param_dtype": "float32"}


def test_a_rule_in_place_adds_no_unit() -> None:
    plan, without = in_place(NORMS), in_place()
    assert [u.modules for u in plan.units] == [u.modules for u in without.units]
    assert [u.num_parameters for u in plan.units] == [u.num_parameters for u in without.units]
    (rule,) = plan.in_place
    assert len(rule.modules) == 7 and rule.num_parameters == 7 * 16
    assert rule.policy == Policy("float32", "float32", output_dtype="bfloat16")
    assert plan.unit_of["layers.0.norm1"] is rule and plan.sharded_by["layers.0.norm1"].name == "layers.0"
    assert plan.policies["norm"] == rule.policy and plan.policies["output"] == Policy("bfloat16", "float32")
    assert [plan.casts_inputs(unit) for unit in plan.units] == [True, True, True, False, True]
    (row, *_) = describe_units(plan, Layout(1, 2, 1, 1, 1))
    assert row["placement"] == "in place" and set(row["collectives_per_microbatch"].values()) == {0}


def test_a_rule_in_place_may_be_inside_of_another() -> None:
    inner = {"match": "layers.*.inner.1", "param_dtype": "bfloat16"}
    plan = in_place(inner, {"match": "layers.*.inner", "param_dtype": "float32"})
    assert [rule.reason for rule in plan.in_place] == ["precision.rules.0", "precision.rules.1"]
    assert plan.unit_of["layers.1.inner.0"].compute_dtype == "float32"
    assert plan.unit_of["layers.1.inner.1"].policy == Policy("bfloat16", "float32", output_dtype="float32")


@pytest.mark.parametrize(
    ("rule", "precision", "why"),
    [
        ({"unit_per": "module"}, {}, 'unit_per = "module"'),
        ({"reshard_after_forward": True}, {}, "reshard_after_forward = true"),
        ({"reduce_dtype": "bfloat16"}, {}, "layers.0.norm1 reduces gradients in bfloat16, and layers.0 in float32"),
        ({"storage_dtype": "bfloat16"}, {}, "layers.0.norm1 is stored in bfloat16, and layers.0 in float32"),
        (
            {},
            {"storage_dtype": "bfloat16"},
            "layers.0.norm1 computes in float32, which is neither its storage dtype nor",
        ),
        ({}, {"placement": "own_unit"}, 'precision.placement = "own_unit"'),
    ],
)
def test_a_rule_that_cannot_be_in_place_has_its_own_unit_and_says_why(
    rule: dict[str, object], precision: dict[str, object], why: str
) -> None:
    plan = in_place({**NORMS, **rule}, **precision)
    assert not plan.in_place
    assert {u.own_because[: len(why)] for u in plan.units if u.reason == "precision.rules.0"} == {why}
    if "placement" not in precision:
        with pytest.raises(ConfigError, match=r'precision.rules.0 cannot be in place: .*; set "auto"') as error:
            in_place({**NORMS, **rule}, **precision, placement="in_place")
        assert error.value.problems[0].key == ("precision", "placement")


def test_shared_parameters_stay_in_one_unit() -> None:
    both = {"match": ["embedding", "output"], "param_dtype": "float32", "output_dtype": "float32"}
    assert [u.name for u in in_place(both, model={"tied": True}).in_place] == ["precision.rules.0"]  # both in the root


def plan_of_phases(
    phases: Mapping[str, int | None], *rules: dict[str, object], otherwise: int | None = None, **precision: object
) -> ModelPlan:
    """Return a plan in which some modules are trained from other steps than all others. None: never."""

    def with_phase(module: ModuleInfo) -> ModuleInfo:
        phase = phases.get(module.path, otherwise)
        own = (replace(p, requires_grad=phase is not None, trained_from=phase or 0) for p in module.parameters)
        return replace(module, parameters=tuple(own))

    inventory = declare_embedding()
    config = PrecisionConfig.model_validate({"frozen_storage_dtype": "bfloat16", **precision, "rules": list(rules)})
    modules = tuple(map(with_phase, inventory.modules))
    return plan_model(replace(inventory, modules=modules), config, RESHARDING, UnitLimits(mixes_dtypes=True))


MIXES = {"layers.0.mix": 0, "layers.1.mix": 0}
WHOLE_BLOCK = ("layers.1.norm1", "layers.1.mix", "layers.1.inner.0", "layers.1.inner.1")


def test_trained_modules_are_in_place_in_frozen_units() -> None:
    plan, frozen = plan_of_phases(MIXES), plan_of_phases({})
    assert [u.modules for u in plan.units] == [u.modules for u in frozen.units]
    assert {u.storage_dtype for u in plan.units if u.num_parameters} == {"bfloat16"}
    assert [u.name for u in plan.units if u.gradient_dtype == "float32"] == ["layers.0", "layers.1"]
    assert not any(u.is_trained for u in plan.units) and not any(u.gradient_dtype for u in frozen.units)
    (trained,) = plan.in_place
    assert (trained.reason, trained.modules) == ("trained", tuple(MIXES))
    assert (trained.is_trained, trained.storage_dtype, trained.compute_dtype) == (True, "float32", "bfloat16")
    assert trained.policy.input_dtype is trained.policy.output_dtype is None  # no hooks
    assert set(plan.gathered_dtypes()) == {"bfloat16"}
    own = plan_of_phases(MIXES, placement="own_unit")
    gathers = {unit.name: unit.num_gathers for unit in own.units}
    assert {unit.name: unit.num_gathers for unit in plan.units} | {"trained": 1} == gathers


def test_a_trained_module_that_fsdp_wraps_is_cast_at_its_border_in_place() -> None:
    plan = plan_of_phases({"norm": 0})
    assert [unit.modules for unit in plan.in_place] == [("norm",)]
    head = plan.sharded_by["norm"]
    assert head.modules == ("norm", "output") and not plan.casts_inputs(head)
    assert plan.policies["norm"] == plan.policies["output"] == head.policy


MIX_IN_FP32 = {"match": "layers.[01].mix", "param_dtype": "float32"}


@pytest.mark.parametrize(
    ("phases", "rules", "in_place", "own"),
    [
        (MIXES, [MIX_IN_FP32], {"precision.rules.0": "float32"}, {}),
        (
            MIXES,
            [NORMS],
            {"trained": "bfloat16"},
            {"precision.rules.0": "layers.0.norm1 computes in float32, which"},
        ),
        (
            MIXES,
            [{**NORMS, "storage_dtype": "float32"}],
            {"precision.rules.0": "float32", "trained": "bfloat16"},
            {},
        ),
        (
            MIXES,
            [{**MIX_IN_FP32, "storage_dtype": "bfloat16"}],
            {},
            {"precision.rules.0": "layers.0.mix is stored in bfloat16, and layers.0 in float32"},
        ),
        (
            {**MIXES, "layers.2.mix": 3},
            [],
            {"trained": "bfloat16"},
            {"trained after step 3": "the other parameters of the enclosing unit are not trained in the same steps"},
        ),
        (
            dict.fromkeys(MIXES, 2),
            [MIX_IN_FP32],
            {},
            {"precision.rules.0": "the other parameters of the enclosing unit are not trained in the same steps"},
        ),
        (
            {"layers.0.norm1": 0, "layers.0.inner.1": 0},
            [{"match": "layers.*.inner", "param_dtype": "float32", "storage_dtype": "float32"}],
            {"precision.rules.0": "float32", "trained": "bfloat16", "trained, precision.rules.0": "float32"},
            {},
        ),
        (
            {**dict.fromkeys(WHOLE_BLOCK, 2), "layers.2.norm1": 0, "embedding": 0},
            [{**NORMS, "storage_dtype": "float32"}, {"match": "embedding", "param_dtype": "float32"}],
            {
                "precision.rules.0": "float32",
                "trained after step 2, precision.rules.0": "float32",
                "trained, precision.rules.0": "float32",
                "precision.rules.1": "float32",
            },
            {},
        ),
        (
            MIXES,
            [{**MIX_IN_FP32, "unit_per": "block"}],
            {},
            {"precision.rules.0": 'unit_per = "block"'},
        ),
    ],
)
def test_trained_modules_and_rules_in_frozen_units(
    phases: dict[str, int | None], rules: list[dict[str, object]], in_place: dict[str, str], own: dict[str, str]
) -> None:
    """`in_place`: compute dtypes by reason. `own`: beginnings of the reasons for units of their own."""
    plan = plan_of_phases(phases, *rules)
    assert {unit.reason: unit.compute_dtype for unit in plan.in_place} == in_place
    reasons = {unit.reason: unit.own_because for unit in plan.units if unit.own_because}
    assert reasons.keys() == own.keys() and all(reasons[name].startswith(why) for name, why in own.items())
    nothing = plan_of_phases(phases, *rules, placement="own_unit")
    assert not nothing.in_place
    assert {u.own_because for u in nothing.units if u.own_because} >= {'precision.placement = "own_unit"'}
