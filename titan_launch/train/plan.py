"""What a job will do, before anything is allocated: shown by `plan`, and by every run as it starts."""

from __future__ import annotations

import json
from dataclasses import asdict

from titan_launch.config.job import JobConfig
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.models.inventory import take_inventory
from titan_launch.parallel.activation_checkpoint import chosen_blocks
from titan_launch.parallel.batchnorm import check_batch_norms
from titan_launch.parallel.fsdp import CAN_SHARE_UNITS
from titan_launch.plan.claims import BATCH_NORM_DEFAULT, is_batch_norm
from titan_launch.plan.collectives import Collectives, collectives_of_step
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.report import Place, describe_units, format_collectives, format_units
from titan_launch.plan.types import ModelPlan
from titan_launch.plan.units import plan_model, plan_resharding


def plan_precision(config: JobConfig, built: BuiltModel) -> ModelPlan:
    """The units and dtypes of a model on the meta device.

    Raises ConfigError for precision rules, BatchNorm statistics or recomputation that the model does not go with.
    """
    check_batch_norms(built.module, config.batchnorm)
    chosen_blocks(built.blocks, config.activation_checkpoint)
    resharding = plan_resharding(config.parallelism, config.gradient_accumulation)
    inventory = take_inventory(built.module, built.blocks, built.head)
    return plan_model(inventory, config.precision, resharding, CAN_SHARE_UNITS)


def format_plan(config: JobConfig, plan: ModelPlan, layout: Layout, place: Place) -> str:
    """The model, its unit table, and what is communicated."""
    lines = [
        f"model: {config.model.name}, {plan.inventory.num_parameters:,} parameters",
        format_units(plan, layout, place),
        format_collectives(plan, layout, config.gradient_accumulation),
    ]
    num_norms = sum(is_batch_norm(module) and module.same_as is None for module in plan.inventory.modules)
    if num_norms and config.batchnorm.statistics == "synchronized" and layout.data_parallel > 1:
        more = Collectives(all_gathers=num_norms, all_reduces=num_norms)
        lines.append(f"synchronized BatchNorm: {more} more in a microbatch, of a few numbers per channel")
    if any(unit.reason == BATCH_NORM_DEFAULT for unit in plan.units):
        lines.append("BatchNorm has a unit of its own by default: float32 parameters and running statistics, any input")
    return "\n".join(lines)


def format_batches(config: JobConfig, layout: Layout) -> str:
    """How ranks and batch divide."""
    return (
        f"ranks: {layout.world_size} ({layout.replicate} replicas x {layout.shard} shards)\n"
        f"batch: {layout.global_batch_size} samples a step = {layout.local_batch_size} on each of "
        f"{layout.data_parallel} ranks x {layout.num_microbatches} microbatches ({config.gradient_accumulation.mode})"
    )


def print_plan(config: JobConfig, world_size: int, place: Place, as_json: bool) -> None:
    """The subcommand `plan`: the layout and the units of a job on `world_size` ranks, as text or as JSON.

    Raises ConfigError as a run would at its start.
    """
    layout = plan_layout(config.parallelism, config.training, world_size)
    plan = plan_precision(config, build_model(config.model, config.training.seq_len))
    if not as_json:
        print(f"{format_plan(config, plan, layout, place)}\n{format_batches(config, layout)}")
        return
    step = collectives_of_step(plan.units, layout, config.gradient_accumulation)
    table = {
        "parameters": plan.inventory.num_parameters,
        "layout": asdict(layout),
        "collectives_per_step": asdict(step),
        "units": describe_units(plan, layout, place),
    }
    print(json.dumps(table, indent=2))
