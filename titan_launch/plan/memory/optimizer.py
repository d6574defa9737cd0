"""Memory of the optimizer on one rank: its state, and the temporaries of an update. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from titan_launch.config.optimizers import ALGORITHMS, GroupSizes, has_master
from titan_launch.config.sections.base import DTYPE_BYTES
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.plan.param_groups import is_mixed


def state_bytes(config: OptimizerConfig, groups: Sequence[GroupSizes]) -> int:
    """Return the bytes of state tensors and masters. (Step counts, a number per parameter, do not count.)"""
    total = 0
    for settings, shards in groups:
        num_tensors = len(ALGORITHMS[settings.algorithm].state(config))
        for shard in shards:
            size = num_tensors * DTYPE_BYTES[config.state_dtype or shard.dtype]
            total += shard.num_elements * (size + (4 if has_master(config, shard.dtype) else 0))
    return total


def temporary_bytes(config: OptimizerConfig, groups: Sequence[GroupSizes], ranks: int) -> int:
    """Return the most bytes that an update allocates at once. `ranks`: those among which FSDP2 divides a parameter."""
    by_algorithm: dict[str, list[GroupSizes]] = {}
    for group in groups:
        by_algorithm.setdefault(group.settings.algorithm, []).append(group)
    in_pytorch = [group for group in groups if ALGORITHMS[group.settings.algorithm].pytorch is not None]
    mixed = is_mixed(config, (shard.dtype for group in in_pytorch for shard in group.shards))
    peaks = []
    for name, group_sizes in by_algorithm.items():
        row = ALGORITHMS[name]
        temporaries = row.temporaries if mixed or row.pytorch is None else row.pytorch.temporaries
        peaks.append(temporaries(group_sizes, config, ranks))
    return max(peaks, default=0)
