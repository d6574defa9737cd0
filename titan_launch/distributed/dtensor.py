"""Which part of a DTensor this rank has."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, with the same memory and without a graph to it; other tensors as they are.

    (`DTensor.to_local` is an operation of autograd, and makes another tensor.) A part that says how FSDP2 is to gather
    it, as torchao's float8 weights do, is a wrapper: the tensor in it is returned. (Operations of one on the whole are
    passed on, but what they return is a wrapper for some and plain for others.)
    """
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    if not hasattr(local, "fsdp_pre_all_gather"):
        return local
    inner: Tensor = local._tensor  # type: ignore[attr-defined]  # private to torchao; no public name
    return inner


def own_part(whole: Tensor, like: DTensor) -> Tensor:
    """A view of the part that this rank has of a tensor that is divided like `like`."""
    offsets, lengths = own_box(whole.shape, like.device_mesh, like.placements)
    for axis, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        whole = whole.narrow(axis, offset, length)
    return whole


def own_box(
    shape: Sequence[int], mesh: DeviceMesh | None, placements: Sequence[Placement]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Where this rank's part of a tensor of a shape begins, and its lengths, by axis of the tensor.

    The inner axes of the mesh divide first, and FSDP2, whose axes are outside, what tensor parallelism leaves. (PyTorch
    says so by a placement of another kind, where both divide the same axis of the tensor.) `mesh` is None only where
    nothing divides.
    """
    offsets, lengths = [0] * len(shape), list(shape)
    for mesh_axis, placement in reversed(list(enumerate(placements))):
        axis = divided_axis(placement)
        if axis is not None:
            assert mesh is not None
            own, sizes = mesh.get_local_rank(mesh_axis), chunk_sizes(lengths[axis], mesh.size(mesh_axis))
            offsets[axis] += sum(sizes[:own])
            lengths[axis] = sizes[own]
    return tuple(offsets), tuple(lengths)


def divided_axis(placement: Placement) -> int | None:
    """The axis of a parameter that a placement divides; None where it does not."""
    return None if placement.is_replicate() else placement.dim  # type: ignore[attr-defined]


def chunk_sizes(length: int, ranks: int) -> list[int]:
    """What each rank has of an axis, as `torch.chunk` divides: equal parts, but for the last ones."""
    size = -(-length // ranks)
    return [max(0, min(size, length - rank * size)) for rank in range(ranks)]
