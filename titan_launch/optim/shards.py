"""This rank's shards of parameters, gradients and optimizer state, and rounding of float32 results to bfloat16.

If the optimizer is sharded over replicas, the shards are this replica's chunks of the local shards.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.config.optimizers import alike, names_in_8_bits
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.distributed.dtensor import local_tensor, own_box
from titan_launch.optim.eight_bit import Codes, decode, encode
from titan_launch.optim.flat import divided, joined, on_device
from titan_launch.optim.matrix_gather import MatrixGather
from titan_launch.optim.replica_shards import ReplicaShards


@dataclass(frozen=True)
class LocalShard:
    """This rank's shard of a parameter, its gradient and its state: plain tensors that share their memory with the
    DTensors."""

    name: str
    full: Tensor
    """The parameter itself: a DTensor, or a plain tensor."""

    parameter: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    seed: int | None
    """Seed of stochastic rounding. With None, results are rounded to the nearest."""

    replicas: ReplicaShards | None = None
    """The replicas over which the optimizer is sharded; None if it is not sharded over replicas."""

    @property
    def gather(self) -> MatrixGather:
        """The sharding of the parameter, and the exchange of its shards between ranks."""
        if not isinstance(self.full, DTensor):
            return MatrixGather(None, ())
        mesh, placements, replicas = self.full.device_mesh, tuple(self.full.placements), self.replicas
        if replicas is None:
            return MatrixGather(mesh, placements)
        return MatrixGather(mesh, placements, replicas.replicas, replicas.ranks_of_matrices)

    @property
    def offsets(self) -> tuple[int, ...]:
        """Offsets of the shard in the whole parameter."""
        if self.replicas is None:
            return own_box(self.full.shape, self.full)[0]
        return self.replicas.shard_of(self.full, self.parameter, tuple(self.full.shape)).offsets

    def in_8_bits(self, name: str) -> Codes:
        """Return a state tensor that is stored in 8 bits."""
        codes, scales = names_in_8_bits(name)
        return Codes(self.state[codes], self.state[scales])

    def draw(self, what: str) -> RandomBits | None:
        """Return the random numbers for stochastic rounding of `what`: `parameter` or the name of a state tensor.
        Return None if `what` is rounded to the nearest, or is not in bfloat16."""
        target = self.parameter if what == "parameter" else self.state[what]
        if self.seed is None or target.dtype != torch.bfloat16 or (what == "parameter" and "master" in self.state):
            return None
        return RandomBits(self.seed, f"{self.name}/{what}", self.state["step"], target.shape, self.offsets)


class ShardGroup(NamedTuple):
    """Shards with one algorithm, learning rate, weight decay and step count."""

    shards: Sequence[LocalShard]
    lr: float
    weight_decay: float

    def pytorch_settings(self, config: OptimizerConfig, found_inf: Tensor | None) -> dict[str, Any]:
        """Return the arguments that PyTorch's functions `adamw` and `sgd` share."""
        return {
            "foreach": config.implementation == "foreach",
            "fused": config.implementation == "fused",
            "found_inf": found_inf,
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "maximize": False,
        }


def shard_of(
    name: str, parameter: Tensor, state: dict[str, Any], seed: int | None, replicas: ReplicaShards | None
) -> LocalShard:
    """Return this rank's shard of a parameter that has a gradient and state, or with `replicas` the replica's chunk."""
    assert parameter.grad is not None
    if replicas is not None:
        own, gradient = replicas.of(parameter, parameter), replicas.of(parameter, parameter.grad)
        return LocalShard(name, parameter, own, gradient, state, seed, replicas)
    local_state = {key: local_tensor(value) for key, value in state.items()}
    return LocalShard(name, parameter, local_tensor(parameter), local_tensor(parameter.grad), local_state, seed)


def mask_gradients(shards: Sequence[LocalShard], found_inf: Tensor | None) -> None:
    """Set the gradients of a skipped step to zero, in place. `found_inf`: a scalar on the device of the shards, not 0
    for a skipped step. None means that the step is not skipped."""
    if found_inf is None:
        return
    # The bits of the gradients are multiplied by 0 or 1 as integers, because NaN * 0 is NaN.
    for dtype in (torch.int16, torch.int32, torch.int64):
        same_size = [s.gradient.view(dtype) for s in shards if s.gradient.itemsize == dtype.itemsize]
        if same_size:
            torch._foreach_mul_(same_size, (found_inf == 0).to(dtype))


def applied_or_skipped(found_inf: Tensor | None, device: torch.device) -> Tensor:
    """Return a float64 scalar on `device`: 0 for a skipped step (`found_inf` is not 0), else 1 (`found_inf` is 0 or
    None). The product of a tensor and this scalar keeps the tensor's dtype."""
    if found_inf is None:
        return torch.ones((), dtype=torch.float64, device=device)
    return (found_inf.to(device) == 0).double()


def count_step(shards: Sequence[LocalShard], applied: Tensor) -> None:
    """Add `applied` to the step counts. `applied`: 1, or 0 for a skipped step."""
    # This is a list of equal tensors, because PyTorch would copy the value of a single tensor to the host.
    torch._foreach_add_([shard.state["step"] for shard in shards], [applied.float()] * len(shards))


