"""Choice of a recipe's microbatch size and activation checkpointing, by the planner's predictions for the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.auto_mode import recommend
from titan_launch.plan.communication import Traffic, on_line
from titan_launch.plan.hardware import GIB, Hardware, Kernels, hardware_of
from titan_launch.plan.job import Choice, with_local_batch_size
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.memory.clock import Seconds
from titan_launch.plan.memory.ledger import Footprint, extrapolate
from titan_launch.plan.memory.recordings import Recordings
from titan_launch.plan.memory.replay_engine import ReplayEngine
from titan_launch.plan.report.modes import ComparedJob, compare

_LARGEST_MICROBATCH = 64


@dataclass(frozen=True)
class Machine:
    """The GPUs that a job is written for."""

    ranks: int
    device: str
    """Name in the device table, or the name that the driver reports."""

    memory_gib: float | None
    """Memory in GiB of one GPU of this machine, from the device table or else from the driver. None for any other
    device."""


@dataclass(frozen=True)
class Sizes:
    """Values of the keys of a job that depend on memory."""

    local_batch_size: int
    activation_checkpoint: str
    comments: tuple[str, ...]
    """Lines for the head of the job file: the reason for these sizes."""


RecordingsOf = Callable[[JobConfig, Layout, Kernels], Recordings]
"""Function that returns the recordings of a job (`commands.parser.recordings_of`)."""


def planned_sizes(config: JobConfig, machine: Machine, recordings_of: RecordingsOf) -> Sizes:
    """Return the microbatch size and the activation checkpointing mode that fit and have the shortest predicted step.

    Step times that agree to two digits count as equal, and so do unknown times. Among equal times, the cheapest mode in
    `_COST` is preferred, then the largest microbatch, which has the fewest collectives. If no candidate fits, or if the
    job cannot be planned, return a microbatch of one sample and mode `full`.

    `config`: the job, whose global batch size does not change. Raises the errors of `recordings_of`, except
    ConfigError.
    """
    where = f"{machine.ranks} {machine.device}"
    candidates: list[_Candidate] = []
    try:
        for candidate in _candidates(config, machine, recordings_of):
            candidates.append(candidate)  # noqa: PERF402 - an error for a larger microbatch leaves the smaller ones
    except ConfigError as error:  # for example, the model cannot be traced
        if not candidates:
            reason, _, _ = error.problems[0].reason.partition("\n")
            return Sizes(
                1, "full", (f"Sizes: the smallest ones, because the planner cannot predict the job: {reason}",)
            )
    if not candidates:
        comments = (
            f"Sizes: the smallest ones. Even with these, the planner predicts that the job does not fit into {where}.",
            "`titan-launch plan` shows what the job needs. Use more GPUs, or a smaller training.seq_len.",
        )
        return Sizes(1, "full", comments)
    best = min(candidates, key=_order)
    memory = f"{best.reserved_gib:.1f} of {best.limit_gib:.1f} GiB per rank"
    return Sizes(best.local_batch_size, best.mode, (f"Sizes: for {where}; the planner predicts {memory}.",))


@dataclass(frozen=True)
class _Candidate:
    local_batch_size: int
    mode: str
    seconds: float | None
    """Lower end of the predicted interval of the step time. None if the speed of links or the peak FLOP/s of the device
    are unknown."""

    reserved_gib: float
    limit_gib: float


_COST = ("none", "selective", "full")
"""Modes of activation checkpointing, ordered by the time that they add to a step."""


def _order(candidate: _Candidate) -> tuple[float, int, int]:
    """Return a sort key. The best candidate has the smallest key."""
    seconds = 0.0 if candidate.seconds is None else float(f"{candidate.seconds:.2g}")
    return seconds, _COST.index(candidate.mode), -candidate.local_batch_size


def _candidates(config: JobConfig, machine: Machine, recordings_of: RecordingsOf) -> Iterator[_Candidate]:
    """Yield a candidate with the best checkpointing mode for each microbatch size, up to the first size that does not
    fit. The sizes are the powers of two up to 64 that divide the number of samples per rank and step."""
    hardware = hardware_of(config, machine.ranks, "cuda", machine.device, machine.memory_gib)
    hardware = replace(hardware, gpus_per_node=max(1, min(machine.ranks, hardware.gpus_per_node)))
    auto = config.activation_checkpoint.model_copy(update={"mode": "auto"})
    per_rank = (config.training.global_batch_size or machine.ranks) // machine.ranks
    size = 1
    while size <= min(per_rank, _LARGEST_MICROBATCH) and per_rank % size == 0:
        job = with_local_batch_size(config.model_copy(update={"activation_checkpoint": auto}), size)
        layout = plan_layout(job.parallelism, job.training, machine.ranks)
        engine = _BySize(job, layout, hardware, recordings_of)
        subject = ComparedJob(engine.inventory, engine.flops, engine)
        best = recommend(compare(job, layout, subject, hardware, only_own=True), hardware)
        if best is None:
            return  # neither this microbatch nor a larger one fits
        row, limit = best.row, hardware.memory_gib or 0.0
        seconds = row.time.interval[0] if row.time.interval else None
        mode = row.choice.activation_checkpoint.mode
        yield _Candidate(size, mode, seconds, row.reserved_bytes / GIB, limit)
        size *= 2


class _BySize:
    """A predictor of a job's memory, traffic and step time for any microbatch size.

    Usually, two recordings are enough, with microbatches of two and of four samples: traffic, times, and the memory at
    each point of a step are linear functions of the microbatch size.
    """

    def __init__(self, config: JobConfig, layout: Layout, hardware: Hardware, recordings_of: RecordingsOf):
        kernels = hardware.kernels
        recordings = [recordings_of(config, replace(layout, local_batch_size=size), kernels) for size in (2, 4)]
        self.inventory, self.flops = recordings[0].subject().inventory, recordings[0].flops
        self._two, self._four = (
            ReplayEngine(config, layout, kernels, recorded, hardware.speeds) for recorded in recordings
        )
        self._own = cache(lambda: ReplayEngine(config, layout, kernels, recordings_of(config, layout, kernels)))
        self._factor = (layout.local_batch_size - 2) / 2

    def __call__(self, choice: Choice) -> Footprint:
        """Return the active memory. If the local maxima of memory of the two recordings cannot be paired, record the
        job with its own microbatch size."""
        return extrapolate(self._two(choice), self._four(choice), self._factor) or self._own()(choice)

    def traffic(self, choice: Choice) -> Traffic:
        return on_line(self._two.traffic(choice), self._four.traffic(choice), self._factor)

    def seconds(self, choice: Choice) -> Seconds | None:
        two, four = self._two.seconds(choice), self._four.seconds(choice)
        return None if two is None or four is None else two.on_line(four, self._factor)
