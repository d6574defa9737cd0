"""The plan of a job: its FSDP2 units, and the choices of modes (`Choice`) that a plan compares. This module does not
import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.parallelism import split_backward_checkpoints_whole_modules
from titan_launch.config.rules.precision import ACCUMULATION_RULES
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.training import ACCUMULATION_MODES, GradientAccumulationConfig
from titan_launch.core.errors import ConfigError, format_key
from titan_launch.core.torch_release import CAN_SHARE_UNITS, MIXES_DTYPES_IN_UNIT
from titan_launch.plan.freezing import freeze
from titan_launch.plan.layout import Layout
from titan_launch.plan.module_selection import (
    check_shards,
    checkpointed_modules,
    compiled_modules,
    float8_modules,
    loss_head,
)
from titan_launch.plan.param_groups import check_param_groups, check_stacks, matrix_stacks
from titan_launch.plan.pipeline import plan_stages
from titan_launch.plan.types import Inventory, ModelPlan, Unit
from titan_launch.plan.units.fsdp_units import UnitLimits, plan_model
from titan_launch.plan.units.order import plan_resharding


@dataclass(frozen=True)
class Choice:
    """A gradient accumulation mode and an activation checkpointing mode, neither of them `auto`."""

    accumulation: GradientAccumulationConfig
    activation_checkpoint: ActivationCheckpointConfig

    def __post_init__(self) -> None:
        if "auto" in (self.accumulation.mode, self.activation_checkpoint.mode):
            raise ValueError("a Choice cannot have mode `auto`: resolve the mode first (plan.auto_mode)")

    @property
    def label(self) -> str:
        """Both modes in words: `gradient accumulation deferred, activation checkpointing none`."""
        accumulation, checkpointing = self.accumulation.label, self.activation_checkpoint.label
        return f"gradient accumulation {accumulation}, activation checkpointing {checkpointing}"


def configured_choice(config: JobConfig) -> Choice:
    """Return the modes that a job sets. An unset `keep_params_unsharded` becomes False. Raises ValueError if a mode is
    `auto`."""
    accumulation, checkpointing = config.gradient_accumulation, config.activation_checkpoint
    unsharded = bool(accumulation.keep_params_unsharded)
    return Choice(accumulation.model_copy(update={"keep_params_unsharded": unsharded}), checkpointing)


def with_choice(config: JobConfig, choice: Choice) -> JobConfig:
    """Return the job with the modes of `choice`."""
    made = {"gradient_accumulation": choice.accumulation, "activation_checkpoint": choice.activation_checkpoint}
    return config.model_copy(update=made)


def with_values(config: JobConfig, values: Mapping[tuple[str, str], Any]) -> JobConfig:
    """Return the job with new `values` of keys, by (section, key). The values are not validated."""
    for section in dict.fromkeys(section for section, _ in values):
        own = {key: value for (of, key), value in values.items() if of == section}
        config = config.model_copy(update={section: getattr(config, section).model_copy(update=own)})
    return config


def is_auto(config: JobConfig) -> bool:
    """Return True if a mode of the job is `auto`."""
    return "auto" in (config.gradient_accumulation.mode, config.activation_checkpoint.mode)


def is_auto_batch(config: JobConfig) -> bool:
    """Return True if `training.local_batch_size` of a job is `auto`."""
    return config.training.local_batch_size == "auto"


def with_local_batch_size(config: JobConfig, size: int | Literal["auto"]) -> JobConfig:
    """Return the job with `size` samples per microbatch. `"auto"`: the planner chooses the size later."""
    return with_values(config, {("training", "local_batch_size"): size})


def with_unsharded_parameters(config: JobConfig, layout: Layout) -> JobConfig:
    """Return the job with `parallelism.fsdp_reshard_after_forward = "never"` if one rank holds all shards and the job
    does not set the key.

    With one shard, FSDP2 all-gathers nothing. Resharding after forward would only add a copy of the parameters in
    backward. A job with a mode `auto` stays unchanged, because low memory is more important. A job with CPU offload
    stays unchanged, because all parameters would stay on the GPU.
    """
    parallelism = config.parallelism
    is_open = parallelism.fsdp_reshard_after_forward == "default" and not is_auto(config)
    if layout.parameter_shards > 1 or not is_open or config.training.enable_cpu_offload:
        return config
    never = parallelism.model_copy(update={"fsdp_reshard_after_forward": "never"})
    return config.model_copy(update={"parallelism": never})


def plan_units(config: JobConfig, inventory: Inventory, keep_params_unsharded: bool) -> ModelPlan:
    """Return the plan of a job without its activation checkpointing. `keep_params_unsharded` is the only setting of
    gradient accumulation that changes the units. Raises ConfigError as `plan_job` does."""
    accumulation = GradientAccumulationConfig(keep_params_unsharded=keep_params_unsharded)
    return plan_job(with_choice(config, Choice(accumulation, ActivationCheckpointConfig())), inventory)


def plan_job(config: JobConfig, inventory: Inventory) -> ModelPlan:
    """Return units, dtypes, pipeline stages and loss head of a job without `auto`, and the modules that are
    checkpointed, compiled or converted to float8.

    Raises ConfigError for frozen parameters, precision rules, expert parallelism, activation checkpointing,
    compilation, float8 or stages that the model does not support.
    """
    inventory = freeze(inventory, config.training, bool(config.lora.targets))
    checkpointed = checkpointed_modules(inventory, config.activation_checkpoint)
    resharding = plan_resharding(config.parallelism, config.gradient_accumulation)
    limits = UnitLimits(
        share_units=CAN_SHARE_UNITS,
        expert_parallel=config.parallelism.expert_parallel_degree,
        is_pipelined=config.parallelism.pipeline_parallel_degree > 1,
        mixes_dtypes=MIXES_DTYPES_IN_UNIT,
    )
    plan = plan_model(inventory, config.precision, resharding, limits)
    plan = replace(
        plan,
        checkpointed=checkpointed,
        compiled=compiled_modules(config, inventory, plan.units, checkpointed),
        float8=float8_modules(config.float8, plan),
        stages=plan_stages(inventory, config.parallelism),
    )
    return replace(plan, loss_head=loss_head(config, plan))


def check_plan(config: JobConfig, plan: ModelPlan, layout: Layout) -> None:
    """Raise ConfigError if `[optimizer]` or `[float8]` does not fit the model or the layout. `plan`: the result of
    `plan_job` for the same job, in any modes."""
    check_param_groups(plan.inventory, config.optimizer)
    check_stacks(matrix_stacks(plan.inventory, config.optimizer), config.optimizer, layout)
    check_shards(config.float8, plan, layout)


def plan_untrained(config: JobConfig, inventory: Inventory) -> ModelPlan:
    """Return the plan of the second model of a loss (reference or teacher), which is never trained. `config`: result of
    `config.rules.loss.frozen_job`. Raises ConfigError as `plan_job` does."""

    def untrained(units: Sequence[Unit]) -> tuple[Unit, ...]:
        return tuple(replace(unit, is_trained=False, gradient_dtype=None) for unit in units)

    plan = plan_job(config, inventory)
    return replace(plan, units=untrained(plan.units), in_place=untrained(plan.in_place))


def possible_choices(
    config: JobConfig, layout: Layout, inventory: Inventory, only_own: bool = False
) -> tuple[list[Choice], list[str]]:
    """Return the choices that a plan can compare, and notes with the reasons why other modes are not compared. Of
    several choices with the same effect in this layout, only one is returned, without a note about the others.
    `only_own`: True to return only the choices that the job sets or `auto` may take.

    Raises ConfigError if the model does not support the job's activation checkpointing, or cannot be compiled with it.
    """
    accumulations, notes = _accumulations(config, layout)
    checkpointings = [c for c in _activation_checkpoints(config) if _is_allowed_by_schedule(config, c, notes)]
    own = config.activation_checkpoint
    if not inventory.blocks and not own.modules:
        if own.mode not in ("none", "auto"):
            checkpointed_modules(inventory, own)  # raises
        notes.append("activation checkpointing is not compared: the model's blocks are unknown (set model.blocks)")
        checkpointings = [ActivationCheckpointConfig(offload=own.offload)]
    else:
        for checkpointing in checkpointings:
            if is_configured_activation_checkpoint(config, checkpointing):
                checkpointed_modules(inventory, checkpointing)  # raises for modules that match nothing
        checkpointings = [c for c in checkpointings if _can_be_compiled(config, inventory, c, notes)]
    choices = [Choice(a, c) for c in checkpointings for a in accumulations]
    return [choice for choice in choices if not only_own or is_configured_choice(config, choice)], notes


def _is_allowed_by_schedule(config: JobConfig, checkpointing: ActivationCheckpointConfig, notes: list[str]) -> bool:
    """Return True if the pipeline schedule supports an activation checkpointing mode. Otherwise append the reason to
    `notes`."""
    changed = config.model_copy(update={"activation_checkpoint": checkpointing})
    problem = next(split_backward_checkpoints_whole_modules(changed), None)
    if problem is not None:
        reason = problem.reason.partition(";")[0]
        notes.append(f"activation checkpointing {checkpointing.label} is not compared: {reason}")
    return problem is None


def _can_be_compiled(
    config: JobConfig, inventory: Inventory, checkpointing: ActivationCheckpointConfig, notes: list[str]
) -> bool:
    """Return True if `[compile]` supports an activation checkpointing mode. Otherwise append the reason to `notes`, or
    raise ConfigError if the job sets the mode."""
    if not config.compile.enable:
        return True
    try:
        plan_job(with_choice(config, Choice(GradientAccumulationConfig(), checkpointing)), inventory)
    except ConfigError as error:
        if config.activation_checkpoint == checkpointing:
            raise
        reason = f"because the job is compiled: {error.problems[0].reason.partition(';')[0]}"
        notes.append(f"activation checkpointing {checkpointing.label} is not compared {reason}")
        return False
    return True


def _accumulations(config: JobConfig, layout: Layout) -> tuple[list[GradientAccumulationConfig], list[str]]:
    own = config.gradient_accumulation
    found: dict[tuple[bool, bool, bool], GradientAccumulationConfig] = {}
    notes = []
    for candidate in sorted(_candidates(layout), key=lambda it: not _is_configured_accumulation(config, it)):
        changed = config.model_copy(update={"gradient_accumulation": candidate})
        problem = next((problem for rule in ACCUMULATION_RULES for problem in rule(changed)), None)
        if problem is None:
            found.setdefault(_effect(config, candidate, layout), candidate)
        elif not candidate.keep_params_unsharded or own.keep_params_unsharded:
            key, reason = format_key(problem.key), problem.reason.partition(";")[0]
            label = f"gradient accumulation {candidate.label}"
            notes.append(f"{label} is not compared: {key} = {problem.value}: {reason}")
    order = [_effect(config, candidate, layout) for candidate in _candidates(layout)]
    return sorted(found.values(), key=lambda it: order.index(_effect(config, it, layout))), list(dict.fromkeys(notes))


def _candidates(layout: Layout) -> Iterator[GradientAccumulationConfig]:
    for unsharded in (False, True):
        for name, row in ACCUMULATION_MODES.items():
            if layout.fsdp_replicas > 1 or not row.needs_all_reduces:
                yield GradientAccumulationConfig(mode=name, keep_params_unsharded=unsharded)


def _effect(config: JobConfig, accumulation: GradientAccumulationConfig, layout: Layout) -> tuple[bool, bool, bool]:
    """Return three flags of a mode in this layout: it defers reduce-scatters, it defers all-reduces, it keeps
    parameters unsharded."""
    # With one microbatch or one rank, no mode defers. With one shard, unsharded parameters have an effect only if FSDP2
    # would otherwise cast the parameters to the compute dtype again in each microbatch.
    defers = layout.num_microbatches > 1 and layout.world_size > 1
    repeats_casts = layout.num_microbatches > 1 and config.precision.param_dtype != config.precision.storage_dtype
    return (
        defers and not accumulation.row.reduce_scatters_each,
        defers and not accumulation.row.all_reduces_each,
        bool(accumulation.keep_params_unsharded) and (layout.parameter_shards > 1 or repeats_casts),
    )


def _activation_checkpoints(config: JobConfig) -> Iterator[ActivationCheckpointConfig]:
    own = config.activation_checkpoint
    yield ActivationCheckpointConfig(mode="none", offload=own.offload)
    yield ActivationCheckpointConfig(mode="selective", modules=own.modules, offload=own.offload)
    if own.mode == "memory_budget" or (own.mode == "selective" and own.selective_ac_option != "op"):
        yield own
    yield ActivationCheckpointConfig(mode="full", modules=own.modules, offload=own.offload)


def is_configured_choice(config: JobConfig, choice: Choice) -> bool:
    """Return True if the job sets the modes of `choice`, or if `auto` may take them."""
    return _is_configured_accumulation(config, choice.accumulation) and is_configured_activation_checkpoint(
        config, choice.activation_checkpoint
    )


def _is_configured_accumulation(config: JobConfig, accumulation: GradientAccumulationConfig) -> bool:
    own = config.gradient_accumulation
    if own.mode == "auto":
        return own.keep_params_unsharded in (None, accumulation.keep_params_unsharded)
    return (own.mode, bool(own.keep_params_unsharded)) == (accumulation.mode, accumulation.keep_params_unsharded)


def is_configured_activation_checkpoint(config: JobConfig, checkpointing: ActivationCheckpointConfig) -> bool:
    """Return True if the job sets this activation checkpointing, or its mode is `auto`. `checkpointing`: one of the
    modes that `auto` may take, or the job's own setting."""
    return config.activation_checkpoint.mode == "auto" or config.activation_checkpoint == checkpointing
