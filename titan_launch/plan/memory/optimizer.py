"""What an optimizer keeps for its parameters, and what its update makes beside its results, in bytes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.plan.communication import DTYPE_BYTES
from titan_launch.plan.param_groups import GroupSettings, batches, has_master, is_mixed, moments_of

_DRAW = 8
"""Bytes for each element that is rounded stochastically: its random number, and one on the way to it (int32)."""


class ShardSize(NamedTuple):
    """A parameter that is trained, as a rank has it."""

    shape: tuple[int, ...]
    """Of the whole parameter."""

    num_elements: int
    """Of the rank's part."""

    dtype: str
    """It is stored in."""


class GroupSizes(NamedTuple):
    """The parameters that are updated alike."""

    settings: GroupSettings
    shards: Sequence[ShardSize]


def state_bytes(config: OptimizerConfig, groups: Sequence[GroupSizes]) -> int:
    """Moments and masters. (Step counts, a number for each parameter, are left out.)"""
    return sum(
        shard.num_elements
        * (len(moments_of(config, group.settings.algorithm)) * _state_size(config, shard) + _master(config, shard))
        for group in groups
        for shard in group.shards
    )


def temporary_bytes(config: OptimizerConfig, groups: Sequence[GroupSizes], ranks: int) -> int:
    """The most that is there at once during an update. `ranks`: those among which FSDP2 divides a parameter."""
    plain = [group for group in groups if group.settings.algorithm != "Muon"]
    muon = [shard for group in groups if group.settings.algorithm == "Muon" for shard in group.shards]
    mixed = is_mixed(config, (shard.dtype for group in plain for shard in group.shards))
    peaks: list[int] = []
    for settings, shards in plain:
        is_sgd = settings.algorithm == "SGD"
        if mixed:
            peak = _mixed_sgd if is_sgd else _mixed_adamw
            in_batches = batches([shard.num_elements for shard in shards])
            peaks += [peak([shards[i] for i in batch], config) for batch in in_batches]
        elif is_sgd:
            peaks.append(_plain_sgd(shards, settings.weight_decay > 0, config))
        else:
            peaks.append(_plain_adamw(shards, config.implementation))
    in_order = sorted(muon, key=lambda shard: -_numel(shard))
    peaks += [_muon(in_order[start : start + ranks], config, ranks) for start in range(0, len(muon), ranks)]
    return max(peaks, default=0)


def _plain_adamw(shards: Sequence[ShardSize], implementation: str) -> int:
    """PyTorch's: fused it works in place; foreach makes the roots of all second moments, the loop those of one
    parameter, twice, while the result of the one before is still there."""
    sizes = [shard.num_elements * DTYPE_BYTES[shard.dtype] for shard in shards]
    if implementation == "fused":
        return 0
    if implementation == "foreach":
        return sum(sizes)
    return max(2 * size + before for before, size in pairwise([0, *sizes]))


def _plain_sgd(shards: Sequence[ShardSize], is_decayed: bool, config: OptimizerConfig) -> int:
    """PyTorch's: fused it works in place. The others add weight decay to a copy of the gradients: of all (foreach), or
    of one parameter (the loop). The loop makes another copy for Nesterov's momentum."""
    sizes = [shard.num_elements * DTYPE_BYTES[shard.dtype] for shard in shards]
    if config.implementation == "fused":
        return 0
    if config.implementation == "foreach":
        return is_decayed * sum(sizes)
    return (is_decayed + config.sgd.nesterov) * max(sizes)


def _mixed_adamw(shards: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Of one batch in `titan_launch.optim.adamw`, at the moments when something new is there."""
    gradients = sum(_copy(shard.num_elements, shard.dtype) for shard in shards)
    moments = sum(shard.num_elements * (4 if _state_size(config, shard) < 4 else 0) for shard in shards)
    roots = 4 * sum(shard.num_elements for shard in shards)
    parameters = sum(0 if _master(config, shard) else _copy(shard.num_elements, shard.dtype) for shard in shards)
    draw = _DRAW * max(shard.num_elements for shard in shards) if config.rounding == "stochastic" else 0
    state_draw = draw if moments else 0
    return max(
        gradients + 2 * moments,
        roots + 2 * moments + state_draw,
        roots + moments + parameters,
        parameters + moments + state_draw,
        parameters + (draw if parameters else 0),
    )


def _mixed_sgd(shards: Sequence[ShardSize], config: OptimizerConfig) -> int:
    """Of one batch in `titan_launch.optim.sgd`, at the moments when something new is there."""
    gradients = sum(_copy(shard.num_elements, shard.dtype) for shard in shards)
    updates = 4 * sum(shard.num_elements for shard in shards)
    momenta = sum(shard.num_elements * (4 if _state_size(config, shard) < 4 else 0) for shard in shards)
    momenta = momenta if config.sgd.momentum else 0
    parameters = sum(0 if _master(config, shard) else _copy(shard.num_elements, shard.dtype) for shard in shards)
    draw = _DRAW * max(shard.num_elements for shard in shards) if config.rounding == "stochastic" else 0
    return max(
        parameters + updates + gradients,
        parameters + updates + momenta + (draw if momenta else 0),
        parameters + (draw if parameters else 0),
    )


def _muon(batch: Sequence[ShardSize], config: OptimizerConfig, ranks: int) -> int:
    """Of one batch in `titan_launch.optim.muon`, on a rank that has the largest matrix of it."""
    part = [2 * shard.num_elements for shard in batch]
    directions = max(sum(part[:i]) + _direction(shard, config) for i, shard in enumerate(batch))
    largest = max(batch, key=_numel)
    whole, gram = 2 * _numel(largest), 2 * min(largest.shape) ** 2
    parameters = max(_after_muon(shard, config) for shard in batch)
    if ranks == 1:
        return max(directions, 2 * (whole + gram), whole + parameters)
    is_tall = largest.shape[0] > largest.shape[1]
    there, back = 2 * sum(part) + whole, sum(part) + (3 if is_tall else 2) * whole
    return max(directions, there, 2 * (whole + gram), back, sum(part) + parameters)


def _direction(shard: ShardSize, config: OptimizerConfig) -> int:
    """Gradient, momentum and direction of one shard in float32, and the direction in bfloat16."""
    gradient = _copy(shard.num_elements, shard.dtype)
    momentum = shard.num_elements * (4 if _state_size(config, shard) < 4 else 0)
    direction = 4 * shard.num_elements if config.muon.nesterov else 0
    draw = _DRAW * shard.num_elements if momentum and config.rounding == "stochastic" else 0
    return gradient + momentum + max(direction, draw) + 2 * shard.num_elements


def _after_muon(shard: ShardSize, config: OptimizerConfig) -> int:
    if _master(config, shard):
        return 0
    copy = _copy(shard.num_elements, shard.dtype)
    return copy + (_DRAW * shard.num_elements if copy and config.rounding == "stochastic" else 0)


def _numel(shard: ShardSize) -> int:
    rows, columns = shard.shape
    return rows * columns


def _copy(num_elements: int, dtype: str) -> int:
    """Bytes of a copy in float32, where one is needed."""
    return 0 if dtype == "float32" else 4 * num_elements


def _state_size(config: OptimizerConfig, shard: ShardSize) -> int:
    return DTYPE_BYTES[config.state_dtype or shard.dtype]


def _master(config: OptimizerConfig, shard: ShardSize) -> int:
    return 4 if has_master(config, shard.dtype) else 0
