"""Exchange of matrices between ranks: each rank gathers one full matrix of a batch, and scatters its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor import Shard as Sharded
from torch.nn.functional import pad

from titan_launch.distributed.dtensor import chunk_sizes, own_box

Shape = Sequence[int]
"""Shape of a full matrix."""


@dataclass(frozen=True)
class MatrixGather:
    """The sharding of matrices over ranks, and the exchange of matrices with this sharding between the ranks.

    A batch is a list of at most `size` matrices, in the same order on all ranks. Every rank along FSDP2's mesh axis
    sends its shard of the i-th matrix to the i-th rank in one all-to-all. A second all-to-all returns the shards of the
    results. If tensor parallelism shards the matrices too, its ranks all-gather each matrix between the two
    all-to-alls, and all of them compute with the full matrix. All replicas repeat the same work, unless the optimizer
    is sharded over them: then a shard is a replica's chunk, and the ranks of all replicas divide the matrices.
    """

    mesh: DeviceMesh | None
    """Mesh of the matrices; None if they are plain tensors."""

    placements: tuple[Placement, ...]

    replicas: int = 1
    """Number of replicas over which the optimizer is sharded."""

    ranks: dist.ProcessGroup | None = None
    """The ranks that have the shards of a matrix, in the order (replica, rank along FSDP2's axis). None: the ranks
    along FSDP2's axis."""

    @property
    def size(self) -> int:
        """Number of ranks that share a matrix, which is the largest number of matrices in a batch."""
        return 1 if self.mesh is None or self._axis is None else self.mesh.size(self._axis) * self.replicas

    def gather(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> Tensor | None:
        """Return the full matrix of a batch that this rank computes with, gathered from the shards of all ranks.

        `parts`: this rank's shards of a batch, one per matrix. `shapes`: the full shapes. The i-th of the ranks that
        share a matrix gets the i-th matrix, in bfloat16 on the mesh's device. A rank without a matrix gets None.
        """
        if self.mesh is None or self._axis is None:
            return parts[0]
        mine = self._index(shapes)
        if self.size == 1:
            return self._gather_tensor_parallel(parts[0].to(self.mesh.device_type), shapes[0])
        rows, columns = ([0] * self.size, 0) if mine is None else self._rows(shapes[mine])
        received = self._all_to_all(parts, [count * columns for count in rows])
        if mine is None:
            return None
        if self.replicas > 1:
            by_rank = received.split([count * columns for count in rows])
            received = torch.cat([by_rank[rank] for rank in self._order])
        return self._gather_tensor_parallel(received.view(-1, columns), shapes[mine])

    def scatter(self, full: Tensor | None, shapes: Sequence[Shape]) -> list[Tensor]:
        """Return this rank's shards of all matrices of a batch.

        `full`: the matrix that this rank has computed; None on a rank without a matrix. `shapes`: as for `gather`.
        """
        if self.mesh is None or self._axis is None or self.size == 1:
            assert full is not None
            return [self._tensor_parallel_part(full)]
        mine, parts = self._index(shapes), []
        if full is not None and mine is not None:
            rows = self._rows(shapes[mine])[0]
            in_order = self._tensor_parallel_part(full).split([rows[rank] for rank in self._order])
            parts = [part for _, part in sorted(zip(self._order, in_order, strict=True), key=lambda pair: pair[0])]
        own = dist.get_rank(self._group)
        sizes = [(rows[own], columns) for rows, columns in map(self._rows, shapes)]
        received = self._all_to_all(parts, [rows * columns for rows, columns in sizes])
        flat = received.split([rows * columns for rows, columns in sizes])
        return [part.view(size) for part, size in zip(flat, sizes, strict=True)]

    def offsets(self, shape: Shape) -> tuple[int, ...]:
        """Return the offsets of this rank's shard in a tensor of any number of axes."""
        return own_box(shape, self.mesh, self.placements)[0]

    @property
    def _axis(self) -> int | None:
        """FSDP2's axis of the mesh: the first axis that shards the matrices. Tensor parallelism has a later axis."""
        return next((axis for axis, placement in enumerate(self.placements) if placement != Replicate()), None)

    @property
    def _tensor_parallel(self) -> list[tuple[int, int]]:
        """Pairs for tensor parallelism: an axis of the mesh, and the axis of the matrix that it shards."""
        start = len(self.placements) if self._axis is None else self._axis + 1
        behind = enumerate(self.placements[start:], start)
        return [(axis, placement.dim) for axis, placement in behind if isinstance(placement, Sharded)]

    def _index(self, shapes: Sequence[Shape]) -> int | None:
        """Return the index of the matrix that this rank gathers; None if the batch has no matrix for this rank."""
        assert self.mesh is not None and self._axis is not None
        own = dist.get_rank(self._group)
        return own if own < len(shapes) else None

    def _rows(self, shape: Shape) -> tuple[list[int], int]:
        """Return how FSDP2 shards this rank's tensor-parallel part of a matrix, and how replicas divide the shards: the
        number of rows on each rank, and the number of columns."""
        assert self.mesh is not None
        left = list(shape)
        for axis, divided in self._tensor_parallel:
            left[divided] = chunk_sizes(left[divided], self.mesh.size(axis))[self.mesh.get_local_rank(axis)]
        of_shards = chunk_sizes(left[0], self.size // self.replicas)
        chunks = [chunk_sizes(rows, self.replicas) for rows in of_shards]
        return [rows for replica in zip(*chunks, strict=True) for rows in replica], left[1]

    @property
    def _order(self) -> list[int]:
        """The ranks in the order of their rows. The ranks that share a matrix are numbered replica by replica, but its
        rows are divided over FSDP2's axis first."""
        shards = self.size // self.replicas
        return [replica * shards + shard for shard in range(shards) for replica in range(self.replicas)]

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.mesh is not None and self._axis is not None
        return self.ranks or self.mesh.get_group(self._axis)

    def _all_to_all(self, parts: Sequence[Tensor], received: Sequence[int]) -> Tensor:
        """Send the i-th part to the i-th rank, and return the elements that this rank receives, in one flat tensor.

        `received`: number of elements from each rank. Both lists may be shorter than the group: the missing ranks
        exchange no elements.
        """
        assert self.mesh is not None and self._axis is not None
        device = self.mesh.device_type
        sent = [part.numel() for part in parts]
        nothing = torch.empty(0, dtype=torch.bfloat16, device=device)
        source = torch.cat([nothing, *(part.reshape(-1).to(device) for part in parts)])
        output = torch.empty(sum(received), dtype=torch.bfloat16, device=device)
        dist.all_to_all_single(output, source, self._padded(received), self._padded(sent), group=self._group)
        return output

    def _padded(self, counts: Sequence[int]) -> list[int]:
        return [*counts, *[0] * (self.size - len(counts))]

    def _gather_tensor_parallel(self, part: Tensor, shape: Shape) -> Tensor:
        """Return the full matrix, from this rank's tensor-parallel part."""
        assert self.mesh is not None
        for axis, divided in self._tensor_parallel:
            sizes = chunk_sizes(shape[divided], self.mesh.size(axis))
            missing = sizes[0] - part.shape[divided]
            part = pad(part, (0, 0, 0, missing) if divided == 0 else (0, missing)).contiguous()
            gathered = [torch.empty_like(part) for _ in sizes]
            dist.all_gather(gathered, part, group=self.mesh.get_group(axis))
            part = torch.cat(gathered, divided).narrow(divided, 0, shape[divided])
        return part

    def _tensor_parallel_part(self, full: Tensor) -> Tensor:
        for axis, divided in self._tensor_parallel:
            assert self.mesh is not None
            sizes = chunk_sizes(full.shape[divided], self.mesh.size(axis))
            full = full.split(sizes, divided)[self.mesh.get_local_rank(axis)]
        return full


def matrix_gather_of(parameter: Tensor) -> MatrixGather:
    """Return the sharding of a parameter."""
    if isinstance(parameter, DTensor):
        return MatrixGather(parameter.device_mesh, tuple(parameter.placements))
    return MatrixGather(None, ())
