"""The modes of accumulation and recomputation that a job has to choose from. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.job import JobConfig
from titan_launch.config.pipeline_rules import split_backward_recomputes_whole_modules
from titan_launch.config.precision_rules import ACCUMULATION_RULES
from titan_launch.errors import ConfigError, Problem, format_key
from titan_launch.plan.choices import Choice, with_choice
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout
from titan_launch.plan.recomputation import recomputed_modules
from titan_launch.plan.types import Inventory


def possible_choices(config: JobConfig, layout: Layout, inventory: Inventory) -> tuple[list[Choice], list[str]]:
    """Every mode of accumulation that is allowed and differs from the others here, with every recomputation."""
    accumulations, notes = _accumulations(config, layout)
    recomputations = [r for r in _recomputations(config) if _suits_the_schedule(config, r, notes)]
    own = config.activation_checkpoint
    if not inventory.blocks and not own.modules:
        if own.mode not in ("none", "auto"):
            recomputed_modules(inventory, own)  # for its error
        notes.append("recomputation is left out: it works on blocks, and none of the model's are known (model.blocks)")
        recomputations = [ActivationCheckpointConfig()]
    else:
        for recomputation in recomputations:
            if is_own_recomputation(config, recomputation):
                recomputed_modules(inventory, recomputation)  # for its error
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
    for candidate in sorted(_candidates(layout), key=lambda it: not _is_own_accumulation(config, it)):
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


def _recomputations(config: JobConfig) -> Iterator[ActivationCheckpointConfig]:
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


def is_own_choice(config: JobConfig, choice: Choice) -> bool:
    """Whether a job asks for a choice, or leaves it open by `auto`."""
    return _is_own_accumulation(config, choice.accumulation) and is_own_recomputation(config, choice.recomputation)


def _is_own_accumulation(config: JobConfig, accumulation: GradientAccumulationConfig) -> bool:
    own = config.gradient_accumulation
    if own.mode == "auto":
        return own.keep_params_unsharded in (None, accumulation.keep_params_unsharded)
    return (own.mode, bool(own.keep_params_unsharded)) == (accumulation.mode, accumulation.keep_params_unsharded)


def is_own_recomputation(config: JobConfig, recomputation: ActivationCheckpointConfig) -> bool:
    """Whether a job asks for a recomputation, or leaves it open by `auto`."""
    return config.activation_checkpoint.mode == "auto" or config.activation_checkpoint == recomputation
