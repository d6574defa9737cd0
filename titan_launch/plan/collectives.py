"""How many collectives the units cost, in each accumulation mode. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import Unit


@dataclass(frozen=True)
class Collectives:
    """FSDP2's calls over all units; BatchNorm's statistics, clipping and metrics have their own."""

    all_gathers: int = 0
    reduce_scatters: int = 0
    all_reduces: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.all_gathers + self.reduce_scatters + self.all_reduces

    def __add__(self, other: Collectives) -> Collectives:
        return Collectives(
            self.all_gathers + other.all_gathers,
            self.reduce_scatters + other.reduce_scatters,
            self.all_reduces + other.all_reduces,
        )

    def __str__(self) -> str:
        counts = {"AG": self.all_gathers, "RS": self.reduce_scatters, "AR": self.all_reduces}
        return " + ".join(f"{count} {name}" for name, count in counts.items() if count) or "none"


def collectives_of_unit(unit: Unit, layout: Layout) -> Collectives:
    """What a unit communicates in one forward and backward, its gradients included.

    An all-gather before forward, another before backward if the parameters are freed in between; a reduce-scatter of
    the gradients, and an all-reduce of the shards between replicas (HSDP). Nothing among one rank.
    """
    if not unit.num_parameters:
        return Collectives()
    is_sharded, is_replicated = layout.shard > 1, layout.replicate > 1
    return Collectives(
        all_gathers=(2 if unit.reshard_after_forward else 1) * is_sharded,
        reduce_scatters=int(unit.is_trained and is_sharded),
        all_reduces=int(unit.is_trained and is_replicated),
    )


def collectives_of_microbatch(units: Iterable[Unit], layout: Layout) -> Collectives:
    """The same of all units together."""
    return sum((collectives_of_unit(unit, layout) for unit in units), start=Collectives())


def collectives_of_step(units: Iterable[Unit], layout: Layout, accumulation: GradientAccumulationConfig) -> Collectives:
    """What all units communicate in a step of `layout.num_microbatches`, under an accumulation strategy."""
    once = collectives_of_microbatch(units, layout)
    gathers = 1 if accumulation.keep_params_unsharded else layout.num_microbatches
    scatters = 1 if accumulation.mode == "deferred" else layout.num_microbatches
    reduces = layout.num_microbatches if accumulation.mode == "immediate" else 1
    return Collectives(once.all_gathers * gathers, once.reduce_scatters * scatters, once.all_reduces * reduces)
