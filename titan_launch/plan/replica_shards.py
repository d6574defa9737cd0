"""The optimizer sharded over the replicas of a model (HSDP): sizes, traffic and memory of the exchange. No torch.

FSDP2 leaves a local shard of each parameter to a rank. R replicas have the same local shard, and each of them updates
one of R chunks of it. The chunks of all parameters of a unit are exchanged together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.config.sections.training import TrainingConfig


def chunk_numel(shape: Sequence[int], replicas: int) -> int:
    """Return the number of elements of the first chunk of a local shard, which is the largest. `shape`: of the shard.

    As with FSDP2, the chunks are equal numbers of rows (of the first dim), except the last ones, which may be smaller
    or empty. The stacked matrices of a few experts would leave replicas without a chunk. So if the replicas are a
    multiple of the experts (of the first of three dims) and divide their rows evenly, each chunk is a part of an
    expert.
    """
    rows, numel = shape[0], prod(shape)
    if not numel:
        return 0
    if is_within_matrix(shape, replicas):
        return numel // replicas
    return -(-rows // replicas) * (numel // rows)


def is_within_matrix(shape: Sequence[int], replicas: int) -> bool:
    """Return True if each chunk of a local shard is a part of one matrix of a stack. `shape`: of the shard."""
    if len(shape) != 3 or not prod(shape) or replicas <= shape[0] or replicas % shape[0]:
        return False
    return shape[1] % (replicas // shape[0]) == 0


def gradients_leave_early(training: TrainingConfig) -> bool:
    """Return True if the gradients of a unit are exchanged between the replicas as soon as FSDP2 has reduced them in
    the last backward, False if the exchange begins when backward has ended.

    With CPU offload, FSDP2 copies reduced gradients to the host while backward continues. It would wait for every copy
    if the parameters had the hook that starts the exchange.
    """
    return not training.enable_cpu_offload


class ExchangedUnit(NamedTuple):
    """The trained parameters of an FSDP2 unit on one rank, whose gradients are exchanged between the replicas."""

    numel: int
    """Elements of their local shards."""

    width: int
    """Elements of one chunk of each of these shards. The buffers of the exchange have this number for each replica."""

    storage_dtype: str
    reduce_dtype: str

    @property
    def gradients(self) -> int:
        """Bytes of the gradients of the local shards."""
        return self.numel * DTYPE_BYTES[self.storage_dtype]

    @property
    def chunks(self) -> int:
        """Bytes of the chunks, or of their gradients, of one replica."""
        return self.width * DTYPE_BYTES[self.storage_dtype]

    @property
    def reduced(self) -> int:
        """Bytes of the gradients of the chunks of one replica, in the dtype of the reduction."""
        return self.width * DTYPE_BYTES[self.reduce_dtype]


def exchanged_unit(
    shapes: Iterable[Sequence[int]], replicas: int, storage_dtype: str, reduce_dtype: str
) -> ExchangedUnit:
    """Return the sizes of a unit. `shapes`: shapes of the local shards of its trained parameters."""
    shapes = list(shapes)
    width = sum(chunk_numel(shape, replicas) for shape in shapes)
    return ExchangedUnit(sum(map(prod, shapes)), width, storage_dtype, reduce_dtype)
