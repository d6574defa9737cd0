"""Predicted memory, traffic and time of a job in all modes of gradient accumulation and activation checkpointing. This
module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from titan_launch.config.axes import MODEL_AXES
from titan_launch.config.job import JobConfig
from titan_launch.plan.communication import LinkTraffic, Traffic, link_traffic_of_step
from titan_launch.plan.experts import largest_load
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.job import Choice, is_configured_choice, possible_choices
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.clock import Seconds
from titan_launch.plan.memory.ledger import Footprint
from titan_launch.plan.memory.recordings import Recordings
from titan_launch.plan.memory.replay_engine import ReplayEngine
from titan_launch.plan.step_time import FlopsOf, StepTime, bubble_share, estimate_step_time, step_time
from titan_launch.plan.types import Inventory


class Engine(Protocol):
    """A predictor of a step's memory, traffic and time: the replay of recordings, or the trace of a whole step."""

    def __call__(self, choice: Choice) -> Footprint:
        """Return the active memory of the rank with the highest peak. Raises ConfigError for the same jobs as a run."""

    def traffic(self, choice: Choice) -> Traffic:
        """Return the traffic of the rank with the highest memory peak."""

    def seconds(self, choice: Choice) -> Seconds | None:
        """Return the times of the slowest rank; None if they are not known."""


@dataclass(frozen=True)
class ComparedJob:
    """The model of a job, and the engine that predicts the job's memory."""

    inventory: Inventory
    flops_of: FlopsOf
    engine: Engine

    @classmethod
    def replayed(cls, config: JobConfig, layout: Layout, hardware: Hardware, recordings: Recordings) -> ComparedJob:
        """Return the model of a job, with the engine that replays its recordings."""
        engine = ReplayEngine(config, layout, hardware.kernels, recordings, hardware.speeds)
        return cls(recordings.subject().inventory, recordings.flops, engine)


Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True)
class PlanRow:
    """The predictions for one combination of gradient accumulation mode and activation checkpointing mode."""

    choice: Choice
    footprint: Footprint
    traffic: Traffic
    link_traffic: LinkTraffic
    flops_per_rank: int | None
    """FLOPs of a step on one rank, including those that activation checkpointing adds. If several ranks work on the
    same samples, this is the mean of these ranks. None: unknown."""

    time: StepTime

    reserved_bytes: float
    """Estimated bytes that the process takes from the device: memory that the allocator reserves, and the overhead."""

    verdict: Verdict | None
    """`does not fit`: active memory and overhead exceed the limit. `fits`: `reserved_bytes` leaves the margin below the
    limit free. `tight`: neither condition is true. None: the memory limit is unknown."""

    is_own: bool
    """True if the job sets these modes, or `auto` may choose them."""


@dataclass(frozen=True)
class ModeComparison:
    """The predictions for a job in each combination of modes."""

    config: JobConfig
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...]
    """Reasons why combinations of modes have no row, and remarks about the columns."""


def compare(
    config: JobConfig, layout: Layout, subject: ComparedJob, hardware: Hardware, only_own: bool = False
) -> ModeComparison:
    """Return the predictions for each combination of modes that is possible for the job.

    `only_own`: True to compare only the combination that the job sets, or the combinations that `auto` may choose.
    Raises ConfigError if the model does not support the job's precision rules, compilation or activation checkpointing.
    """
    choices, notes = possible_choices(config, layout, subject.inventory, only_own)
    if layout.model_parallel > 1:
        notes.append(_MODEL_PARALLEL)
    if layout.pipeline > 1:
        notes.append(_PIPELINE)
    rows = tuple(predict_row(choice, config, layout, subject, hardware) for choice in choices)
    return ModeComparison(config, rows, tuple(notes))


_MODEL_PARALLEL = (
    "flops_per_rank of --json is a mean over ranks with the same samples. Compute seconds are such means, too, if no "
    "times of operations are predicted."
)
_PIPELINE = (
    "memory and traffic are those of one pipeline rank, the one with the highest peak memory. The compared ranks are "
    "the first, the last and the one with the most parameters. If times of operations are predicted, the rank whose "
    "matrices (without embeddings) have the most elements is compared, too. Compute seconds include the pipeline "
    "bubble, which is computed as if all stages took equally long."
)


def predict_row(choice: Choice, config: JobConfig, layout: Layout, subject: ComparedJob, hardware: Hardware) -> PlanRow:
    """Return the predictions for a job with the modes of a choice. Raises ConfigError as `compare` does."""
    footprint = subject.engine(choice).with_workspace(hardware.workspace_bytes)
    traffic, flops = subject.engine.traffic(choice), subject.flops_of(choice.activation_checkpoint)
    link_traffic = link_traffic_of_step(traffic, layout, hardware.gpus_per_node)
    per_rank = None if flops is None else flops.per_sample * layout.samples_per_rank // layout.model_parallel
    seconds, bubble = subject.engine.seconds(choice), bubble_share(config.parallelism, layout)
    if seconds is not None and choice.activation_checkpoint.mode != "memory_budget":
        assert hardware.speeds is not None, "without speeds, an engine has no seconds"
        time = step_time(seconds, hardware.speeds.idle_share(bubble))
    else:  # no speeds are known, or the compiler decides the operations
        waited_for: dict[str, Any] = {a.name: traffic.along(a) for a in MODEL_AXES if a.delays_computation}
        exposed = link_traffic_of_step(Traffic(**waited_for), layout, hardware.gpus_per_node)
        busiest = None
        if flops is not None and per_rank is not None:
            excess = largest_load(config, layout) - 1  # relative excess of the busiest rank's rows
            busiest = per_rank * (1 + excess * flops.of_experts / max(1, flops.per_sample))
        time = estimate_step_time(busiest, link_traffic, hardware, bubble, exposed)
    reserved = estimate_reserved(footprint, hardware)
    return PlanRow(
        choice=choice,
        footprint=footprint,
        traffic=traffic,
        link_traffic=link_traffic,
        flops_per_rank=per_rank,
        time=time,
        reserved_bytes=reserved,
        verdict=judge(footprint, reserved, hardware),
        is_own=is_configured_choice(config, choice),
    )


def estimate_reserved(footprint: Footprint, hardware: Hardware) -> float:
    """Return the memory in bytes that the process takes from the device."""
    # On a GPU, the allocator reserves memory for each CUDA stream separately.
    needed = footprint.stream_bytes if hardware.kernels == "cuda" else footprint.peak_bytes
    return hardware.reserved_bytes(needed)


def judge(footprint: Footprint, reserved_bytes: float, hardware: Hardware) -> Verdict | None:
    """Return the verdict for a step (see `PlanRow.verdict`); None if the memory limit is unknown."""
    if hardware.memory_gib is None or hardware.usable_bytes is None:
        return None
    if footprint.peak_bytes + hardware.overhead_gib * GIB > hardware.memory_gib * GIB:
        return "does not fit"
    return "fits" if reserved_bytes <= hardware.usable_bytes else "tight"
