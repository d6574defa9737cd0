"""How long a step takes, as an interval that rests on stated assumptions. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.plan.hardware import Hardware
from titan_launch.plan.layout import Layout
from titan_launch.plan.traffic import Wire


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: between communication that hides behind computation wholly, and one that does not at all."""

    compute: float | None
    """None where FLOPs or peak are unknown."""

    communication: float | None
    """None where a bandwidth that is needed is unknown."""

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


def estimate_step_time(flops_per_sample: int | None, wire: Wire, layout: Layout, hardware: Hardware) -> StepTime:
    """Computing at `mfu` of the peak; communicating at the full rate of the links, of which the slower one counts."""
    compute = None
    if flops_per_sample is not None and hardware.peak_tflops is not None:
        compute = flops_per_sample * layout.samples_per_rank / (hardware.peak_tflops * 1e12 * hardware.mfu)
    links = (
        _seconds(wire.within, hardware.intra_node_gb_per_s),
        _seconds(wire.across, hardware.inter_node_gb_per_s),
    )
    known = [seconds for seconds in links if seconds is not None]
    return StepTime(compute, max(known) if len(known) == len(links) else None)


def _seconds(num_bytes: float, gb_per_s: float | None) -> float | None:
    if not num_bytes:
        return 0.0
    return None if gb_per_s is None else num_bytes / (gb_per_s * 1e9)
