"""The optimizer sharded over the replicas of a model (HSDP): sizes of the data that replicas exchange. This module does
not import torch.

FSDP2 gives each rank a local shard of every parameter. With R replicas, R ranks have the same local shard. The shard is
divided into R chunks, and each of these ranks updates one chunk. The replicas exchange gradients before the update and
parameters after it, for all trained parameters of an FSDP2 unit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.config.sections.training import TrainingConfig
from titan_launch.plan.types import Unit


def chunk_numel(shape: Sequence[int], replicas: int) -> int:
    """Return the number of elements of the largest chunk of a local shard: the first one. `shape`: shape of the shard.

    As in FSDP2, the chunks have equal numbers of rows (of the first dim), except the last ones, which may be smaller or
    empty. If dim 0 of a shard has fewer experts than there are replicas, some replicas would get no chunk. So each
    chunk is a part of one expert's matrix if `is_within_matrix` returns True.
    """
    rows, numel = shape[0], prod(shape)
    if not numel:
        return 0
    if is_within_matrix(shape, replicas):
        return numel // replicas
    return -(-rows // replicas) * (numel // rows)


def is_within_matrix(shape: Sequence[int], replicas: int) -> bool:
    """Return True if each chunk of a local shard is a part of one matrix of a stack. `shape`: shape of the shard.

    This requires three dims (matrices, rows, columns), and k replicas for each matrix, for an integer k above 1 that
    divides the number of rows.
    """
    if len(shape) != 3 or not prod(shape) or replicas <= shape[0] or replicas % shape[0]:
        return False
    return shape[1] % (replicas // shape[0]) == 0


def gradients_leave_early(training: TrainingConfig) -> bool:
    """Return True if a unit's gradients are exchanged between the replicas as soon as FSDP2 has reduced them in the
    last backward. Return False if the exchange begins when backward has ended."""
    # With CPU offload, FSDP2 copies reduced gradients to the host while backward continues. With the hook that starts
    # the exchange, FSDP2 would wait for every copy.
    return not training.enable_cpu_offload


class ExchangedUnit(NamedTuple):
    """The trained parameters of an FSDP2 unit on one rank, whose gradients are exchanged between the replicas."""

    numel: int
    """Number of elements of the local shards of these parameters."""

    width: int
    """Number of elements of one replica's chunks of these shards. The buffers of the exchange have `width` elements for
    each replica."""

    storage_dtype: str
    reduce_dtype: str

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the local shards, in the storage dtype."""
        return self.numel * DTYPE_BYTES[self.storage_dtype]

    @property
    def chunks(self) -> int:
        """Bytes of one replica's chunks in the storage dtype. The gradients of the chunks have the same size."""
        return self.width * DTYPE_BYTES[self.storage_dtype]

    @property
    def reduced(self) -> int:
        """Bytes of the gradients of one replica's chunks, in the reduce dtype."""
        return self.width * DTYPE_BYTES[self.reduce_dtype]


def exchanged_unit(unit: Unit, shapes: Sequence[Sequence[int]], replicas: int) -> ExchangedUnit:
    """Return the `ExchangedUnit` of a trained FSDP2 unit. `shapes`: shapes of the local shards of its trained
    parameters."""
    assert unit.gradient_dtype is not None
    width = sum(chunk_numel(shape, replicas) for shape in shapes)
    return ExchangedUnit(sum(map(prod, shapes)), width, unit.gradient_dtype, unit.reduce_dtype)
