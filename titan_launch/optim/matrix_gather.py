"""Exchange of matrices between ranks: each rank gathers some full matrices of a batch, and scatters the results that it
computes from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor import Shard as Sharded
from torch.nn.functional import pad

from titan_launch.distributed.dtensor import chunk_sizes
from titan_launch.optim.flat import divided, joined


@dataclass(frozen=True)
class MatrixGather:
    """The sharding of some matrices over ranks, and the exchange of these matrices between the ranks.

    A batch is a list of at most `size` stacks, in the same order on all ranks. A stack has several matrices of one
    shape: (matrices, rows, columns). Every rank along FSDP2's mesh axis sends its shards of the i-th stack to the i-th
    rank in one all-to-all. A second all-to-all returns the shards of the results. If tensor parallelism also shards the
    matrices, its ranks all-gather each stack between the two all-to-alls, and all of them compute with the full
    matrices. If the optimizer is not sharded over replicas, all replicas repeat the same work. If the optimizer is
    sharded over replicas, the ranks of all replicas share the stacks of a batch. "Shard" then means the chunk of one
    replica.
    """

    mesh: DeviceMesh | None
    """Mesh of the matrices; None if they are plain tensors."""

    placements: tuple[Placement, ...]

    replicas: int = 1
    """Number of replicas over which the optimizer is sharded."""

    ranks: dist.ProcessGroup | None = None
    """Process group of the ranks that have the shards of a matrix, in the order (replica, rank along FSDP2's axis).
    None: the process group of FSDP2's mesh axis."""

    @property
    def size(self) -> int:
        """Number of ranks that share a matrix, without tensor-parallel ranks. A batch has at most this number of
        stacks."""
        return 1 if self.mesh is None or self._axis is None else self.mesh.size(self._axis) * self.replicas

    def gather(self, shards: Tensor, shapes: Sequence[torch.Size]) -> Tensor | None:
        """Return the full stack whose update this rank computes, gathered from the shards of all ranks. Collective.

        `shards`: this rank's shards of all matrices of the batch, joined in one flat bfloat16 tensor. `shapes`: shapes
        of the full stacks. Of the ranks that share the matrices, the i-th gets the i-th stack, on the mesh's device. If
        there are fewer stacks than ranks, the other ranks get None.
        """
        if self.mesh is None or self._axis is None:
            return shards.view(shapes[0])
        shards = shards.to(self.mesh.device_type)
        if self.size == 1:
            return self._gather_tensor_parallel(shards.view(self._divided(shapes[0])[0]), shapes[0])
        mine = self._index(shapes)
        parts = [] if mine is None else self._divided(shapes[mine])
        received = self._all_to_all(shards, self._own(shapes), parts)
        del shards
        if mine is None:
            return None
        by_rank = divided(received, parts)
        in_order = [by_rank[rank] for rank in self._order]
        del received, by_rank
        number, _, columns = parts[0]
        stack = joined(in_order).view(1, -1, columns) if number == 1 else torch.cat(in_order, dim=1)
        del in_order
        return self._gather_tensor_parallel(stack, shapes[mine])

    def scatter(self, full: Tensor | None, shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return this rank's shards of all matrices of a batch. Collective. `full`: the stack that this rank has
        computed; None on a rank without a stack. `shapes`: as for `gather`."""
        if self.mesh is None or self._axis is None or self.size == 1:
            assert full is not None
            return list(self._tensor_parallel_part(full).unbind())
        mine = self._index(shapes)
        parts = [] if full is None or mine is None else self._divided(shapes[mine])
        sent = self._empty(parts)
        if full is not None:
            by_rank, order = divided(sent, parts), self._order
            rows = [parts[rank][1] for rank in order]
            torch._foreach_copy_(
                [by_rank[rank] for rank in order], list(self._tensor_parallel_part(full).split(rows, dim=1))
            )
        own = self._own(shapes)
        received = divided(self._all_to_all(sent, parts, own), own)
        return [matrix for stack in received for matrix in stack.unbind()]

    @property
    def _axis(self) -> int | None:
        """FSDP2's axis of the mesh: the first axis that shards the matrices. Tensor parallelism has a later axis."""
        return next((axis for axis, placement in enumerate(self.placements) if placement != Replicate()), None)

    @property
    def _tensor_parallel(self) -> list[tuple[int, int]]:
        """For each tensor-parallel axis of the mesh: (index of the mesh axis, axis of a stack that it shards)."""
        start = len(self.placements) if self._axis is None else self._axis + 1
        behind = enumerate(self.placements[start:], start)
        return [(axis, placement.dim + 1) for axis, placement in behind if isinstance(placement, Sharded)]

    def _index(self, shapes: Sequence[torch.Size]) -> int | None:
        """Return the index of the stack that this rank gathers; None if the batch has no stack for this rank."""
        own = dist.get_rank(self._group)
        return own if own < len(shapes) else None

    def _divided(self, shape: torch.Size) -> list[torch.Size]:
        """Return the shapes of a stack's shards on all ranks. FSDP2 shards this rank's tensor-parallel part of the
        matrices, and the replicas divide each shard."""
        assert self.mesh is not None
        number, *left = shape
        for axis, divided_axis in self._tensor_parallel:
            sizes = chunk_sizes(shape[divided_axis], self.mesh.size(axis))
            left[divided_axis - 1] = sizes[self.mesh.get_local_rank(axis)]
        of_shards = chunk_sizes(left[0], self.size // self.replicas)
        chunks = [chunk_sizes(rows, self.replicas) for rows in of_shards]
        return [torch.Size((number, rows, left[1])) for replica in zip(*chunks, strict=True) for rows in replica]

    def _own(self, shapes: Sequence[torch.Size]) -> list[torch.Size]:
        """Return the shapes of this rank's shards of all stacks."""
        own = dist.get_rank(self._group)
        return [self._divided(shape)[own] for shape in shapes]

    @property
    def _order(self) -> list[int]:
        """Indices of the ranks in their group, in the order of the matrix rows that they have. The group is ordered by
        replica, but the rows are divided over FSDP2's axis first, and over the replicas second."""
        shards = self.size // self.replicas
        return [replica * shards + shard for shard in range(shards) for replica in range(self.replicas)]

    @property
    def _group(self) -> dist.ProcessGroup:
        assert self.mesh is not None and self._axis is not None
        return self.ranks or self.mesh.get_group(self._axis)

    def _all_to_all(self, sent: Tensor, parts: Sequence[torch.Size], received: Sequence[torch.Size]) -> Tensor:
        """Send the i-th part of a flat tensor to the i-th rank. Return the parts that this rank receives, in one flat
        tensor. `parts`: shapes of the sent parts. `received`: shapes of the parts from each rank. Both lists may be
        shorter than the group: the missing ranks exchange no elements."""
        output = self._empty(received)
        dist.all_to_all_single(output, sent, self._counts(received), self._counts(parts), group=self._group)
        return output

    def _empty(self, shapes: Sequence[torch.Size]) -> Tensor:
        assert self.mesh is not None
        numel = sum(shape.numel() for shape in shapes)
        return torch.empty(numel, dtype=torch.bfloat16, device=self.mesh.device_type)

    def _counts(self, shapes: Sequence[torch.Size]) -> list[int]:
        return [*(shape.numel() for shape in shapes), *[0] * (self.size - len(shapes))]

    def _gather_tensor_parallel(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return the full stack, from this rank's tensor-parallel part."""
        assert self.mesh is not None
        for axis, divided_axis in self._tensor_parallel:
            sizes = chunk_sizes(shape[divided_axis], self.mesh.size(axis))
            missing = sizes[0] - part.shape[divided_axis]
            part = pad(part, (0, 0, 0, missing) if divided_axis == 1 else (0, missing)).contiguous()
            gathered = [torch.empty_like(part) for _ in sizes]
            dist.all_gather(gathered, part, group=self.mesh.get_group(axis))
            part = torch.cat(gathered, divided_axis).narrow(divided_axis, 0, shape[divided_axis])
        return part

    def _tensor_parallel_part(self, full: Tensor) -> Tensor:
        for axis, divided_axis in self._tensor_parallel:
            assert self.mesh is not None
            sizes = chunk_sizes(full.shape[divided_axis], self.mesh.size(axis))
            full = full.split(sizes, divided_axis)[self.mesh.get_local_rank(axis)]
        return full
