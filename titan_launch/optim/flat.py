"""Lists of tensors as one flat tensor, so that one operation computes many tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """Return the elements of all tensors in one flat tensor. The result is a view if the tensors follow one another in
    one storage, as after `divided`; otherwise it is a copy."""
    first = tensors[0]
    start = end = first.storage_offset()
    for tensor in tensors:
        is_next = tensor.storage_offset() == end and tensor.is_contiguous()
        if not is_next or tensor.untyped_storage()._cdata != first.untyped_storage()._cdata:
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        end += tensor.numel()
    return first.as_strided((end - start,), (1,), start)


def divided(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return views of consecutive parts of a flat tensor. The views have the given shapes."""
    parts = flat.split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


@lru_cache(maxsize=4096)
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return integers as an int32 tensor. The result is cached, because the host waits for each copy to the device."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
