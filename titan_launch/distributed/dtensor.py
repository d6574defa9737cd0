"""This rank's part of a sharded tensor: its values, its position and its shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.config.axes import REPLICATE

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import WriteItem


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, in the same memory and without autograd. Return a plain tensor itself.

    Some local tensors are wrappers that tell FSDP2 how to all-gather them, for example torchao's float8 weights. Then
    the tensor inside the wrapper is returned, because some operations on a wrapper return a wrapper, and others a plain
    tensor.
    """
    # Not `to_local`, which autograd records and which makes a new tensor object.
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "fsdp_pre_all_gather"):
        return local
    inner: Tensor = local._tensor  # type: ignore[attr-defined]  # private to torchao; no public name
    return inner


def number_of_copies(parameter: Tensor, replicas: int) -> int:
    """Return the number of ranks of a pipeline stage that hold each element of a parameter. `replicas`: result of
    `Layout.fsdp_replicas`. (Parameters that FSDP2 ignores are in every replica, but their mesh has no axis for the
    replicas. See `Layout.is_ignored`.)"""
    if not isinstance(parameter, DTensor):
        return replicas
    mesh = parameter.device_mesh
    own = math.prod(mesh.size(axis) for axis, place in enumerate(parameter.placements) if place.is_replicate())
    return own if REPLICATE.short in (mesh.mesh_dim_names or ()) else own * replicas


def own_part(full: Tensor, like: Tensor) -> Tensor:
    """Return a view of the unsharded tensor `full`: the part that this rank would hold if `full` were sharded like
    `like`."""
    return part_of_box(full, *own_box(full.shape, like))


def part_of_box(whole: Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Return a view of a part of a tensor. `offsets`, `lengths`: position and size of the part, in elements by dim."""
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        whole = whole.narrow(dim, offset, length)
    return whole


def own_box(shape: Sequence[int], like: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return (offsets, lengths), in elements by dim, of this rank's part of a tensor of shape `shape` that is sharded
    like `like`. If `like` is a plain tensor, the part is the whole tensor.

    The inner axes of the mesh shard first: tensor parallelism shards before FSDP2. PyTorch's function for this purpose,
    `compute_local_shape_and_global_offset`, is private. In torch 2.11 to 2.15 that function is also wrong if tensor
    parallelism and FSDP2 shard the same dim unevenly. An example is 7 rows over 3 FSDP2 and 2 tensor-parallel ranks.
    """
    if not isinstance(like, DTensor):
        return (0,) * len(shape), tuple(shape)
    offsets, lengths, mesh = [0] * len(shape), list(shape), like.device_mesh
    for axis, placement in reversed(list(enumerate(like.placements))):
        if placement.is_replicate():
            continue
        dim: int = placement.dim  # type: ignore[attr-defined]  # of a Shard, also of FSDP2's private kind
        rank, sizes = mesh.get_local_rank(axis), chunk_sizes(lengths[dim], mesh.size(axis))
        offsets[dim] += sum(sizes[:rank])
        lengths[dim] = sizes[rank]
    return tuple(offsets), tuple(lengths)


def chunk_sizes(length: int, ranks: int) -> list[int]:
    """Return the size of each rank's part of a dim of `length` elements. As with `torch.chunk`, all parts are equal
    except the last ones, which may be smaller or 0."""
    size = -(-length // ranks)
    return [max(0, min(size, length - rank * size)) for rank in range(ranks)]


@dataclass(frozen=True)
class Shard:
    """This rank's part of a sharded tensor, without a DeviceMesh. So the part can be sent to the process that writes
    checkpoints.

    The class implements DCP's protocol for objects that create their own write items.
    """

    local: Any
    """The values of the part: a tensor. In a state that `checkpoint.snapshot.lay_out` returned, a `Slot` replaces the
    tensor."""

    offsets: tuple[int, ...]
    """Offset of the part in the whole tensor by dim, in elements."""

    size: tuple[int, ...]
    """Shape of the whole tensor."""

    def __create_write_items__(self, fqn: str, shard: Shard) -> list[WriteItem]:
        if not self.local.numel():  # the last ranks may have no elements of an unevenly sharded tensor
            return []
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        offsets = torch.Size(self.offsets)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=self.local.size()),
            properties=TensorProperties.create_from_tensor(self.local),
            size=torch.Size(self.size),
        )
        return [WriteItem(index=MetadataIndex(fqn, offsets), type=WriteItemType.SHARD, tensor_data=data)]
