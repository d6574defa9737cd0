"""This rank's shards of parameters, gradients and optimizer state, and rounding of float32 results to bfloat16."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_launch.config.optimizers import names_in_8_bits
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.optim.eight_bit import decode, encode
from titan_launch.optim.matrix_gather import matrix_gather_of


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a parameter, its gradient and its state: plain tensors, in the memory of the DTensors."""

    name: str
    full: Tensor
    """The parameter itself: a DTensor, or a plain tensor."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    seed: int | None
    """Seed of stochastic rounding; None rounds to the nearest."""

    def in_8_bits(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the codes and the scales of a state tensor that is stored in 8 bits."""
        codes, scales = names_in_8_bits(name)
        return self.state[codes], self.state[scales]

    def draw(self, what: str) -> Draw | None:
        """Return the random numbers for stochastic rounding of `what`: `parameter` or the name of a state tensor.

        Return None if values are rounded to the nearest.
        """
        if self.seed is None:
            return None
        offsets = matrix_gather_of(self.full).offsets(self.full.shape)
        return Draw(self.seed, f"{self.name}/{what}", self.state["step"], offsets)


class ShardGroup(NamedTuple):
    """Shards with one algorithm, learning rate, weight decay and step count."""

    shards: Sequence[LocalShard]
    lr: float
    weight_decay: float

    def pytorch_settings(self, config: OptimizerConfig, found_inf: Tensor | None) -> dict[str, Any]:
        """Return the arguments that PyTorch's functions for all algorithms share."""
        return {
            "foreach": config.implementation == "foreach",
            "fused": config.implementation == "fused",
            "found_inf": found_inf,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "maximize": False,
        }


def shard_of(name: str, parameter: Tensor, state: dict[str, Any], seed: int | None) -> LocalShard:
    """Return the shard of a parameter that has a gradient and state."""
    assert parameter.grad is not None
    local_state = {key: local_tensor(value) for key, value in state.items()}
    return LocalShard(name, parameter, local_tensor(parameter), local_tensor(parameter.grad), local_state, seed)


def mask_gradients(shards: Sequence[LocalShard], found_inf: Tensor | None) -> None:
    """Set the gradients of a skipped step to zero, in place. A step is skipped if `found_inf` is not 0.

    `found_inf` is on the device of the shards. The gradients are multiplied by 0 or 1 as integers, because NaN * 0 is
    NaN.
    """
    if found_inf is None:
        return
    for dtype in (torch.int16, torch.int32, torch.int64):
        same_size = [s.gradient.view(dtype) for s in shards if s.gradient.itemsize == dtype.itemsize]
        if same_size:
            torch._foreach_mul_(same_size, (found_inf == 0).to(dtype))


def applied_or_skipped(found_inf: Tensor | None, device: torch.device) -> Tensor:
    """Return a scalar on `device`: 0 for a skipped step (`found_inf` is not 0), otherwise 1.

    The scalar is a float64 tensor without axes. A product of a tensor with such a scalar keeps the tensor's dtype.
    """
    if found_inf is None:
        return torch.ones((), dtype=torch.float64, device=device)
    return (found_inf.to(device) == 0).double()


def count_step(shards: Sequence[LocalShard], applied: Tensor) -> None:
    """Add `applied` to the step counts: 1, or 0 for a skipped step."""
    # This is a list of equal tensors, because PyTorch would copy the value of a single tensor to the host.
    torch._foreach_add_([shard.state["step"] for shard in shards], [applied.float()] * len(shards))


