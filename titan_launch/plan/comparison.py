"""What a job would hold, communicate and take in every mode of accumulation and recomputation. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.job import JobConfig
from titan_launch.config.rules import ACCUMULATION_RULES
from titan_launch.errors import Problem, format_key
from titan_launch.plan.choices import Choice
from titan_launch.plan.flops import ModelFlops
from titan_launch.plan.footprint import Footprint
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.job import plan_kept
from titan_launch.plan.layout import Layout
from titan_launch.plan.recomputation import chosen_blocks
from titan_launch.plan.step_time import StepTime, estimate_step_time
from titan_launch.plan.traffic import Traffic, Wire, traffic_of_step, wire_bytes
from titan_launch.plan.types import Inventory, ModelPlan

Engine = Callable[[Choice], Footprint]
"""Predicts the memory of a step under a choice."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class Row:
    """One choice, and what is predicted of it."""

    choice: Choice
    footprint: Footprint
    traffic: Traffic
    wire: Wire
    flops_per_rank: int | None
    """Of a step, recomputation included."""

    time: StepTime

    reserved_bytes: float
    """Estimate of what the process takes of the device: what the allocator reserves, and the overhead."""

    verdict: Verdict | None
    """`does not fit` where even active memory and overhead exceed the limit, `fits` where the estimate is within it,
    `tight` between the two; None without a limit."""

    is_own: bool
    """Whether the job asks for it, or leaves it open by `auto`."""


@dataclass(frozen=True)
class Comparison:
    """All the choices a job has."""

    config: JobConfig
    rows: tuple[Row, ...]
    notes: tuple[str, ...]
    """Which choices were left out, and why."""


def compare(
    config: JobConfig,
    layout: Layout,
    inventory: Inventory,
    flops: ModelFlops,
    hardware: Hardware,
    engine: Engine,
    only_own: bool = False,
    counted: Callable[[Choice], Traffic] | None = None,
) -> Comparison:
    """Predict all choices; with `only_own` those that the job asks for or leaves open.

    `counted` gives the traffic that a trace has seen. Without it, every unit is taken to run once in a forward, and
    every parameter to have a gradient.

    Raises ConfigError where the precision rules, or a recomputation that the job asks for, do not go with the model.
    """
    choices, notes = _choices(config, layout, inventory)
    rows = []

    @cache
    def plan(kept: bool) -> ModelPlan:
        return plan_kept(config, inventory, kept)

    for choice in choices:
        is_own = _admits(config, choice)
        if only_own and not is_own:
            continue
        footprint = engine(choice)
        planned = traffic_of_step(plan(bool(choice.accumulation.keep_params_unsharded)), layout, choice.accumulation)
        traffic = planned if counted is None else counted(choice)
        if traffic != planned and _COUNTED not in notes:
            notes.append(_COUNTED)
        rows.append(_predict(choice, is_own, footprint, traffic, layout, flops, hardware))
    return Comparison(config, tuple(rows), tuple(notes))


_COUNTED = (
    "collectives are those that the trace has counted: some units run more than once in a forward, or not at all, or "
    "have parameters without a gradient, which the table of units does not know"
)


def _choices(config: JobConfig, layout: Layout, inventory: Inventory) -> tuple[list[Choice], list[str]]:
    """Every mode of accumulation that is allowed and differs from the others here, with every recomputation."""
    accumulations, notes = _accumulations(config, layout)
    recomputations = list(_recomputations(config))
    if not inventory.blocks:
        own = config.activation_checkpoint
        if own.mode not in ("none", "auto"):
            chosen_blocks(inventory.blocks, own)  # for its error
        notes.append("recomputation is left out: it works on blocks, and none of the model's are known (model.blocks)")
        recomputations = [ActivationCheckpointConfig()]
    else:
        chosen_blocks(inventory.blocks, next(r for r in recomputations if is_own_recomputation(config, r)))
    return [Choice(a, r) for r in recomputations for a in accumulations], notes


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
        bool(accumulation.keep_params_unsharded) and layout.shard > 1,
    )


def _recomputations(config: JobConfig) -> Iterator[ActivationCheckpointConfig]:
    own = config.activation_checkpoint
    yield ActivationCheckpointConfig(mode="none")
    yield ActivationCheckpointConfig(mode="selective")
    if own.mode == "selective" and own.selective_ac_option != "op":
        yield own
    yield ActivationCheckpointConfig(mode="full")


def _refusal(config: JobConfig, accumulation: GradientAccumulationConfig) -> Problem | None:
    """Why the job file could not ask for it, if so."""
    asking = config.model_copy(update={"gradient_accumulation": accumulation})
    return next((problem for rule in ACCUMULATION_RULES for problem in rule(asking)), None)


def _left_out(accumulation: GradientAccumulationConfig, problem: Problem) -> str:
    label = Choice(accumulation, ActivationCheckpointConfig()).accumulation_label
    return f"{label} is left out: {format_key(problem.key)} = {problem.value}: {problem.reason.partition(';')[0]}"


def _admits(config: JobConfig, choice: Choice) -> bool:
    return _is_own_accumulation(config, choice.accumulation) and is_own_recomputation(config, choice.recomputation)


def _is_own_accumulation(config: JobConfig, accumulation: GradientAccumulationConfig) -> bool:
    own = config.gradient_accumulation
    if own.mode == "auto":
        return own.keep_params_unsharded in (None, accumulation.keep_params_unsharded)
    return (own.mode, bool(own.keep_params_unsharded)) == (accumulation.mode, accumulation.keep_params_unsharded)


def is_own_recomputation(config: JobConfig, recomputation: ActivationCheckpointConfig) -> bool:
    """Whether a job asks for a recomputation, or leaves it open by `auto`."""
    return config.activation_checkpoint.mode == "auto" or config.activation_checkpoint == recomputation


def _predict(
    choice: Choice,
    is_own: bool,
    footprint: Footprint,
    traffic: Traffic,
    layout: Layout,
    flops: ModelFlops,
    hardware: Hardware,
) -> Row:
    wire = wire_bytes(traffic, layout, hardware.gpus_per_node)
    per_sample = flops.total_per_sample(choice.recomputation)
    reserved = estimate_reserved(footprint, hardware)
    return Row(
        choice=choice,
        footprint=footprint,
        traffic=traffic,
        wire=wire,
        flops_per_rank=None if per_sample is None else per_sample * layout.samples_per_rank,
        time=estimate_step_time(per_sample, wire, layout, hardware),
        reserved_bytes=reserved,
        verdict=judge(footprint, reserved, hardware),
        is_own=is_own,
    )


def estimate_reserved(footprint: Footprint, hardware: Hardware) -> float:
    """Bytes that the process will take: on a GPU every stream has memory of its own, which the others cannot use."""
    needed = footprint.stream_bytes if hardware.kernels == "cuda" else footprint.peak_bytes
    return needed * (1 + hardware.fragmentation) + hardware.overhead_gib * GIB


def judge(footprint: Footprint, reserved_bytes: float, hardware: Hardware) -> Verdict | None:
    """Whether a step fits into the device's memory."""
    if hardware.memory_gib is None:
        return None
    if footprint.peak_bytes + hardware.overhead_gib * GIB > hardware.memory_gib * GIB:
        return "does not fit"
    return "fits" if reserved_bytes <= hardware.memory_gib * GIB else "tight"
