"""Storing float32 results in bfloat16: to the nearest value, or to one of the two neighbours by chance."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_DROPPED_BITS = 16
"""Bits of a float32 that a bfloat16 does not have: the last ones of the mantissa."""

_GOLDEN = -1640531527  # 2^32 divided by the golden ratio, as an int32: multiples of it are far from each other


@dataclass(frozen=True)
class Draw:
    """Which random numbers: those of a tensor at a step. They depend on nothing else, so that a resumed run draws the
    same ones, and so does every division of the tensor among ranks."""

    seed: int
    name: str
    """Of the tensor."""

    step: Tensor
    """The step, a scalar on the tensor's device."""

    offsets: Sequence[int]
    """Where in the whole tensor the part of this rank begins."""

    def bits(self, shape: Sequence[int]) -> Tensor:
        """Random integers below 2^16, int32, for a part of a shape.

        A hash of seed, name, step and the element's indices: each index is mixed into a 32-bit word by multiplications
        and shifts, which keep as integers what overflows (the finalizer of MurmurHash3, with C. Wellons' constants).
        """
        digest = hashlib.blake2b(f"{self.seed}/{self.name}".encode(), digest_size=4).digest()
        word = self.step.to(torch.int32) * _GOLDEN + int.from_bytes(digest, "little", signed=True)
        word = _mix(word)
        for length, offset in zip(shape, self.offsets, strict=True):
            index = torch.arange(offset, offset + length, dtype=torch.int32, device=word.device)
            word = _mix(word[..., None] + index * _GOLDEN)
        return word.bitwise_and_((1 << _DROPPED_BITS) - 1)


def round_to(target: Tensor, value: Tensor, draw: Draw | None = None) -> None:
    """Store float32 values in a tensor of the same shape: to the nearest, or to bfloat16 stochastically with `draw`.

    Stochastic rounding takes the neighbour above with the probability that makes the mean right; what bfloat16 has is
    kept. `value` is used up.
    """
    if target is value:
        return
    if draw is not None and target.dtype == torch.bfloat16:
        bits = value.view(torch.int32)  # magnitude and sign: adding rounds away from zero, for both signs
        bits.add_(draw.bits(value.shape)).bitwise_and_(-(1 << _DROPPED_BITS))
    target.copy_(value)


def _mix(word: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of a word; in place."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        word ^= _shifted(word, shift)
        word *= factor
    word ^= _shifted(word, 15)
    return word


def _shifted(word: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (word >> by).bitwise_and_((1 << (32 - by)) - 1)