def in_float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in float32. A tensor in float32 is returned itself, and others are copied."""
    results = [t if t.dtype == torch.float32 else torch.empty_like(t, dtype=torch.float32) for t in tensors]
    _copy(results, tensors)
    return results


def moments(shards: Sequence[LocalShard], name: str) -> list[Tensor]:
    """Return the state tensors `name` in float32: themselves, or copies."""
    others = iter(in_float32([shard.state[name] for shard in shards if name in shard.state]))
    return [next(others) if name in shard.state else decode(*shard.in_8_bits(name), name) for shard in shards]


def masters(shards: Sequence[LocalShard]) -> list[Tensor]:
    """Return float32 tensors for the update of the parameters: master weights, float32 parameters, or copies."""
    return in_float32([shard.state.get("master", shard.parameter) for shard in shards])


def store(shards: Sequence[LocalShard], name: str, values: Sequence[Tensor]) -> None:
    """Store float32 values in each shard's `parameter` or state tensor `name`. `values` may be overwritten.

    If a parameter has a master weight, its value is that master, which was updated in place. The parameter is then
    rounded to the nearest.
    """
    nearest: list[tuple[Tensor, Tensor]] = []
    for shard, value in zip(shards, values, strict=True):
        if name != "parameter" and name not in shard.state:
            encode(*shard.in_8_bits(name), name, value)
            continue
        target = shard.parameter if name == "parameter" else shard.state[name]
        if shard.seed is None or (name == "parameter" and "master" in shard.state):
            nearest.append((target, value))
        else:
            round_to(target, value, shard.draw(name))
    _copy([target for target, _ in nearest], [value for _, value in nearest])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, unless both are the same tensor. Tensors of equal dtypes share one operation."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            into, out_of = alike.setdefault((target.dtype, source.dtype), ([], []))
            into.append(target)
            out_of.append(source)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)


_DROPPED_BITS = 16
"""Number of bits that a float32 has and a bfloat16 has not: the last bits of the mantissa."""

_GOLDEN = -1640531527  # 2^32 divided by the golden ratio, as an int32: its multiples are far apart


@dataclass(frozen=True)
class Draw:
    """The random numbers of a tensor at a step.

    They depend only on seed, name, step and element. So a resumed run, or another sharding, draws the same numbers.
    """

    seed: int
    name: str
    """Name of the tensor."""

    step: Tensor
    """Step count of the parameter, a scalar on the tensor's device."""

    offsets: Sequence[int]
    """Offsets of this rank's shard in the full tensor."""

    def bits(self, shape: Sequence[int]) -> Tensor:
        """Return random integers below 2^16, an int32 tensor of the given `shape` of this rank's shard.

        Each integer is a hash of seed, name, step and the element's indices. Each index is mixed into a 32-bit word by
        multiplications and shifts without overflow checks (MurmurHash3's finalizer, with C. Wellons' constants).
        """
        digest = hashlib.blake2b(f"{self.seed}/{self.name}".encode(), digest_size=4).digest()
        word = self.step.to(torch.int32) * _GOLDEN + int.from_bytes(digest, "little", signed=True)
        word = _mix(word)
        for length, offset in zip(shape, self.offsets, strict=True):
            index = torch.arange(offset, offset + length, dtype=torch.int32, device=word.device)
            word = _mix(word[..., None] + index * _GOLDEN)
        return word.bitwise_and_((1 << _DROPPED_BITS) - 1)


def round_to(target: Tensor, value: Tensor, draw: Draw | None = None) -> None:
    """Store float32 values in a tensor of the same shape. Round to the nearest, or stochastically with `draw`.

    Stochastic rounding applies to a bfloat16 `target`. It chooses between the two neighbouring bfloat16 values, such
    that the expected result equals the value. It overwrites `value`.
    """
    if target is value:
        return
    if draw is not None and target.dtype == torch.bfloat16:
        bits = value.view(torch.int32)  # sign and magnitude: for both signs, a larger integer is farther from zero
        bits.add_(draw.bits(value.shape)).bitwise_and_(-(1 << _DROPPED_BITS))
    target.copy_(value)


def _mix(word: Tensor) -> Tensor:
    """Mix a word in place, so that every bit of the result depends on every bit of the word."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
        word ^= _shifted(word, shift)
        word *= factor
    word ^= _shifted(word, 15)
    return word


def _shifted(word: Tensor, by: int) -> Tensor:
    """Return `word` shifted to the right. The new bits on the left are 0."""
    return (word >> by).bitwise_and_((1 << (32 - by)) - 1)
