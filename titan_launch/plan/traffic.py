"""What a rank communicates in a step: collectives and bytes. No torch.

What FSDP2 communicates follows from the units, as computed here; what ranks exchange that work on the same samples is
counted in a trace.

Exact where every unit runs in every forward, as those of this package's models do, and every trained parameter gets a
gradient. Only the collectives of units count; BatchNorm's statistics, the count of targets, clipping and metrics have
their own, of a few numbers each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan, TensorInfo, Unit, parameters_by_unit

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}
"""Bytes of an element, by dtype."""


@dataclass(frozen=True)
class Collectives:
    """How many calls of each kind."""

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


@dataclass(frozen=True)
class Exchange:
    """What the ranks along an axis exchange that share the work on the same samples, as one of them sends it."""

    calls: int = 0

    sent_bytes: int = 0
    """What the rank sends, if collectives go round in rings."""

    def __add__(self, other: Exchange) -> Exchange:
        return Exchange(self.calls + other.calls, self.sent_bytes + other.sent_bytes)


@dataclass(frozen=True)
class Traffic:
    """Calls, and the bytes of their buffers as one rank sees them."""

    collectives: Collectives = field(default_factory=Collectives)

    all_gather_bytes: int = 0
    """Of what is received: whole parameters in the compute dtype, padded."""

    reduce_scatter_bytes: int = 0
    """Of what is sent: whole gradients in the reduce dtype, padded."""

    all_reduce_bytes: int = 0
    """Of what is reduced in place: sharded gradients in the reduce dtype, padded (HSDP)."""

    tensor: Exchange = field(default_factory=Exchange)
    """Along the tensor axis: activations that are gathered, summed and scattered."""

    context: Exchange = field(default_factory=Exchange)
    """Along the context axis: keys and values, and their gradients."""

    pipeline: Exchange = field(default_factory=Exchange)
    """Along the pipeline axis: activations to the next stage, gradients to the one before."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(
            self.collectives + other.collectives,
            self.all_gather_bytes + other.all_gather_bytes,
            self.reduce_scatter_bytes + other.reduce_scatter_bytes,
            self.all_reduce_bytes + other.all_reduce_bytes,
            self.tensor + other.tensor,
            self.context + other.context,
            self.pipeline + other.pipeline,
        )


def on_line(a: Traffic, b: Traffic, factor: float) -> Traffic:
    """`a + factor * (b - a)`, in whole calls and bytes."""
    return Traffic(*(_on_line(getattr(a, f.name), getattr(b, f.name), factor) for f in fields(Traffic)))


def _on_line(a: Any, b: Any, factor: float) -> Any:
    if isinstance(a, int):
        return round(a + factor * (b - a))
    return type(a)(*(_on_line(getattr(a, f.name), getattr(b, f.name), factor) for f in fields(a)))


def collectives_of_unit(unit: Unit, layout: Layout) -> Collectives:
    """What a unit communicates in one forward and backward, its gradients included.

    An all-gather before forward, another before backward if the parameters are freed in between and backward reads
    them; a reduce-scatter of the gradients, and an all-reduce of the shards between replicas (HSDP). Nothing among one
    rank.
    """
    if not unit.num_parameters:
        return Collectives()
    is_sharded, is_replicated = layout.parameter_shards > 1, layout.replicate > 1
    return Collectives(
        all_gathers=unit.num_gathers * is_sharded,
        reduce_scatters=int(unit.is_trained and is_sharded),
        all_reduces=int(unit.is_trained and is_replicated),
    )


def collectives_of_microbatch(units: Iterable[Unit], layout: Layout) -> Collectives:
    """The same of all units together."""
    return sum((collectives_of_unit(unit, layout) for unit in units), start=Collectives())


def collectives_of_step(units: Iterable[Unit], layout: Layout, accumulation: GradientAccumulationConfig) -> Collectives:
    """What all units communicate in a step of `layout.num_microbatches`, under an accumulation strategy."""
    return _times(collectives_of_microbatch(units, layout), layout, accumulation)


def traffic_of_step(plan: ModelPlan, layout: Layout, accumulation: GradientAccumulationConfig) -> Traffic:
    """The same with bytes. The plan's units must be those for `accumulation`, which decides about their resharding."""
    return sum(
        (
            _traffic_of_unit(unit, parameters, layout, accumulation)
            for unit, parameters in zip(plan.units, parameters_by_unit(plan.inventory, plan.units), strict=True)
        ),
        start=Traffic(),
    )


def padded_numel(parameter: TensorInfo, shard: int) -> int:
    """Elements of a parameter whose first axis is filled up to a multiple of the shard degree, as FSDP2 does it."""
    rows = parameter.shape[0]
    return parameter.numel // rows * (-(-rows // shard) * shard) if parameter.numel else 0


def _traffic_of_unit(
    unit: Unit, parameters: Sequence[TensorInfo], layout: Layout, accumulation: GradientAccumulationConfig
) -> Traffic:
    calls = _times(collectives_of_unit(unit, layout), layout, accumulation)
    whole = sum(padded_numel(p, layout.parameter_shards) for p in parameters)
    trained = sum(padded_numel(p, layout.parameter_shards) for p in parameters if p.requires_grad)
    gradients = trained * DTYPE_BYTES[unit.reduce_dtype]
    return Traffic(
        calls,
        all_gather_bytes=calls.all_gathers * whole * DTYPE_BYTES[unit.compute_dtype],
        reduce_scatter_bytes=calls.reduce_scatters * gradients,
        all_reduce_bytes=calls.all_reduces * gradients // layout.parameter_shards,
    )


def _times(microbatch: Collectives, layout: Layout, accumulation: GradientAccumulationConfig) -> Collectives:
    """The collectives of a step, from those of a microbatch alone."""
    if accumulation.mode == "auto":
        raise ValueError("the mode is not decided yet: resolve `auto` first (plan.resolution)")
    microbatches = layout.num_microbatches
    gathers = 1 if accumulation.keep_params_unsharded else microbatches
    scatters = 1 if accumulation.mode == "deferred" else microbatches
    reduces = microbatches if accumulation.mode == "immediate" else 1
    return Collectives(
        microbatch.all_gathers * gathers, microbatch.reduce_scatters * scatters, microbatch.all_reduces * reduces
    )
