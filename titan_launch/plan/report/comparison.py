"""What a job would hold, communicate and take in every mode of accumulation and recomputation. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from titan_launch.config.job import JobConfig
from titan_launch.plan.communication import LinkTraffic, Traffic, traffic_of_step, wire_bytes
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.job import Choice, is_configured_choice, plan_kept, possible_choices
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.ledger import Footprint
from titan_launch.plan.step_time import ModelFlops, StepTime, bubble_share, estimate_step_time
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
    wire: LinkTraffic
    flops_per_rank: int | None
    """Of a step, recomputation included; the mean of the ranks that work on the same samples."""

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

    Raises ConfigError where the precision rules, compilation, or a recomputation that the job asks for do not go with
    the model.
    """

    @cache
    def plan(kept: bool) -> ModelPlan:
        return plan_kept(config, inventory, kept)

    plan(False)  # for its errors
    choices, notes = possible_choices(config, layout, inventory)
    bubble = bubble_share(config.parallelism, layout)
    if layout.model_parallel > 1:
        notes.append(_SHARED)
    if layout.pipeline > 1:
        notes.append(_OF_ONE_STAGE)
    rows = []
    for choice in choices:
        is_own = is_configured_choice(config, choice)
        if only_own and not is_own:
            continue
        footprint = engine(choice)
        traffic = counted(choice) if counted is not None else None
        if traffic is None or not layout.divides_model:
            kept = bool(choice.accumulation.keep_params_unsharded)
            planned = traffic_of_step(plan(kept), layout, choice.accumulation)
            traffic = traffic or planned
            if replace(traffic, context=planned.context) != planned and _COUNTED not in notes:
                notes.append(_COUNTED)
        rows.append(_predict(choice, is_own, footprint, traffic, layout, flops, hardware, bubble))
    return Comparison(config, tuple(rows), tuple(notes))


_COUNTED = (
    "collectives are those that the trace has counted: some units run more than once in a forward, or not at all, or "
    "have parameters without a gradient, which the table of units does not know"
)


_SHARED = (
    "TP, CP, PP: what a rank exchanges with those that work on the same samples (calls, and GiB that it sends), "
    "counted in a trace; FLOPs and compute seconds are the mean of these ranks"
)
_OF_ONE_STAGE = (
    "memory and traffic are those of the rank along the pipeline (pp rank) that holds the most, of the first, the last "
    "and the one with the most parameters; compute seconds have the bubble in them, all stages taken as equal"
)


def _predict(
    choice: Choice,
    is_own: bool,
    footprint: Footprint,
    traffic: Traffic,
    layout: Layout,
    flops: ModelFlops,
    hardware: Hardware,
    bubble: float,
) -> Row:
    wire = wire_bytes(traffic, layout, hardware.gpus_per_node)
    per_sample = flops.total_per_sample(choice.recomputation)
    per_rank = None if per_sample is None else per_sample * layout.samples_per_rank // layout.model_parallel
    reserved = estimate_reserved(footprint, hardware)
    return Row(
        choice=choice,
        footprint=footprint,
        traffic=traffic,
        wire=wire,
        flops_per_rank=per_rank,
        time=estimate_step_time(per_rank, wire, hardware, bubble),
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
