"""How long a step takes, as an interval that rests on stated assumptions. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.config.parallelism import ParallelismConfig
from titan_launch.config.pipeline_rules import SPLIT_BACKWARD_SCHEDULES, stages_per_rank
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.layout import Layout
from titan_launch.plan.wire import Wire


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: between communication that hides behind computation wholly, and one that does not at all."""

    compute: float | None
    """None where FLOPs or peak are unknown."""

    communication: float | None
    """None where a bandwidth that is needed is unknown."""

    bubble: float = 0.0
    """Of `compute`, the part in which a rank waits for other stages of the pipeline."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The shortest and the longest time; None where either part is unknown."""
        if self.compute is None or self.communication is None:
            return None
        return max(self.compute, self.communication), self.compute + self.communication

    def ties_with(self, other: StepTime) -> bool:
        """Whether the assumptions do not say which of two steps is shorter: their intervals overlap, or are unknown."""
        if self.interval is None or other.interval is None:
            return True
        (low, high), (other_low, other_high) = self.interval, other.interval
        return low <= other_high and other_low <= high


def estimate_step_time(
    flops_per_rank: float | None, wire: Wire, hardware: Hardware, bubble_share: float = 0.0
) -> StepTime:
    """Computing at `mfu` of the peak; communicating at the full rate of the links, of which the slower one counts.

    `bubble_share`: see there.
    """
    compute = None
    if flops_per_rank is not None and hardware.peak_tflops is not None:
        compute = flops_per_rank / (hardware.peak_tflops * 1e12 * hardware.mfu)
    links = (
        _seconds(wire.within, hardware.intra_node_gb_per_s),
        _seconds(wire.across, hardware.inter_node_gb_per_s),
    )
    known = [seconds for seconds in links if seconds is not None]
    communication = max(known) if len(known) == len(links) else None
    if compute is None:
        return StepTime(None, communication)
    bubble = compute * bubble_share
    return StepTime(compute + bubble, communication, bubble)


def bubble_share(parallelism: ParallelismConfig, layout: Layout) -> float:
    """How long a rank waits while a pipeline fills and empties, as a share of the time in which it computes.

    (p - 1) / (v m) for p ranks of v stages and m microbatches, all stages taken as equal (arXiv:2104.04473).
    Zero-bubble schedules, which put gradients of weights into the gaps, are taken at their best: none
    (arXiv:2401.10241).
    """
    if parallelism.pipeline_parallel_schedule in SPLIT_BACKWARD_SCHEDULES:
        return 0.0
    return (layout.pipeline - 1) / (stages_per_rank(parallelism) * layout.num_microbatches)


def _seconds(num_bytes: float, gb_per_s: float | None) -> float | None:
    if not num_bytes:
        return 0.0
    return None if gb_per_s is None else num_bytes / (gb_per_s * 1e9)
