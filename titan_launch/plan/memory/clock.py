"""The predicted time of a rank's step, with computation and collectives in the order of FSDP2. This module does not
import torch.

One stream computes. FSDP2's collectives run in another stream, one after another. Both follow these rules:

- FSDP2 has at most two all-gather buffers. So an all-gather does not begin before the buffer of the second-to-last
  all-gather has been copied into the parameters.
- A reduce-scatter begins when the gradients of its unit exist. Before that, computation waits for the previous
  reduce-scatter.
- Computation waits for the collectives of tensor, context and expert parallelism.
- If the optimizer is sharded over replicas, the reduce-scatters between replicas run in the stream of FSDP2's
  collectives. Computation waits for the all-gathers between replicas. With CPU offload, computation also waits for the
  reduce-scatters between replicas.
- The host works ahead of a GPU. Computation waits for the host at the end of each backward, and at the end of the step.
- On CPUs, computation waits for every collective and for the host.
"""

from __future__ import annotations

from typing import NamedTuple, get_args

from titan_launch.config.axes import AXES, CollectiveKind
from titan_launch.plan.communication import Ring, Rings
from titan_launch.plan.speeds import HostWork, Speeds, Work
from titan_launch.plan.types import Unit


class Seconds(NamedTuple):
    """Times of a rank in a step, in seconds, without the bubble of a pipeline."""

    total: float = 0.0
    compute: float = 0.0
    communication: float = 0.0

    exposed: float = 0.0
    """Part of `communication` for tensor, context and expert parallelism. Computation always waits for this part."""

    least_exposed: float = 0.0
    """Lower bound of `exposed` for any microbatch size and any gradient accumulation mode."""

    recorded: float = 0.0
    """Part of `compute` for the operations of the model, without the copies and hooks of FSDP2 and without the
    optimizer's update. The value is the same in all gradient accumulation modes and for any number of replicas."""

    least_recorded: float = 0.0
    """Lower bound of `recorded` for the same number of samples and any microbatch size."""

    def with_recorded(self, recorded: float, least: float) -> Seconds:
        """Return the times with other `recorded` and `least_recorded`. `total` and `compute` change by as much as
        `recorded`."""
        more = recorded - self.recorded
        return self._replace(
            total=self.total + more, compute=self.compute + more, recorded=recorded, least_recorded=least
        )

    def on_line(self, other: Seconds, factor: float) -> Seconds:
        """Return `self + factor * (other - self)`, field by field."""
        return Seconds(*(x + factor * (y - x) for x, y in zip(self, other, strict=True)))


