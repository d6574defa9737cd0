"""The axes of parallelism, as tables over which other code loops. This module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True, eq=False)
class Axis:
    """One way to divide a model, its batch or its sequences over ranks."""

    name: str
    """Name of the axis, such as `tensor`, in recorded steps. `plan.layout.Layout` stores the degree under the same
    name."""

    short: str
    """Name in the DeviceMesh, such as `tp`. Reports print the name in capitals."""

    ranks: str
    """Noun for its ranks in messages, such as `tensor-parallel ranks`."""

    sends: tuple[CollectiveKind, ...] = ()
    """Kinds of the collectives that a model calls along this axis. The predicted traffic assumes that each kind is
    called equally often. Empty for the axes of data parallelism, along which only FSDP2 communicates."""

    is_factor: bool = True
    """True if the degree is a factor of the number of ranks. False for `EXPERT`: experts are divided over the ranks of
    `SHARD` and `CONTEXT`."""

    is_within_shards: bool = False
    """True if FSDP2 shards parameters over a group of ranks that contains the ranks along the axis."""

    divides_parameters: bool = False
    """True if the ranks along the axis have different parameters, even before FSDP2 shards them."""

    delays_computation: bool = False
    """True if the computation waits for each collective along the axis."""

    has_host_work: bool = False
    """True if DTensor starts the collectives: each takes `plan.speeds.Measured.exchange_seconds` of the host's time."""

    @property
    def setting(self) -> str:
        """Prefix of the axis's keys in `[parallelism]`, such as `tensor_parallel`."""
        return f"{self.name}_parallel" if self.sends else f"data_parallel_{self.name}"

    @property
    def key(self) -> tuple[str, str]:
        """Key of the axis's degree, such as `parallelism.tensor_parallel_degree`."""
        return "parallelism", f"{self.setting}_degree"


_OF_ACTIVATIONS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")

PIPELINE = Axis("pipeline", "pp", "pipeline ranks", ("send",), divides_parameters=True)
REPLICATE = Axis("replicate", "dp_replicate", "replicas")
SHARD = Axis("shard", "dp_shard", "shards", is_within_shards=True)
CONTEXT = Axis(
    "context", "cp", "context-parallel ranks", _OF_ACTIVATIONS, is_within_shards=True, delays_computation=True
)
TENSOR = Axis(
    "tensor",
    "tp",
    "tensor-parallel ranks",
    _OF_ACTIVATIONS,
    divides_parameters=True,
    delays_computation=True,
    has_host_work=True,
)
EXPERT = Axis(
    "expert",
    "ep",
    "expert-parallel ranks",
    ("all_to_all",),
    is_factor=False,
    is_within_shards=True,
    divides_parameters=True,
    delays_computation=True,
)

GRID = (PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR)
"""The axes of the grid of ranks, outermost first. The product of their degrees is the number of ranks."""

MODEL_AXES = (TENSOR, CONTEXT, PIPELINE, EXPERT)
"""The axes of model parallelism, in the order of reports."""

AXES = {axis.name: axis for axis in (*GRID, EXPERT)}
"""All axes by name: the axes of `GRID`, then `EXPERT`."""