def in_float32(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors in float32. A tensor that is already in float32 is returned itself, and other tensors are
    copied."""
    results = [t if t.dtype == torch.float32 else torch.empty_like(t, dtype=torch.float32) for t in tensors]
    _copy(results, tensors)
    return results


def moments(shards: Sequence[LocalShard], name: str) -> list[Tensor]:
    """Return the state tensors `name` in float32: the tensors themselves if they are in float32, else copies."""
    others = iter(in_float32([shard.state[name] for shard in shards if name in shard.state]))
    decoded = iter(decode([shard.in_8_bits(name) for shard in shards if name not in shard.state], name))
    return [next(others) if name in shard.state else next(decoded) for shard in shards]


def masters(shards: Sequence[LocalShard]) -> list[Tensor]:
    """Return a float32 tensor for each shard: the master weight, the parameter itself if it is float32, or a copy."""
    return in_float32([shard.state.get("master", shard.parameter) for shard in shards])


def store(shards: Sequence[LocalShard], name: str, values: Sequence[Tensor]) -> None:
    """Store float32 values in each shard's `parameter` or state tensor `name`. `values` may be overwritten.

    If a parameter has a master weight, its value in `values` is this master weight, which was updated in place. The
    parameter is then rounded to the nearest.
    """
    encoded: list[tuple[Codes, Tensor]] = []
    rounded: list[tuple[RandomBits, Tensor, Tensor]] = []
    nearest: list[tuple[Tensor, Tensor]] = []
    for shard, value in zip(shards, values, strict=True):
        if name != "parameter" and name not in shard.state:
            encoded.append((shard.in_8_bits(name), value))
            continue
        target, draw = shard.parameter if name == "parameter" else shard.state[name], shard.draw(name)
        if draw is None:
            nearest.append((target, value))
        else:
            rounded.append((draw, target, value))
    encode([codes for codes, _ in encoded], name, [value for _, value in encoded])
    for part in alike(rounded, lambda each: each[0].inner):
        round_stochastically(*zip(*part, strict=True))
    _copy([target for target, _ in nearest], [value for _, value in nearest])


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, unless both are the same tensor. One operation copies all pairs of equal
    dtypes."""
    pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0] is not pair[1]]
    for same in alike(pairs, lambda pair: (pair[0].dtype, pair[1].dtype)):
        torch._foreach_copy_([target for target, _ in same], [source for _, source in same])


_DROPPED_BITS = 16
"""Number of bits of a float32 that a bfloat16 lacks: the last bits of the mantissa."""

_GOLDEN = -1640531527  # 2^32 divided by the golden ratio, as an int32; multiples of this number are far apart


@dataclass(frozen=True)
class RandomBits:
    """The random numbers of a tensor at a step. They depend only on the seed, the tensor's name, the step and the
    element. So a resumed run, or a run with another sharding, draws the same numbers."""

    seed: int
    name: str
    """Name of the tensor."""

    step: Tensor
    """Step count of the parameter, a scalar on the tensor's device."""

    shape: torch.Size
    """Shape of this rank's shard."""

    offsets: tuple[int, ...]
    """Offsets of this rank's shard in the full tensor."""

    @property
    def inner(self) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """The tuple (tensor has axes, lengths of the axes after the first, offsets along these axes). `random_bits`
        draws for several tensors at once if their `inner` is equal."""
        return bool(self.shape), tuple(self.shape[1:]), self.offsets[1:]

    @property
    def digest(self) -> int:
        """A hash of seed and name, as an int32."""
        digest = hashlib.blake2b(f"{self.seed}/{self.name}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "little", signed=True)


def random_bits(draws: Sequence[RandomBits]) -> Tensor:
    """Return random integers below 2^16 for the elements of several tensors with equal `inner`, one tensor after
    another, as a flat int32 tensor.

    Each integer is a hash of seed, name, step and the element's indices. Each index is mixed into a 32-bit word by
    multiplications and shifts that may overflow (MurmurHash3's finalizer, with C. Wellons' constants).
    """
    device = draws[0].step.device
    steps = torch.stack([draw.step for draw in draws]).to(torch.int32)
    word = _mix(steps * _GOLDEN + on_device(tuple(draw.digest for draw in draws), device))
    if draws[0].shape:
        lengths = [draw.shape[0] for draw in draws]
        starts = [0, *accumulate(lengths)]
        shifts = [draw.offsets[0] - start for draw, start in zip(draws, starts, strict=False)]
        tensors = on_device(tuple(lengths), device), starts[-1]
        first = torch.arange(starts[-1], dtype=torch.int32, device=device)
        first += _repeated(on_device(tuple(shifts), device), *tensors)
        word = _mix(_repeated(word, *tensors) + first * _GOLDEN)
    for length, offset in zip(draws[0].shape[1:], draws[0].offsets[1:], strict=True):
        index = torch.arange(offset, offset + length, dtype=torch.int32, device=device)
        word = _mix(word[..., None] + index * _GOLDEN)
    return word.bitwise_and_((1 << _DROPPED_BITS) - 1).flatten()


def _repeated(numbers: Tensor, lengths: Tensor, total: int) -> Tensor:
    return numbers.repeat_interleave(lengths, output_size=total)


def round_stochastically(draws: Sequence[RandomBits], targets: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Store float32 values in bfloat16 tensors of the same shapes, with equal `inner`. `values` may be overwritten.

    Each result is one of the two neighbouring bfloat16 values, chosen at random such that the expected result equals
    the value.
    """
    added = random_bits(draws)
    flat = joined(values).nan_to_num_(torch.nan, torch.inf, -torch.inf)  # to bits of NaN that no carry can overflow
    # A carry from the dropped bits into the kept bits rounds away from zero.
    flat.view(torch.int32).add_(added).bitwise_and_(-(1 << _DROPPED_BITS))
    del added
    torch._foreach_copy_(list(targets), divided(flat.bfloat16(), [target.shape for target in targets]))


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
