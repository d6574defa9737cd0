"""Optimizer state in 8 bits: codes for the elements, and a float32 scale for each block of 256 elements.

The method is that of arXiv:2110.02861 (Dettmers et al., 2021): an element is its block's largest magnitude times a
value of a table. The 255 or 256 values of the table lie closer together near zero ("dynamic" quantization). This module
differs in three ways. The blocks lie within rows (`length_of_row`), so FSDP2 shards the scales like the parameter, and
any number of ranks can load them. AdamW's second moment is stored as its square root, whose values in a block span half
as many orders of magnitude. A root above 0 is rounded to 0 only if its whole block is stored as zeros (see
`_SMALLEST_SCALE`). The value 1 is in both tables, so the largest magnitude of a block is stored exactly. If unchanged
values are stored again, every bit stays the same. So a skipped step changes nothing.

The state of vectors (norms, biases) stays in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from titan_launch.config.optimizers import BLOCK, alike, length_of_row, names_in_8_bits, shape_of_scales
from titan_launch.optim.flat import divided, joined

_ROOTS = frozenset({"exp_avg_sq"})
"""State tensors that are stored as square roots."""

_SMALLEST_SCALE = 2.0**-40
"""A block with a smaller scale is stored as zeros, so that no product with a value of a table is subnormal."""


def initial_codes(parameter: Tensor, name: str) -> dict[str, Tensor]:
    """Return the codes and the scales of a state tensor `name` that is 0 everywhere, by their names in the state. Both
    are sharded like the parameter, which must have at least two axes."""
    codes = torch.zeros_like(parameter, dtype=torch.int8, requires_grad=False)
    local = codes.to_local() if isinstance(codes, DTensor) else codes
    scales = torch.zeros(shape_of_scales(local.shape), device=local.device)
    if isinstance(codes, DTensor):
        whole = torch.empty(shape_of_scales(codes.shape), device="meta")
        scales = DTensor.from_local(
            scales, codes.device_mesh, codes.placements, shape=whole.shape, stride=whole.stride(), run_check=False
        )
    return dict(zip(names_in_8_bits(name), (codes, scales), strict=True))


class Codes(NamedTuple):
    """A state tensor in 8 bits on this rank."""

    codes: Tensor
    scales: Tensor

    @property
    def width(self) -> int:
        """Number of elements that `decode` and `encode` treat as one row: the block size if the length of the tensor's
        rows is a multiple of the block size, else the length of a row."""
        columns = length_of_row(self.codes.shape)
        return columns if columns % BLOCK else BLOCK


def decode(coded: Sequence[Codes], name: str) -> list[Tensor]:
    """Return the float32 values of the state tensors `name` of several parameters, as new tensors. Tensors of equal
    width are views of one flat tensor."""
    values: list[Tensor | None] = [None] * len(coded)
    for part in alike(range(len(coded)), lambda index: coded[index].width):
        own = [coded[index] for index in part]
        flat = _decoded(own, name).flatten()
        for index, tensor in zip(part, divided(flat, [each.codes.shape for each in own]), strict=True):
            values[index] = tensor
    return [value for value in values if value is not None]


def encode(coded: Sequence[Codes], name: str, values: Sequence[Tensor]) -> None:
    """Store float32 `values` in the state tensors `name` of several parameters. `values` may be overwritten."""
    for part in alike(zip(coded, values, strict=True), lambda pair: pair[0].width):
        _encode([each for each, _ in part], name, joined([value for _, value in part]))


def _decoded(coded: Sequence[Codes], name: str) -> Tensor:
    """Return the values of several tensors of equal width as one matrix whose rows have this width."""
    width = coded[0].width
    table, is_root = _table(name, coded[0].codes.device), name in _ROOTS
    indices = joined([each.codes for each in coded]).int()
    values = table[indices.add_(len(table) // 2)].view(-1, width)
    del indices
    scales = joined([each.scales for each in coded])
    if width == BLOCK:
        values.mul_(scales[:, None])
    else:
        values.mul_(scales.view(-1, shape_of_scales((width,))[0]).repeat_interleave(BLOCK, -1)[:, :width])
    return values.square_() if is_root else values


def _encode(coded: Sequence[Codes], name: str, values: Tensor) -> None:
    """Store a flat tensor of values as the codes and scales of state tensors of equal width."""
    width, is_root = coded[0].width, name in _ROOTS
    table, bounds = _table(name, values.device), _bounds(name, values.device)
    if is_root:
        values.sqrt_()
    rows = values.view(-1, width)
    rows = pad(rows, (0, -width % BLOCK)) if width % BLOCK else rows
    blocks = rows.view(-1, BLOCK)
    scales = torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_())
    scales.mul_(scales >= _SMALLEST_SCALE)
    blocks.div_(scales.where(scales > 0, torch.inf)[:, None])
    indices = torch.bucketize(blocks, bounds, out_int32=True)
    del blocks, rows, values
    codes = indices.sub_(len(table) // 2).view(-1, width + -width % BLOCK)[:, :width].to(torch.int8)
    del indices
    for kind, flat in enumerate((codes.flatten(), scales)):
        targets = [each[kind] for each in coded]
        torch._foreach_copy_(targets, divided(flat, [target.shape for target in targets]))


@cache
def _bounds(name: str, device: torch.device) -> Tensor:
    """Return the bounds between the values of neighbouring codes."""
    table = _table(name, device)
    bounds = (table[1:] + table[:-1]) / 2
    if name in _ROOTS:
        bounds[0] = 0  # only 0 is rounded to 0
    return bounds


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """Return the values of the codes, in ascending order: 255 values from -1 to 1, or 256 values from 0 to 1 for a
    square root.

    Each interval between two powers of 10, from 1e-7 to 1, has twice as many values as the interval below it, at equal
    distances.
    """
    is_root, positive = name in _ROOTS, []
    for exponent in range(7):
        bounds = torch.linspace(0.1, 1, (2 if is_root else 1) * 2**exponent + 1, dtype=torch.float64)
        positive.append((bounds[1:] + bounds[:-1]) / 2 * 10.0 ** (exponent - 6))
    values = torch.cat(positive)
    if is_root:
        values = torch.cat([torch.zeros(1), values, torch.ones(1)])
    else:
        values[-1] = 1
        values = torch.cat([-values.flip(0), torch.zeros(1), values])
    return values.float().to(device)
