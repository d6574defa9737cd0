"""The microbatch size that `training.local_batch_size = "auto"` resolves to: the largest size that fits. No torch.

The global batch and its gradient stay the same: with larger microbatches, a step has fewer microbatches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, KeyPath, config_error
from titan_launch.plan.hardware import GIB, NO_LIMIT, Hardware
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.report.modes import Comparison
from titan_launch.plan.report.table import format_limit

KEY: KeyPath = ("training", "local_batch_size")

Predict = Callable[[JobConfig, Layout], Comparison]
"""A function that predicts the memory of a job in the modes that the job allows. `local_batch_size` of the job must not
be `auto`."""


def is_auto_batch(config: JobConfig) -> bool:
    """Return True if the microbatch size of a job is still to be chosen."""
    return config.training.local_batch_size == "auto"


def with_local_batch_size(config: JobConfig, size: int | Literal["auto"]) -> JobConfig:
    """Return the job with `size` samples per microbatch. `"auto"`: the size is still to be chosen."""
    return config.model_copy(update={"training": config.training.model_copy(update={"local_batch_size": size})})


def possible_batch_sizes(config: JobConfig, world_size: int) -> list[int]:
    """Return the microbatch sizes that divide the global batch evenly on `world_size` ranks and suit the pipeline
    schedule, smallest first. Without a global batch, return all sizes up to 1024. Raises the ConfigError of
    `plan_layout` if not even microbatches of one sample are possible."""
    if config.training.global_batch_size is None:
        return list(range(1, 1025))
    smallest = plan_layout(config.parallelism, with_local_batch_size(config, 1).training, world_size)
    sizes = []
    for size in range(1, smallest.samples_per_rank + 1):
        if smallest.samples_per_rank % size == 0:
            try:
                plan_layout(config.parallelism, with_local_batch_size(config, size).training, world_size)
            except ConfigError:  # too few microbatches for the pipeline's schedule
                continue
            sizes.append(size)
    return sizes


def largest_batch(config: JobConfig, world_size: int, hardware: Hardware, predict: Predict) -> int:
    """Return the largest microbatch size with which the job has the verdict `fits` in at least one of its choices of
    modes. Raises ConfigError if no memory limit is known, if no size is possible, or if not even the smallest size
    fits."""
    if hardware.memory_gib is None:
        raise config_error(KEY, NO_LIMIT, "auto", also=(("planner",),))
    sizes, fitting, needed = possible_batch_sizes(config, world_size), 0, 0.0
    low, high = 0, len(sizes)  # a binary search: sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        resized = with_local_batch_size(config, sizes[middle])
        comparison = predict(resized, plan_layout(config.parallelism, resized.training, world_size))
        own = [row for row in comparison.rows if row.is_own]
        if any(row.verdict == "fits" for row in own):
            low, fitting = middle + 1, sizes[middle]
        else:
            high, needed = middle, min(row.reserved_bytes for row in own) / GIB
    if fitting:
        return fitting
    reason = (
        f"even the smallest microbatch size, {sizes[0]}, does not fit into {format_limit(hardware)}: the job needs "
        f'about {needed:.4g} GiB; try activation_checkpoint.mode = "auto", a smaller training.seq_len, a larger '
        "loss.chunks, more ranks to shard over, or devices with more memory"
    )
    raise config_error(KEY, reason, "auto", also=(("planner",),))
