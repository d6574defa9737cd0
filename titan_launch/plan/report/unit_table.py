"""The header of a run and the table of FSDP2 units, as text and as data. This module does not import torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from titan_launch.config.axes import GRID
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.sections.data import ValidationConfig
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.training import GradientAccumulationConfig, TrainingConfig
from titan_launch.core.errors import KeyPath, format_key, listed
from titan_launch.core.globs import alike
from titan_launch.core.terminal import aligned, one_line
from titan_launch.models.architectures import named_flavor
from titan_launch.models.huggingface.args import class_name
from titan_launch.plan.communication import Collectives, collectives_of_step, collectives_of_unit
from titan_launch.plan.experts import active_parameters, describe_division
from titan_launch.plan.freezing import ADAPTER, is_adapter
from titan_launch.plan.layout import Layout
from titan_launch.plan.module_selection import describe_float8
from titan_launch.plan.mup import describe_scales, width_scales
from titan_launch.plan.pipeline import stage_part
from titan_launch.plan.types import Inventory, ModelPlan, TensorInfo, Unit, enclosing, full_name, parameters_by_unit
from titan_launch.plan.units.rule_assignment import BATCH_NORM_DEFAULT, is_batch_norm

IN_PLACE = "in place"
"""Value of `placement` for an entry of `ModelPlan.in_place`."""

KeyLocator = Callable[[KeyPath], str]
"""A function that returns the location of a key of the job as text, such as `configs/job.toml:33`."""


def describe_units(plan: ModelPlan, layout: Layout, locate_key: KeyLocator = format_key) -> list[dict[str, Any]]:
    """Return one row for each entry of `plan.in_place`, then one row for each unit in wrapping order. The rows are the
    content of `units.json`."""
    parameters = parameters_by_unit(plan.inventory, plan.boundaries)
    rows = [
        _describe(unit, own, plan, layout, locate_key) for unit, own in zip(plan.boundaries, parameters, strict=True)
    ]
    return rows[len(plan.units) :] + rows[: len(plan.units)]


def _describe(
    unit: Unit, own: Sequence[TensorInfo], plan: ModelPlan, layout: Layout, locate_key: KeyLocator
) -> dict[str, Any]:
    """Return the row of a unit, or of an entry of `plan.in_place`. `own`: the parameters to which the
    policy of `unit` applies."""
    is_in_place = any(unit is rule for rule in plan.in_place)
    placement = f"own unit: {unit.own_because}" if unit.own_because else "own unit"
    collectives = Collectives() if is_in_place else collectives_of_unit(unit, layout)
    return {
        "name": unit.name,
        "modules": list(unit.modules),
        "classes": list(dict.fromkeys(plan.inventory.by_path[path].class_name for path in unit.modules)),
        "parameters": sum(parameter.numel for parameter in own),
        "placement": IN_PLACE if is_in_place else placement,
        "expert_parallel": unit.expert_parallel,
        "shards": layout.shards_of(unit),
        "storage_dtype": unit.storage_dtype,
        "compute_dtype": unit.compute_dtype,
        "casts_inputs": unit.policy.input_dtype is not None,
        "is_trained": unit.is_trained,
        "reduce_dtype": unit.reduce_dtype,
        "output_dtype": unit.policy.output_dtype,
        "buffer_dtypes": _buffer_dtypes(unit, plan),
        "reshard_after_forward": unit.reshard_after_forward,
        "unshard_in_backward": unit.unshard_in_backward,
        "collectives_per_microbatch": asdict(collectives),
        "reason": unit.reason,
        **({"stages": _stages(unit, plan)} if plan.stages else {}),
        "location": None if unit.key is None else locate_key(unit.key),
    }


def _stages(unit: Unit, plan: ModelPlan) -> list[int]:
    """Return the indices of the pipeline stages that have parameters of a unit."""
    stage_of = {path: stage.index for stage in plan.stages for path in stage.modules}
    owned = [m.path for m in plan.inventory.modules if m.parameters and plan.unit_of[m.path] is unit]
    return sorted({stage_of[enclosing(path, stage_of)] for path in owned})


def _buffer_dtypes(unit: Unit, plan: ModelPlan) -> list[str]:
    """Return the dtypes of floating buffers, sorted and each once. Only modules to which the policy of `unit` applies
    count (`ModelPlan.unit_of`)."""
    modules = [m for m in plan.inventory.distinct if plan.unit_of[m.path] is unit]
    names = (full_name(m.path, buffer.name) for m in modules for buffer in m.buffers if buffer.is_floating)
    return sorted({plan.buffer_dtypes[name] for name in names})


_COLUMNS = (
    ("unit", lambda row: row["name"]),
    ("modules", lambda row: str(len(row["modules"]))),
    ("class", lambda row: ", ".join(row["classes"])),
    ("parameters", lambda row: _parameters(row)),
    ("storage dtype", lambda row: row["storage_dtype"]),
    ("compute dtype", lambda row: row["compute_dtype"] + ("" if row["casts_inputs"] else " (inputs not cast)")),
    ("reduce dtype", lambda row: "frozen" if row["parameters"] and not row["is_trained"] else row["reduce_dtype"]),
    ("output dtype", lambda row: row["output_dtype"] or "unchanged"),
    ("buffer dtype", lambda row: ", ".join(row["buffer_dtypes"]) or "no buffers"),
    ("reshard after forward", lambda row: _resharding(row)),
    ("collectives per unit and microbatch", lambda row: _collectives(row)),
    ("made by", lambda row: row["reason"] + (f" ({row['location']})" if row["location"] else "")),
)  # fmt: skip
"""Titles and cells of the unit table."""


def _parameters(row: dict[str, Any]) -> str:
    """Return the number of parameters as text. For divided experts, the text has the numbers of ranks and shards, too:
    `4,096 (over 4 ranks x 2 shards)`."""
    divided = row["expert_parallel"]
    return f"{row['parameters']:,}" + (f" (over {divided} ranks x {row['shards']} shards)" if divided > 1 else "")


def _collectives(row: dict[str, Any]) -> str:
    return f"none, {IN_PLACE}" if _is_in_place(row) else str(Collectives(**row["collectives_per_microbatch"]))


def _is_in_place(row: dict[str, Any]) -> bool:
    return bool(row["placement"] == IN_PLACE)


def _resharding(row: dict[str, Any]) -> str:
    if _is_in_place(row):
        return "as the unit around it"
    if not row["reshard_after_forward"]:
        return "no"  # None leaves the choice to FSDP2, which does not reshard the root
    return "yes" if row["unshard_in_backward"] else "yes, not all-gathered in backward"


def format_units(plan: ModelPlan, layout: Layout, locate_key: KeyLocator = format_key) -> str:
    """Return the rows of `describe_units` as an aligned table with titles. Consecutive rows share a line if only their
    names differ."""
    lines: list[Sequence[str]] = [[title for title, _ in _COLUMNS]]
    rows = describe_units(plan, layout, locate_key)
    for _, group in groupby(rows, key=lambda row: _cells(row)[1:]):
        first, *others = group
        cells = _cells(first)
        if others:
            cells[0] = f"{first['name']} .. {others[-1]['name']}"
            cells[1], cells[3] = (f"{len(others) + 1} x {cells[column]}" for column in (1, 3))
        lines.append(cells)
    return "\n".join(aligned(lines))


def _cells(row: dict[str, Any]) -> list[str]:
    return [cell(row) for _, cell in _COLUMNS]


def format_collectives(plan: ModelPlan, layout: Layout, accumulation: GradientAccumulationConfig) -> str:
    """Return the numbers of FSDP2's collectives in a step as text: `4 all-gathers + 2 reduce-scatters per step of 2
    microbatches`, or `none`."""
    step = collectives_of_step(plan.units, layout, accumulation)
    if not step.total:
        return "none"
    number = layout.num_microbatches
    return f"{step} per step of {number} microbatch{'es' * (number > 1)}"


def format_plan(config: JobConfig, plan: ModelPlan, layout: Layout, locate_key: KeyLocator) -> str:
    """Return the unit table, the collectives of a step (with pipeline parallelism, of each stage), and remarks. The
    remarks are on synchronized BatchNorm, rules with units of their own, muP and the BatchNorm default."""
    lines = ["FSDP2 units", format_units(plan, layout, locate_key)]
    lines += _stage_lines(config, plan, layout) or [
        f"collectives: {format_collectives(plan, layout, config.gradient_accumulation)}"
    ]
    num_norms = sum(map(is_batch_norm, plan.inventory.distinct))
    if num_norms and config.batchnorm.statistics == "synchronized" and layout.token_ranks > 1:
        more = Collectives(all_gathers=num_norms, all_reduces=num_norms)
        lines.append(f"synchronized BatchNorm adds {more} per microbatch, each with a few numbers per channel")
    lines += dict.fromkeys(f"units of their own ({u.reason}): {u.own_because}" for u in plan.units if u.own_because)
    parameters = [full_name(m.path, p.name) for m in plan.inventory.distinct for p in m.parameters]
    if table := [*describe_scales(config, parameters)]:
        width = width_scales(config).ratio
        lines += [f"muP: {width:g} x the base width, {config.mup.base_width}", *aligned(table)]
    if any(unit.reason == BATCH_NORM_DEFAULT for unit in plan.boundaries):
        lines.append(f"{BATCH_NORM_DEFAULT}: float32 parameters and running statistics, inputs in any dtype")
    return "\n".join(lines)


def _stage_lines(config: JobConfig, plan: ModelPlan, layout: Layout) -> list[str]:
    """Return a line with the pipeline schedule, and a line for each stage; [] without stages."""
    if not plan.stages:
        return []
    schedule, ranks = config.parallelism.pipeline_parallel_schedule, layout.ranks_per_stage
    lines = [f"pipeline: schedule {schedule}, {len(plan.stages)} stages on {layout.pipeline} x {ranks} ranks"]
    for stage in plan.stages:
        first, last = stage.rank * ranks, (stage.rank + 1) * ranks - 1
        where = f"rank {first}" if first == last else f"ranks {first} to {last}"
        collectives = format_collectives(stage_part(plan, stage), layout, config.gradient_accumulation)
        lines.append(
            f"pipeline stage {stage.index} ({where}): {stage.extent}, {stage.num_parameters:,} parameters; "
            f"collectives: {collectives}"
        )
    return lines


Line = tuple[str, str]
"""A line of text: name and value."""


def format_lines(lines: Iterable[Line]) -> str:
    """Return lines `name: value`. Names have a fixed width, so the values of several calls are aligned."""
    return "\n".join(f"{f'{one_line(name)}:':<27}{one_line(value)}" for name, value in lines)


def summary_of_job(config: JobConfig, plan: ModelPlan, layout: Layout) -> list[Line]:
    """Return the header of a run: model, layout, precision, modes, kernels, optimizer and steps."""
    optimizer, schedule = config.optimizer, config.lr_scheduler
    compiled = f"{config.compile.backend}, {_count(len(plan.compiled), 'module')}" if config.compile.enable else ""
    kernels = ", ".join(f"{name} = {toml_value(value)}" for name, value in config.kernels.changed())
    total, active = plan.inventory.num_parameters, active_parameters(config, plan)
    of_experts = "" if active == total else f", {active:,} active for each token"
    lines = [
        ("model", f"{model_name(config)}, {total:,} parameters{of_experts}"),
        ("trained", _trained(plan.inventory)),
        ("adapters", _adapters(config, plan.inventory)),
        ("blocks", _blocks(plan.inventory)),
        *summary_of_batch(layout),
        ("precision", _precision(config, plan)),
        ("float8", describe_float8(config.float8, plan) if plan.float8 else ""),
        ("gradient accumulation", config.gradient_accumulation.label),
        ("activation checkpointing", config.activation_checkpoint.label),
        ("torch.compile", compiled),
        ("kernels", kernels),
        ("optimizer", f"{optimizer.name}, learning rate {optimizer.lr:g}, {schedule.warmup_steps} warm-up steps"),
        ("moving average of weights", "" if config.ema.decay is None else f"decay {config.ema.decay:g}, float32"),
        ("early stopping", _early_stopping(config.validation)),
        _length(config.training),
    ]
    return [(name, value) for name, value in lines if value]


def _length(training: TrainingConfig) -> Line:
    # Without `training.steps`, the number of steps follows from the data, which is not open yet.
    return ("steps", f"{training.steps:,}") if training.steps is not None else ("epochs", f"{training.epochs:g}")


def _early_stopping(config: ValidationConfig) -> str:
    """Return the condition of early stopping in words; empty if `validation.patience` is unset."""
    if config.patience is None:
        return ""
    enough = f" by more than {config.min_improvement:g}" if config.min_improvement else ""
    number = f"{config.patience} validation{'s' * (config.patience != 1)}"
    return f"after {number} in a row that do not improve the loss{enough}"


def _trained(inventory: Inventory) -> str:
    """Return the number of trained parameters: `1,024 parameters (10 %), of these 512 after step 100`. Empty if all
    parameters are trained from the start."""
    numel_by_step = Counter[int]()
    for parameter in inventory.parameters.values():
        if parameter.tied_to is None:
            numel_by_step[parameter.trained_from] += parameter.numel * parameter.requires_grad
    trained = numel_by_step.total()
    parts = [f"{numel:,} after step {step}" for step, numel in sorted(numel_by_step.items()) if step and numel]
    if trained == inventory.num_parameters and not parts:
        return ""
    share = 100 * trained / inventory.num_parameters
    return f"{trained:,} parameters ({share:.3g} %)" + (f", of these {', '.join(parts)}" if parts else "")


def _adapters(config: JobConfig, inventory: Inventory) -> str:
    """Return the modules that have adapters, with rank and alpha of the adapters: `6 x layers.*.attention.wq; rank 16,
    alpha 32`. Empty without adapters."""
    inside = (module.path.split(".") for module in inventory.modules if is_adapter(f"{module.path}.a"))
    targets = dict.fromkeys(".".join(parts[: parts.index(ADAPTER)]) for parts in inside)
    if not targets:
        return ""
    modules = listed([f"{count} x {pattern}" for pattern, count in alike(targets).items()], most=8)
    others = "; other values in lora.rules" if config.lora.rules else ""
    return f"{modules}; rank {config.lora.rank}, alpha {config.lora.alpha:g}{others}"


def _blocks(inventory: Inventory) -> str:
    """Return the blocks in words: `12 of layers.* (Block), the entries of nn.ModuleList`."""
    if not inventory.blocks:
        return "none; the model is one FSDP2 unit, except modules with precision rules; name blocks in model.blocks"
    globs = alike(inventory.blocks)
    classes = dict.fromkeys(inventory.by_path[path].class_name for path in inventory.blocks)
    origin = f", {inventory.blocks_origin}" if inventory.blocks_origin else ""
    return f"{len(inventory.blocks)} of {listed([*globs])} ({', '.join(classes)}){origin}"


def model_name(config: JobConfig) -> str:
    """Return the model's name, and its flavor if it has one. A model of `transformers` has its class in place of the
    flavor."""
    model = config.model
    detail = class_name(model.args) if model.name == HUGGINGFACE else named_flavor(model.name, model.flavor)
    return f"{model.name} {detail}".rstrip()


def summary_of_batch(layout: Layout) -> list[Line]:
    """Return the lines `ranks` (number along each axis), `experts` (only with expert parallelism) and `global batch`:
    `8 samples = 4 ranks x 2 samples x 1 microbatch`."""
    division = [f"{layout.degree(axis)} {axis.ranks}" for axis in GRID if layout.degree(axis) > 1]
    sharded = "; optimizer sharded over the replicas" if layout.optimizer_replicas > 1 else ""
    kind = "data-parallel rank" if layout.model_parallel > 1 else "rank"
    batch = " x ".join(
        (
            _count(layout.data_parallel, kind),
            _count(layout.local_batch_size, "sample"),
            _count(layout.num_microbatches, "microbatch", "microbatches"),
        )
    )
    experts = describe_division(layout)
    return [
        ("ranks", " = ".join(filter(None, (str(layout.world_size), " x ".join(division)))) + sharded),
        *([("experts", experts)] if experts else []),
        ("global batch", f"{_count(layout.global_batch_size, 'sample')} = {batch}"),
    ]


def _count(number: int, name: str, plural: str | None = None) -> str:
    return f"{number} {name if number == 1 else plural or name + 's'}"


def _precision(config: JobConfig, plan: ModelPlan) -> str:
    """Return the default dtypes. The numbers of modules that compute in other dtypes follow, by the reason for their
    unit."""
    precision = config.precision
    compute = precision.param_dtype
    others: Counter[tuple[str, str]] = Counter()
    for module in plan.inventory.distinct:
        unit = plan.unit_of[module.path]
        if module.parameters and unit.compute_dtype != compute:
            others[unit.compute_dtype, unit.reason] += 1
    parts = [f"compute {compute}, storage {precision.storage_dtype}, gradient reduction {precision.reduce_dtype}"]
    parts += [f"{_count(count, 'module')} in {dtype} ({reason})" for (dtype, reason), count in others.items()]
    return "; ".join(parts)
