"""This rank's shards of parameters, gradients and optimizer state, and rounding of float32 results to bfloat16."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.optim.matrix_gather import matrix_gather_of


@dataclass(frozen=True)
class LocalShard:
    """A parameter as this rank has it: plain tensors, the memory of which is that of the DTensors."""

    name: str
    full: Tensor
    """The parameter itself: a DTensor, or a plain tensor."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    seed: int | None
    """Seed of stochastic rounding; None rounds to the nearest."""

    def draw(self, what: str) -> Draw | None:
        """Return the random numbers for the stochastic rounding of `parameter` or of a state tensor; None without
        it."""
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
        """Return the arguments that PyTorch's functions have in common."""
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
    """Set the gradients to zero, in place, if the step is skipped: if `found_inf`, on the shards' device, is not 0.

    The gradients are multiplied as integers of the same size, because NaN * 0 is NaN.
    """
    if found_inf is None:
        return
    for dtype in (torch.int16, torch.int32, torch.int64):
        same_size = [s.gradient.view(dtype) for s in shards if s.gradient.itemsize == dtype.itemsize]
        if same_size:
            torch._foreach_mul_(same_size, (found_inf == 0).to(dtype))


def applied_or_skipped(found_inf: Tensor | None, device: torch.device) -> Tensor:
    """Return 1, or 0 for a skipped step, on a device: float64, which takes the dtype of the tensors it multiplies."""
    if found_inf is None:
        return torch.ones((), dtype=torch.float64, device=device)
    return (found_inf.to(device) == 0).double()


def count_step(shards: Sequence[LocalShard], applied: Tensor) -> None:
    """Count a step that is not skipped."""
    # A list of equal tensors: of one tensor, PyTorch would ask the device for its value.
    torch._foreach_add_([shard.state["step"] for shard in shards], [applied.float()] * len(shards))


def in_float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in float32: a copy of each one in another dtype, and the others themselves."""
    results = [t if t.dtype == torch.float32 else torch.empty_like(t, dtype=torch.float32) for t in tensors]
    _copy(results, tensors)
    return results


def masters(shards: Sequence[LocalShard]) -> list[Tensor]:
    """Return the parameters in float32, to be updated: their masters, themselves, or copies."""
    return in_float32([shard.state.get("master", shard.parameter) for shard in shards])


def store(shards: Sequence[LocalShard], name: str, values: Sequence[Tensor]) -> None:
    """Store float32 values, which are used up, as the `parameter` of each shard, or by a name of its state.

    The value of a parameter with a master is that master, updated in place; the parameter is rounded to the nearest.
    """
    nearest: list[tuple[Tensor, Tensor]] = []
    for shard, value in zip(shards, values, strict=True):
        target = shard.parameter if name == "parameter" else shard.state[name]
        if shard.seed is None or (name == "parameter" and "master" in shard.state):
            nearest.append((target, value))
        else:
            round_to(target, value, shard.draw(name))
    _copy([target for target, _ in nearest], [value for _, value in nearest])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy the tensors that are not their own targets; those of the same two dtypes in one operation."""
    alike: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target is not source:
            into, out_of = alike.setdefault((target.dtype, source.dtype), ([], []))
            into.append(target)
            out_of.append(source)
    for into, out_of in alike.values():
        torch._foreach_copy_(into, out_of)


_DROPPED_BITS = 16
"""Bits of a float32 that a bfloat16 does not have: the last ones of the mantissa."""

_GOLDEN = -1640531527  # 2^32 divided by the golden ratio, as an int32: multiples of it are far from each other


@dataclass(frozen=True)
class Draw:
    """The random numbers of a tensor at a step.

    They depend on nothing else. So a resumed run draws the same numbers, and so does every division of the tensor.
    """

    seed: int
    name: str
    """Name of the tensor."""

    step: Tensor
    """The step, a scalar on the tensor's device."""

    offsets: Sequence[int]
    """Offsets of this rank's shard in the full tensor."""

    def bits(self, shape: Sequence[int]) -> Tensor:
        """Return random integers below 2^16 (int32) for a shard of a shape.

        They are a hash of seed, name, step and the element's indices. Each index is mixed into a 32-bit word by
        multiplications and shifts. These discard overflow (the finalizer of MurmurHash3, with C. Wellons' constants).
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

    Stochastic rounding takes the neighbour above with the probability that makes the mean right. Values that
    bfloat16 represents are unchanged. `value` is overwritten.
    """
    if target is value:
        return
    if draw is not None and target.dtype == torch.bfloat16:
        bits = value.view(torch.int32)  # magnitude and sign: adding rounds away from zero, for both signs
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
    """Shift to the right, with zeros from the left."""
    return (word >> by).bitwise_and_((1 << (32 - by)) - 1)