class Clock:
    """A simulated clock of one rank in a replayed step. The methods advance the time, or start collectives."""

    def __init__(self, speeds: Speeds, rings: Rings):
        self._speeds, self._rings = speeds, rings
        self._host_seconds: dict[HostWork, float] = {what: speeds.host_seconds(what) for what in get_args(HostWork)}
        self._now = self._end_of_host = 0.0
        self._end_of_links = 0.0
        """Time at which all started work of FSDP2's streams ends."""
        self._compute = self._communication = self._exposed = self._least_exposed = 0.0
        self._recorded = self._least = 0.0
        self._copies = 0.0, 0.0
        """Times at which the last two all-gather buffers were copied into the parameters, the older time first."""

    @property
    def seconds(self) -> Seconds:
        """The times so far."""
        return Seconds(
            self._now,
            self._compute,
            self._communication,
            self._exposed,
            self._least_exposed,
            self._recorded,
            self._least,
        )

    def work(self, work: Work) -> None:
        """Add the time of operations of the model."""
        seconds = self._speeds.seconds(work)
        self._spend(seconds)
        self._recorded += seconds + self.host("operation", work.times)
        self._least += self._speeds.least_seconds(work)

    def copy(self, num_bytes: int) -> None:
        """Add the time of a copy that reads and writes `num_bytes` bytes in total."""
        if num_bytes:
            self._spend(self._speeds.memory_seconds(num_bytes))

    def copy_reduced(self, num_bytes: int) -> None:
        """Add the time of a copy, as `copy` does, but in FSDP2's stream for reductions. Computation waits for this copy
        only on CPUs."""
        if self._speeds.overlaps:
            self._queue(self._speeds.memory_seconds(num_bytes), self._now)
        else:
            self.copy(num_bytes)

    def host(self, what: HostWork, count: int = 1) -> float:
        """Add the host's time for `count` pieces of work, without the operations of the device. Return the seconds
        during which computation stops: 0 on a GPU."""
        seconds = count * self._host_seconds[what]
        if self._speeds.overlaps:
            self._end_of_host += seconds
            return 0.0
        self._spend(seconds)
        return seconds

    def _spend(self, seconds: float) -> None:
        self._now += seconds
        self._compute += seconds

    def exchange(self, axis: str, sent_bytes: int, of_gradients: bool = False) -> None:
        """Run a collective along an axis of model parallelism. Computation waits for its end on CPUs, and if
        `Axis.delays_computation` is True. `axis`: name of the axis. `of_gradients`: True if the gradient accumulation
        mode decides the number of these collectives."""
        ring, row = self._rings.along[axis], AXES[axis]
        kinds = row.sends
        seconds = sum(self._speeds.collective_seconds(kind, ring, sent_bytes) for kind in kinds) / len(kinds)
        if row.has_host_work:
            self.host("exchange")
        self._communication += seconds
        if not row.delays_computation and self._speeds.overlaps:
            self._queue(seconds, self._now)
            return
        if self._end_of_links > self._now:  # pending collectives of FSDP2 end later: they share the links
            self._end_of_links += seconds
        self._now += seconds
        if row.delays_computation:
            self._exposed += seconds
            if not of_gradients:
                self._least_exposed += self._speeds.least_collective_seconds(kinds, ring, sent_bytes)

    def all_gather(self, buffer_bytes: int, unit: Unit) -> float:
        """Start an all-gather of a unit's parameters, and return the time of its end."""
        return self._start("all_gather", self._rings.shards_of(unit), buffer_bytes, self._copies[0])

    def copied_out(self) -> None:
        """Note that an all-gathered buffer has been copied into the parameters at the current time."""
        self._copies = self._copies[1], self._now

    def reduce_scatter(self, buffer_bytes: int, unit: Unit) -> float:
        """Start a reduce-scatter of a unit's gradients, and return the time of its end."""
        return self._start("reduce_scatter", self._rings.shards_of(unit), buffer_bytes, self._now)

    def all_reduce(self, buffer_bytes: int) -> float:
        """Start an all-reduce between the replicas, and return the time of its end."""
        return self._start("all_reduce", self._rings.replicas, buffer_bytes, self._now, passes=2)

    def exchange_replicas(self, kind: CollectiveKind, buffer_bytes: int) -> float:
        """Start a collective between the replicas for an optimizer that is sharded over them. Return the time of its
        end."""
        return self._start(kind, self._rings.replicas, buffer_bytes, self._now)

    def wait(self, until: float) -> None:
        """Let computation wait until a time, such as the end of a collective."""
        self._now = max(self._now, until)

    def wait_for_all(self) -> None:
        """Let computation wait for all collectives, and for the host."""
        self.wait(max(self._end_of_links, self._end_of_host))

    def _start(self, kind: CollectiveKind, ring: Ring, buffer_bytes: int, earliest: float, passes: int = 1) -> float:
        seconds = self._speeds.collective_seconds(kind, ring, passes * float(buffer_bytes * ring.sent))
        self._communication += seconds
        if self._speeds.overlaps:
            return self._queue(seconds, earliest)
        self._now += seconds
        return self._now

    def _queue(self, seconds: float, earliest: float) -> float:
        """Add work to FSDP2's streams, and return the time of its end. The work begins when the earlier work of these
        streams has ended, and not before `earliest`."""
        self._end_of_links = max(self._end_of_links, earliest) + seconds
        return self._end_of_links
