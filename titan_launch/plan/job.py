"""From a job and a table of the modules of its model to FSDP2 units, for each alternative that a plan compares. No
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.parallelism import split_backward_recomputes_whole_modules
from titan_launch.config.rules.precision import ACCUMULATION_RULES
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import ConfigError, Problem, format_key
from titan_launch.core.torch_release import CAN_SHARE_UNITS
from titan_launch.plan.activation_checkpoint import checkpointed_modules
from titan_launch.plan.compilation import compiled_modules
from titan_launch.plan.float8 import float8_modules
from titan_launch.plan.layout import Layout
from titan_launch.plan.pipeline import plan_stages
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.plan.units.fsdp_units import plan_model
from titan_launch.plan.units.order import plan_resharding


@dataclass(frozen=True)
class Choice:
    """One row of the plan's table: a mode of accumulation and one of recomputation, neither of them `auto`."""

    accumulation: GradientAccumulationConfig
    recomputation: ActivationCheckpointConfig

    def __post_init__(self) -> None:
        """Nothing that reads a choice need think of `auto`."""
        if "auto" in (self.accumulation.mode, self.recomputation.mode):
            raise ValueError("a choice is what `auto` becomes: resolve it first (plan.resolution)")

    @property
    def label(self) -> str:
        """For tables: `deferred, kept / selective op`."""
        return f"{self.accumulation_label} / {self.recomputation_label}"

    @property
    def accumulation_label(self) -> str:
        """For tables: `deferred, kept`, where parameters stay unsharded."""
        kept = ", kept" if self.accumulation.keep_params_unsharded else ""
        return f"{self.accumulation.mode}{kept}"

    @property
    def recomputation_label(self) -> str:
        """For tables: `none`, `full`, `selective op`, `selective 2`, `full of modules`, `memory_budget 0.5`."""
        chosen = self.recomputation
        if chosen.mode == "memory_budget":
            return f"memory_budget {chosen.memory_budget:g}"
        option = f" {chosen.selective_ac_option}" if chosen.mode == "selective" else ""
        return f"{chosen.mode}{option}{' of modules' if chosen.modules else ''}"


def configured_choice(config: JobConfig) -> Choice:
    """What a job whose modes are not `auto` says itself. (`keep_params_unsharded` unset means not kept.)"""
    accumulation, recomputation = config.gradient_accumulation, config.activation_checkpoint
    kept = bool(accumulation.keep_params_unsharded)
    return Choice(accumulation.model_copy(update={"keep_params_unsharded": kept}), recomputation)


def with_choice(config: JobConfig, choice: Choice) -> JobConfig:
    """A job in which a choice is made."""
    made = {"gradient_accumulation": choice.accumulation, "activation_checkpoint": choice.recomputation}
    return config.model_copy(update=made)


def is_auto(config: JobConfig) -> bool:
    """Whether a job leaves one of its modes to the planner."""
    return "auto" in (config.gradient_accumulation.mode, config.activation_checkpoint.mode)


def with_whole_parameters(config: JobConfig, layout: Layout) -> JobConfig:
    """The job, with parameters that stay where they are on ranks that share them with no other, if it leaves that open.

    FSDP2 gathers nothing there, with its `replicate` as little as with one shard; what it frees after forward it copies
    once more for backward. Not under `auto`, which asks for memory first and has kept parameters among its choices, nor
    with offloaded parameters, which would all come to the GPU.
    """
    parallelism = config.parallelism
    is_open = parallelism.fsdp_reshard_after_forward == "default" and not is_auto(config)
    if layout.parameter_shards > 1 or not is_open or config.training.enable_cpu_offload:
        return config
    kept = parallelism.model_copy(update={"fsdp_reshard_after_forward": "never"})
    return config.model_copy(update={"parallelism": kept})


def plan_kept(config: JobConfig, inventory: Inventory, kept: bool) -> ModelPlan:
    """The units of a job under any choice of modes: only whether parameters are kept decides about them.

    Raises ConfigError for precision rules that the model does not go with.
    """
    accumulation = GradientAccumulationConfig(keep_params_unsharded=kept)
    return plan_job(with_choice(config, Choice(accumulation, ActivationCheckpointConfig())), inventory)


def plan_job(config: JobConfig, inventory: Inventory) -> ModelPlan:
    """The units and dtypes of a job's model, what of it is computed again and compiled, and its stages; neither of its
    modes is `auto` any more.

    Raises ConfigError for precision rules, recomputation, compilation or stages that the model does not go with.
    """
    recomputed = checkpointed_modules(inventory, config.activation_checkpoint)
    resharding = plan_resharding(config.parallelism, config.gradient_accumulation)
    plan = plan_model(inventory, config.precision, resharding, CAN_SHARE_UNITS)
    return replace(
        plan,
        recomputed=recomputed,
        compiled=compiled_modules(config, inventory, plan.units, recomputed),
        float8=float8_modules(config.float8, plan),
        stages=plan_stages(inventory, config.parallelism),
    )


