"""Time of a step, predicted from FLOPs and link traffic, or from the times of a replay (`Seconds`). This module does
not import torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, ParallelismConfig
from titan_launch.plan.communication import LinkTraffic
from titan_launch.plan.hardware import DEFAULT_MFU, Hardware
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.clock import Seconds


@dataclass(frozen=True)
class StepTime:
    """The predicted seconds of a step and of its parts."""

    compute: float | None
    """Seconds of computation, with the bubble. None if FLOPs or peak FLOP/s are unknown."""

    communication: float | None
    """Seconds of communication. None if a required bandwidth is unknown."""

    bubble: float = 0.0
    """Seconds of `compute` in which a rank waits for other pipeline stages."""

    exposed: float = 0.0
    """Seconds of `communication` for which computation waits: the communication of tensor, context and expert
    parallelism."""

    replayed: Seconds | None = None
    """The times of the replay from which the other fields follow, with the bubble in `total`, `compute` and `recorded`.
    None: the other fields follow from FLOPs and link traffic."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """Shortest and longest time of the step in seconds. In the shortest time, all communication overlaps with
        computation; in the longest, none does. None if computation or communication is unknown."""
        if self.compute is None or self.communication is None:
            return None
        return max(self.compute, self.communication), self.compute + self.communication

    @property
    def expected(self) -> float | None:
        """Expected time of the step in seconds. With a replay, this is the total time of the replay. Otherwise, only
        the communication of FSDP2 and of the pipeline is assumed to overlap with computation. None if computation or
        communication is unknown."""
        if self.replayed is not None:
            return self.replayed.total
        if self.compute is None or self.communication is None:
            return None
        return max(self.compute, self.communication - self.exposed) + self.exposed

    def least_with_replicas(self, communication: float, shards: int) -> float | None:
        """Return a lower bound of the step time with more replicas, in seconds; None if computation is unknown.
        `communication`: lower bound of all communication in seconds. `shards`: number of shards of each replica."""
        if self.replayed is not None:
            # With one shard, FSDP2 makes no copies after an all-gather or before a reduction. `compute` may have both.
            compute = self.replayed.compute if shards > 1 else self.replayed.recorded
            return max(compute + self.exposed, communication)
        return replace(self, communication=max(communication, self.exposed)).expected

    @property
    def least(self) -> float | None:
        """Lower bound of the step time in seconds, in any gradient accumulation mode and with any number of replicas.
        None if computation is unknown."""
        if self.replayed is not None:
            return self.replayed.recorded + self.replayed.least_exposed
        return replace(self, communication=self.exposed).expected

    def ties_with(self, other: StepTime) -> bool:
        """Return True if either of the two steps may be the shorter one: the intervals overlap, or an interval is
        unknown."""
        if self.interval is None or other.interval is None:
            return True
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


def estimate_step_time(
    flops_per_rank: float | None,
    link_traffic: LinkTraffic,
    hardware: Hardware,
    bubble_share: float = 0.0,
    exposed: LinkTraffic | None = None,
) -> StepTime:
    """Return the time of a step: computation at `hardware.mfu` times the peak FLOP/s, and communication at full
    bandwidth. `bubble_share`: see the function `bubble_share`. `exposed`: the part of `link_traffic` for which
    computation waits."""
    compute = None
    if flops_per_rank is not None and hardware.peak_tflops is not None:
        compute = flops_per_rank / (hardware.peak_tflops * 1e12 * (hardware.mfu or DEFAULT_MFU))
    communication = communication_seconds(link_traffic, hardware)
    if compute is None:
        return StepTime(None, communication)
    bubble = compute * bubble_share
    waiting = 0.0 if exposed is None else communication_seconds(exposed, hardware) or 0.0
    return StepTime(compute + bubble, communication, bubble, waiting)


def step_time(seconds: Seconds, bubble_share: float) -> StepTime:
    """Return the time of a step from the times of the slowest rank. `bubble_share`: result of `Speeds.idle_share`."""
    bubble = (seconds.compute + seconds.exposed) * bubble_share
    replayed = seconds._replace(
        total=seconds.total + bubble,
        compute=seconds.compute + bubble,
        recorded=seconds.recorded * (1 + bubble_share),
    )
    return StepTime(replayed.compute, seconds.communication, bubble, seconds.exposed, replayed)


def bubble_share(parallelism: ParallelismConfig, layout: Layout) -> float:
    """Return the time that a rank waits while a pipeline fills and empties, divided by the compute time of the rank.

    The result is (p - 1) / (v m) for p ranks with v equal stages and m microbatches (arXiv:2104.04473). Zero-bubble
    schedules compute weight gradients while a rank would wait. For these schedules, the result is 0, the best case
    (arXiv:2401.10241).
    """
    if parallelism.splits_backward:
        return 0.0
    return (layout.pipeline - 1) / (parallelism.stages_per_rank * layout.num_microbatches)


def communication_seconds(traffic: LinkTraffic, hardware: Hardware) -> float | None:
    """Return the seconds of communication at full bandwidth; None if a required bandwidth is unknown. Links within and
    across nodes are used at the same time, so the longer time counts."""
    longest = 0.0
    links = ((traffic.within, hardware.intra_node_gb_per_s), (traffic.across, hardware.inter_node_gb_per_s))
    for num_bytes, gb_per_s in links:
        if num_bytes and gb_per_s is None:
            return None
        longest = max(longest, num_bytes / (gb_per_s * 1e9) if gb_per_s else 0.0)
    return longest


@dataclass(frozen=True)
class Flops:
    """The FLOPs of forward and backward of one sample (`train.flops`)."""

    per_sample: int
    """FLOPs of the whole model, including `of_experts`."""

    of_experts: int = 0
    """FLOPs in the routed experts."""

    def plus(self, others: Flops, times: int) -> Flops:
        """Return `self + times * others`."""
        return Flops(self.per_sample + times * others.per_sample, self.of_experts + times * others.of_experts)


FlopsOf = Callable[[ActivationCheckpointConfig], Flops | None]
"""A function that returns the FLOPs under an activation checkpointing mode; None if they are unknown."""
