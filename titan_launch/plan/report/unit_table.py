"""The unit table, as text and as data; and what a plan says beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import KeyPath, format_key
from titan_launch.plan.communication import (
    Collectives,
    collectives_of_microbatch,
    collectives_of_step,
    collectives_of_unit,
)
from titan_launch.plan.float8 import describe_float8
from titan_launch.plan.layout import Layout
from titan_launch.plan.pipeline import stage_part
from titan_launch.plan.types import ModelPlan, Unit, enclosing, full_name
from titan_launch.plan.units.rule_assignment import BATCH_NORM_DEFAULT, is_batch_norm

KeyLocator = Callable[[KeyPath], str]
"""Where a key of the job file was given: `configs/job.toml:33`."""


def describe_units(plan: ModelPlan, layout: Layout, locate_key: KeyLocator = format_key) -> list[dict[str, Any]]:
    """One row per unit in wrapping order, as plain data: what `units.json` holds."""
    return [_describe(unit, plan, layout, locate_key) for unit in plan.units]


def _describe(unit: Unit, plan: ModelPlan, layout: Layout, locate_key: KeyLocator) -> dict[str, Any]:
    return {
        "name": unit.name,
        "modules": list(unit.modules),
        "classes": list(dict.fromkeys(plan.inventory.by_path[path].class_name for path in unit.modules)),
        "parameters": unit.num_parameters,
        "storage_dtype": unit.storage_dtype,
        "compute_dtype": unit.compute_dtype,
        "casts_inputs": unit.policy.input_dtype is not None,
        "reduce_dtype": unit.reduce_dtype,
        "output_dtype": unit.policy.output_dtype,
        "buffer_dtypes": _buffer_dtypes(unit, plan),
        "reshard_after_forward": unit.reshard_after_forward,
        "unshard_in_backward": unit.unshard_in_backward,
        "collectives_per_microbatch": asdict(collectives_of_unit(unit, layout)),
        "reason": unit.reason,
        **({"stages": _stages_of(unit, plan)} if plan.stages else {}),
        "place": None if unit.key is None else locate_key(unit.key),
    }


def _stages_of(unit: Unit, plan: ModelPlan) -> list[int]:
    """The pipeline stages that have parameters of a unit."""
    stage_of = {path: stage.index for stage in plan.stages for path in stage.modules}
    owned = [m.path for m in plan.inventory.modules if m.parameters and plan.unit_of[m.path] is unit]
    return sorted({stage_of[enclosing(path, stage_of)] for path in owned})


def _buffer_dtypes(unit: Unit, plan: ModelPlan) -> list[str]:
    """The dtypes of the floating buffers in the modules whose parameters the unit holds."""
    return sorted(
        {
            plan.buffer_dtypes[full_name(module.path, buffer.name)]
            for module in plan.inventory.modules
            for buffer in module.buffers
            if buffer.is_floating and module.same_as is None and plan.unit_of[module.path] is unit
        }
    )


_DTYPE_COLUMNS = ("storage", "compute", "reduce", "output", "buffers")
_COLUMNS = ("unit", "modules", "class", "parameters", *_DTYPE_COLUMNS, "reshard", "collectives", "from")


def format_units(plan: ModelPlan, layout: Layout, locate_key: KeyLocator = format_key) -> str:
    """An aligned table, one line per unit in wrapping order; units alike but for their path share a line."""
    lines: list[Sequence[str]] = [_COLUMNS]
    rows = describe_units(plan, layout, locate_key)
    for _, alike in groupby(rows, key=lambda row: _cells(row)[1:]):
        group = list(alike)
        cells = _cells(group[0])
        if len(group) > 1:
            cells[0] = f"{group[0]['name']} .. {group[-1]['name']}"
            cells[1] = f"{len(group)} x {cells[1]}"
            cells[3] = f"{len(group)} x {cells[3]}"
        lines.append(cells)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["name"],
        str(len(row["modules"])),
        ", ".join(row["classes"]),
        f"{row['parameters']:,}",
        row["storage_dtype"],
        row["compute_dtype"] + ("" if row["casts_inputs"] else " (inputs as they come)"),
        row["reduce_dtype"],
        row["output_dtype"] or "as computed",
        ", ".join(row["buffer_dtypes"]) or "-",
        {True: "yes", False: "no", None: "root"}[row["reshard_after_forward"]]
        + ("" if row["unshard_in_backward"] else ", once"),
        str(Collectives(**row["collectives_per_microbatch"])),
        row["reason"] + (f" ({row['place']})" if row["place"] else ""),
    ]


def format_collectives(plan: ModelPlan, layout: Layout, accumulation: GradientAccumulationConfig) -> str:
    """One line: what FSDP2 communicates in a microbatch and, by the accumulation mode, in a step."""
    microbatch = collectives_of_microbatch(plan.units, layout)
    step = collectives_of_step(plan.units, layout, accumulation)
    if not microbatch.total:
        return "collectives: none"
    kept = ", parameters kept" if accumulation.keep_params_unsharded else ""
    return (
        f"collectives: {microbatch} = {microbatch.total} in a microbatch alone; "
        f"{step} = {step.total} in a step of {layout.num_microbatches} ({accumulation.mode}{kept})"
    )


def format_plan(config: JobConfig, plan: ModelPlan, layout: Layout, locate_key: KeyLocator) -> str:
    """The model, its unit table, and what is communicated."""
    lines = [
        f"model: {config.model.name}, {plan.inventory.num_parameters:,} parameters",
        format_units(plan, layout, locate_key),
        *(_stage_lines(config, plan, layout) or [format_collectives(plan, layout, config.gradient_accumulation)]),
    ]
    num_norms = sum(is_batch_norm(module) and module.same_as is None for module in plan.inventory.modules)
    if num_norms and config.batchnorm.statistics == "synchronized" and layout.data_parallel * layout.context > 1:
        more = Collectives(all_gathers=num_norms, all_reduces=num_norms)
        lines.append(f"synchronized BatchNorm: {more} more in a microbatch, of a few numbers per channel")
    if any(unit.reason == BATCH_NORM_DEFAULT for unit in plan.units):
        lines.append("BatchNorm has a unit of its own by default: float32 parameters and running statistics, any input")
    return "\n".join(lines)


def _stage_lines(config: JobConfig, plan: ModelPlan, layout: Layout) -> list[str]:
    """What each pipeline stage holds and communicates, and on which ranks it is; nothing without stages."""
    if not plan.stages:
        return []
    schedule, ranks = config.parallelism.pipeline_parallel_schedule, layout.ranks_per_stage
    lines = [f"pipeline: {schedule}, {len(plan.stages)} stages on {layout.pipeline} x {ranks} ranks"]
    for stage in plan.stages:
        first, last = stage.rank * ranks, (stage.rank + 1) * ranks - 1
        where = f"rank {first}" if first == last else f"ranks {first} to {last}"
        collectives = format_collectives(stage_part(plan, stage), layout, config.gradient_accumulation)
        lines.append(
            f"stage {stage.index} ({where}): {stage.extent}, {stage.num_parameters:,} parameters; {collectives}"
        )
    return lines


def format_kernels(config: JobConfig, plan: ModelPlan) -> str:
    """What computes otherwise than by default: a line for the layers in float8, and one for what of `[kernels]` is
    set; nothing where all is as ever. The run's log says which backend `auto` found, which takes the device."""
    lines = [describe_float8(config.float8, plan)] if plan.float8 else []
    changed = ", ".join(f"{name} = {toml_value(value)}" for name, value in config.kernels.changed())
    return "\n".join([*lines, *([f"kernels: {changed}"] if changed else [])])


def format_batches(config: JobConfig, layout: Layout) -> str:
    """How ranks and batch divide."""
    return (
        f"ranks: {layout.world_size} ({_degrees(layout)})\n"
        f"batch: {layout.global_batch_size} samples a step = {layout.local_batch_size} on each of "
        f"{layout.data_parallel} ranks x {layout.num_microbatches} microbatches ({config.gradient_accumulation.mode})"
    )


def _degrees(layout: Layout) -> str:
    axes = [
        f"{degree} {what}"
        for degree, what in (
            (layout.pipeline, "pipeline"),
            (layout.context, "context"),
            (layout.tensor, "tensor"),
        )
        if degree > 1
    ]
    return " x ".join([f"{layout.replicate} replicas", f"{layout.shard} shards", *axes])