def possible_choices(config: JobConfig, layout: Layout, inventory: Inventory) -> tuple[list[Choice], list[str]]:
    """Every mode of accumulation that is allowed and differs from the others here, with every recomputation."""
    accumulations, notes = _accumulations(config, layout)
    recomputations = [r for r in _activation_checkpoints(config) if _suits_the_schedule(config, r, notes)]
    own = config.activation_checkpoint
    if not inventory.blocks and not own.modules:
        if own.mode not in ("none", "auto"):
            checkpointed_modules(inventory, own)  # for its error
        notes.append("recomputation is left out: it works on blocks, and none of the model's are known (model.blocks)")
        recomputations = [ActivationCheckpointConfig()]
    else:
        for recomputation in recomputations:
            if is_configured_activation_checkpoint(config, recomputation):
                checkpointed_modules(inventory, recomputation)  # for its error
        recomputations = [r for r in recomputations if _can_be_compiled(config, inventory, r, notes)]
    return [Choice(a, r) for r in recomputations for a in accumulations], notes


def _suits_the_schedule(config: JobConfig, recomputation: ActivationCheckpointConfig, notes: list[str]) -> bool:
    """Whether a recomputation goes with the pipeline's schedule; why not is noted."""
    asking = config.model_copy(update={"activation_checkpoint": recomputation})
    problem = next(split_backward_recomputes_whole_modules(asking), None)
    if problem is not None:
        label = Choice(GradientAccumulationConfig(), recomputation).recomputation_label
        notes.append(f"{label} is left out: it {problem.reason.partition(';')[0]}")
    return problem is None


def _can_be_compiled(
    config: JobConfig, inventory: Inventory, recomputation: ActivationCheckpointConfig, notes: list[str]
) -> bool:
    """Whether a recomputation goes with `[compile]`; why not is noted, or raised where the job asks for it."""
    if not config.compile.enable:
        return True
    choice = Choice(GradientAccumulationConfig(), recomputation)
    try:
        plan_job(with_choice(config, choice), inventory)
    except ConfigError as error:
        if config.activation_checkpoint == recomputation:
            raise
        reason = error.problems[0].reason.partition(";")[0]
        notes.append(f"{choice.recomputation_label} is left out, since the job is compiled: {reason}")
        return False
    return True


def _accumulations(config: JobConfig, layout: Layout) -> tuple[list[GradientAccumulationConfig], list[str]]:
    own = config.gradient_accumulation
    found: dict[tuple[bool, bool, bool], GradientAccumulationConfig] = {}
    notes = []
    for candidate in sorted(_candidates(layout), key=lambda it: not _is_configured_accumulation(config, it)):
        problem = _refusal(config, candidate)
        if problem is None:
            found.setdefault(_effect(candidate, layout), candidate)
        elif not candidate.keep_params_unsharded or own.keep_params_unsharded:
            notes.append(_left_out(candidate, problem))
    order = [_effect(candidate, layout) for candidate in _candidates(layout)]
    return sorted(found.values(), key=lambda it: order.index(_effect(it, layout))), list(dict.fromkeys(notes))


def _candidates(layout: Layout) -> Iterator[GradientAccumulationConfig]:
    modes: list[Literal["immediate", "deferred_all_reduce", "deferred"]] = ["immediate", "deferred"]
    if layout.replicate > 1:
        modes.insert(1, "deferred_all_reduce")
    for kept in (False, True):
        for mode in modes:
            yield GradientAccumulationConfig(mode=mode, keep_params_unsharded=kept)


def _effect(accumulation: GradientAccumulationConfig, layout: Layout) -> tuple[bool, bool, bool]:
    """What a mode does here: with one microbatch nothing is deferred, and where nothing is sharded nothing is kept."""
    defers = layout.num_microbatches > 1 and layout.world_size > 1
    mode = accumulation.mode
    return (
        defers and mode == "deferred",
        defers and mode != "immediate",
        bool(accumulation.keep_params_unsharded) and layout.parameter_shards > 1,
    )


def _activation_checkpoints(config: JobConfig) -> Iterator[ActivationCheckpointConfig]:
    own = config.activation_checkpoint
    yield ActivationCheckpointConfig(mode="none")
    yield ActivationCheckpointConfig(mode="selective", modules=own.modules)
    if own.mode == "memory_budget" or (own.mode == "selective" and own.selective_ac_option != "op"):
        yield own
    yield ActivationCheckpointConfig(mode="full", modules=own.modules)


def _refusal(config: JobConfig, accumulation: GradientAccumulationConfig) -> Problem | None:
    """Why the job file could not ask for it, if so."""
    asking = config.model_copy(update={"gradient_accumulation": accumulation})
    return next((problem for rule in ACCUMULATION_RULES for problem in rule(asking)), None)


def _left_out(accumulation: GradientAccumulationConfig, problem: Problem) -> str:
    label = Choice(accumulation, ActivationCheckpointConfig()).accumulation_label
    return f"{label} is left out: {format_key(problem.key)} = {problem.value}: {problem.reason.partition(';')[0]}"


def is_configured_choice(config: JobConfig, choice: Choice) -> bool:
    """Whether a job asks for a choice, or leaves it open by `auto`."""
    return _is_configured_accumulation(config, choice.accumulation) and is_configured_activation_checkpoint(
        config, choice.recomputation
    )


def _is_configured_accumulation(config: JobConfig, accumulation: GradientAccumulationConfig) -> bool:
    own = config.gradient_accumulation
    if own.mode == "auto":
        return own.keep_params_unsharded in (None, accumulation.keep_params_unsharded)
    return (own.mode, bool(own.keep_params_unsharded)) == (accumulation.mode, accumulation.keep_params_unsharded)


def is_configured_activation_checkpoint(config: JobConfig, recomputation: ActivationCheckpointConfig) -> bool:
    """Whether a job asks for a recomputation, or leaves it open by `auto`."""
    return config.activation_checkpoint.mode == "auto" or config.activation_checkpoint == recomputation
