"""Optimizer state in 8 bits: codes for the elements, and a float32 scale for each block of 256 elements.

The method is that of arXiv:2110.02861 (Dettmers et al., 2021): an element is its block's largest magnitude times a
value of a table with 255 or 256 entries, which lie closer together near zero ("dynamic" quantization). Three things
differ. The blocks lie within rows (the last dim), so FSDP2 shards the scales like the parameter, and any number of
ranks can load them. AdamW's second moment is stored as its square root, whose range in a block is half as many orders
of magnitude, and which is never rounded to 0. Both tables have the value 1, so a state that is stored again without a
change keeps every bit: a skipped step changes nothing.

The state of vectors (norms, biases) stays in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import pad

from titan_launch.config.optimizers import BLOCK, names_in_8_bits, shape_of_scales

_ROOTS = frozenset({"exp_avg_sq"})
"""State tensors that are stored as square roots."""

_SMALLEST_SCALE = 2.0**-40
"""A block with a smaller scale is stored as zeros, so that no product with a value of a table is subnormal."""


def initial_codes(parameter: nn.Parameter, name: str) -> dict[str, Tensor]:
    """Return a state tensor `name` of zeros and its scales, for a parameter with at least two axes, and sharded like
    it."""
    codes = torch.zeros_like(parameter, dtype=torch.int8, requires_grad=False)
    local = codes.to_local() if isinstance(codes, DTensor) else codes
    scales = torch.zeros(shape_of_scales(local.shape), device=local.device)
    if isinstance(codes, DTensor):
        whole = torch.empty(shape_of_scales(codes.shape), device="meta")
        scales = DTensor.from_local(
            scales, codes.device_mesh, codes.placements, shape=whole.shape, stride=whole.stride(), run_check=False
        )
    return dict(zip(names_in_8_bits(name), (codes, scales), strict=True))


def decode(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """Return the float32 values of the state tensor `name` on this rank: a new tensor."""
    table, is_root = _table(name, codes.device), name in _ROOTS
    values = table[codes.int().add_(len(table) // 2)]
    columns = values.shape[-1]
    if columns % BLOCK:
        values.mul_(scales.repeat_interleave(BLOCK, -1)[..., :columns])
    else:
        values.unflatten(-1, (-1, BLOCK)).mul_(scales[..., None])
    return values.square_() if is_root else values


def encode(codes: Tensor, scales: Tensor, name: str, values: Tensor) -> None:
    """Store the float32 `values` of the state tensor `name` on this rank. `values` are overwritten."""
    table, is_root, columns = _table(name, codes.device), name in _ROOTS, values.shape[-1]
    if is_root:
        values.sqrt_()
    if columns % BLOCK:
        values = pad(values, (0, -columns % BLOCK))
    blocks = values.unflatten(-1, (-1, BLOCK))
    torch.maximum(blocks.amax(-1), blocks.amin(-1).neg_(), out=scales)
    scales.mul_(scales >= _SMALLEST_SCALE)
    blocks.div_(scales.where(scales > 0, torch.inf)[..., None])
    bounds = (table[1:] + table[:-1]) / 2
    if is_root:
        bounds[0] = 0  # only 0 is rounded to 0
    indices = torch.bucketize(blocks, bounds, out_int32=True)
    codes.copy_(indices.sub_(len(table) // 2).flatten(-2)[..., :columns])


@cache
def _table(name: str, device: torch.device) -> Tensor:
    """Return the values of the codes, in ascending order: 255 values from -1 to 1, or 256 values from 0 to 1 for a
    square root.

    Each power of 10 from 1e-7 to 1 has twice as many values as the one below it, at equal distances.
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
