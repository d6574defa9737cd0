"""The modes and the microbatch size that `auto` resolves to, and the modes that a plan recommends. This module does not
import torch.

A choice is a gradient accumulation mode with an activation checkpointing mode. The candidates are the choices that
`auto` may take and that have the verdict `fits`. If `activation_checkpoint.mode` is `auto`, only the candidates with
the shortest predicted step remain. (If times are unknown: with the fewest FLOPs, or else with the least activation
checkpointing.) Of the remaining candidates, the planner takes the one with the least link traffic.

`training.local_batch_size = "auto"` resolves to the largest microbatch size that fits. The global batch and its
gradient stay the same: with larger microbatches, a step has fewer microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, Problem, config_error
from titan_launch.core.terminal import counted
from titan_launch.plan.hardware import GIB, NO_LIMIT, Hardware
from titan_launch.plan.job import is_auto, with_choice, with_local_batch_size
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.report.modes import ModeComparison, PlanRow
from titan_launch.plan.report.table import format_comparison, format_limit

SET_BY_JOB = "set by the job"
"""`Resolution.reason` for a job without `auto`."""


@dataclass(frozen=True)
class Resolution:
    """A choice of modes, with the reason for it."""

    config: JobConfig
    """The job with the choice: neither mode is `auto`."""

    row: PlanRow
    reason: str
    """The modes and the reason for their choice, in words; `SET_BY_JOB` for a job without `auto`."""


def resolve(comparison: ModeComparison, hardware: Hardware) -> Resolution:
    """Return the choice that the job sets; for a job with `auto`, the best of the choices that `auto` may take.

    Raises ConfigError if no choice is possible. For a job with `auto`, also raises ConfigError if no memory limit is
    known, or if no choice fits. If no choice fits, the error contains the table of all compared choices, and remedies.
    """
    config = comparison.config
    own = _own_rows(comparison)
    if not is_auto(config):
        return Resolution(with_choice(config, own[0].choice), own[0], SET_BY_JOB)
    check_limit(config, hardware)
    best = _best(config, own, hardware, by_time=config.activation_checkpoint.mode == "auto")
    if best is None:
        raise ConfigError([_problem_of_auto(config, _why_nothing_fits(comparison, own, hardware))])
    return best


def _own_rows(comparison: ModeComparison) -> list[PlanRow]:
    """Return the rows of the choices that the job sets or `auto` may take. Raises ConfigError if there are no rows."""
    own = [row for row in comparison.rows if row.is_own]
    if not own:
        raise no_possible_choice(comparison.config, comparison.notes)
    return own


def no_possible_choice(config: JobConfig, notes: Sequence[str]) -> ConfigError:
    """Return the error for a job with `auto` for which no choice of modes is possible. `notes`: the notes of
    `possible_choices`."""
    return ConfigError([_problem_of_auto(config, f"no choice of modes is possible: {'; '.join(notes)}")])


def check_limit(config: JobConfig, hardware: Hardware) -> None:
    """Raise ConfigError if a mode of the job is `auto`, and no memory limit is known."""
    if is_auto(config) and hardware.memory_gib is None:
        raise ConfigError([_problem_of_auto(config, NO_LIMIT)])


def recommend(comparison: ModeComparison, hardware: Hardware) -> Resolution | None:
    """Return the best of all compared choices, by the rules for a job in which both modes are `auto`. Return None if no
    choice fits, or if no memory limit is known."""
    return _best(comparison.config, comparison.rows, hardware, by_time=True)


def _best(config: JobConfig, candidates: Sequence[PlanRow], hardware: Hardware, by_time: bool) -> Resolution | None:
    """Return the best of the rows that fit; None if no row fits. `by_time`: True to compare step times first, and link
    traffic only if step times are equal."""
    fitting = [row for row in candidates if row.verdict == "fits"]
    if not fitting:
        return None
    unranked = dict.fromkeys((row.choice.label for row in fitting), 0.0)
    duration, shortest = _durations(fitting) if by_time else (unranked, "")
    row = min(
        fitting,
        key=lambda row: (
            duration[row.choice.label],
            row.link_traffic.total,
            row.flops_per_rank or 0,  # equal times may have different FLOPs, if communication hides computation
            row.footprint.peak_bytes,
        ),
    )
    interval = row.time.interval
    seconds = f" (~{interval[0]:.3g} to {interval[1]:.3g} s)" if by_time and interval is not None else ""
    criterion = f"{shortest}{seconds}" if by_time else "the least link traffic"
    reason = (
        f"{row.choice.label}, because it has {criterion} among the {len(fitting)} of {len(candidates)} choices of "
        f"modes that fit into {hardware.memory_gib:.4g} GiB with the margin"
    )
    reason += " (link traffic decides between equal choices)" if by_time else ""
    overlapping = sum(other.time.ties_with(row.time) for other in fitting if other is not row)
    if interval is not None and overlapping:
        reason += f"; {counted(overlapping, 'other choice')} may be as fast, because the predicted step times overlap"
    return Resolution(with_choice(config, row.choice), row, reason)


def _durations(rows: Sequence[PlanRow]) -> tuple[dict[str, float], str]:
    """Return a number for each choice, by its label, and a description of the smallest number. A smaller number means a
    shorter step. The numbers are expected seconds if the expected seconds of all choices are known. Otherwise, the
    numbers are FLOPs. If FLOPs are unknown too, the numbers are the entries of `_COST`."""
    times = {row.choice.label: row.time.expected for row in rows if row.time.expected is not None}
    if len(times) == len(rows):
        return times, "the shortest predicted step"
    if all(row.flops_per_rank is not None for row in rows):
        return {row.choice.label: float(row.flops_per_rank or 0) for row in rows}, "the fewest FLOPs"
    costs = {row.choice.label: _COST[row.choice.activation_checkpoint.mode] for row in rows}
    return costs, "the least activation checkpointing"


_COST = {"none": 0.0, "selective": 1.0, "memory_budget": 1.0, "full": 2.0}
"""Numbers that order the activation checkpointing modes by the time that they add to a step."""


def _problem_of_auto(config: JobConfig, reason: str) -> Problem:
    section = "gradient_accumulation" if config.gradient_accumulation.mode == "auto" else "activation_checkpoint"
    return Problem((section, "mode"), reason, "auto", also=(("planner",),))


def _why_nothing_fits(comparison: ModeComparison, own: Sequence[PlanRow], hardware: Hardware) -> str:
    smallest = min(own, key=lambda row: row.reserved_bytes)
    none = "the only choice of modes does not fit" if len(own) == 1 else f"none of {len(own)} choices of modes fits"
    return (
        f"{none} into {format_limit(hardware)}; the smallest ({smallest.choice.label}) needs about "
        f"{smallest.reserved_bytes / GIB:.4g} GiB; {'; '.join(remedies(comparison, own))}\n"
        f"{format_comparison(comparison)}"
    )


def remedies(comparison: ModeComparison, own: Sequence[PlanRow]) -> Iterator[str]:
    """Yield remedies for the case that none of the rows `own` fits."""
    others = [row.choice.label for row in comparison.rows if row.verdict == "fits"]
    if others:
        yield f"these choices fit, and you can set them in the job: {'; '.join(others)}"
    tight = [row.choice.label for row in own if row.verdict == "tight"]
    if tight:
        yield f"these choices are tight (may run out of memory), but you can set them in the job: {'; '.join(tight)}"
    smaller = ["a smaller training.local_batch_size"] if comparison.config.training.local_batch_size != 1 else []
    keys = [*smaller, *_keys_that_save_memory(comparison.config), "more ranks to shard over"]
    attempt = "or try" if others or tight else "try"
    yield f"{attempt} {', '.join(keys)}, or devices with more memory"


def _keys_that_save_memory(config: JobConfig) -> Iterator[str]:
    """Yield changes of keys, without `local_batch_size`, that shrink the activations of a microbatch of tokens. Yield
    nothing for other data."""
    if config.data.unit == "tokens":
        yield "a smaller training.seq_len"
        if config.model.loss is None:
            yield "a larger loss.chunks"


# The size of the microbatch

_BATCH = ("training", "local_batch_size")

PredictModes = Callable[[JobConfig, Layout], ModeComparison]
"""A function that predicts the memory of a job in the modes that the job allows. `local_batch_size` of the job must not
be `auto`."""


def possible_batch_sizes(config: JobConfig, world_size: int) -> list[int]:
    """Return the microbatch sizes that divide the global batch evenly on `world_size` ranks and suit the pipeline
    schedule, smallest first. Without `training.global_batch_size`, return the sizes 1 to 1024. Raises the ConfigError
    of `plan_layout` if microbatches of one sample are not possible."""
    if config.training.global_batch_size is None:
        return list(range(1, 1025))
    smallest = plan_layout(config.parallelism, with_local_batch_size(config, "auto").training, world_size)
    sizes = []
    for size in range(1, smallest.samples_per_rank + 1):
        if smallest.samples_per_rank % size == 0:
            try:
                plan_layout(config.parallelism, with_local_batch_size(config, size).training, world_size)
            except ConfigError:  # too few microbatches for the pipeline's schedule
                continue
            sizes.append(size)
    return sizes


def largest_batch(config: JobConfig, world_size: int, hardware: Hardware, predict: PredictModes) -> int:
    """Return the largest microbatch size with which the job has the verdict `fits` in at least one of its choices of
    modes. Raises ConfigError if no memory limit is known, if no size or no choice of modes is possible, or if no size
    fits."""
    if hardware.memory_gib is None:
        raise config_error(_BATCH, NO_LIMIT, "auto", also=(("planner",),))
    sizes, fitting, needed = possible_batch_sizes(config, world_size), 0, 0.0
    low, high = 0, len(sizes)  # a binary search: sizes[:low] fit, sizes[high:] do not
    accumulation, middle = config.gradient_accumulation, high // 2
    if accumulation.mode != "auto" and accumulation.row.defers:
        # The largest size may give a single microbatch. A step then holds no gradients of earlier microbatches, so the
        # largest size may fit although smaller sizes do not.
        middle = high - 1
    while low < high:
        resized = with_local_batch_size(config, sizes[middle])
        comparison = predict(resized, plan_layout(config.parallelism, resized.training, world_size))
        own = _own_rows(comparison)
        if any(row.verdict == "fits" for row in own):
            low, fitting = middle + 1, sizes[middle]
        else:
            high, needed = middle, min(row.reserved_bytes for row in own) / GIB
        middle = (low + high) // 2
    if fitting:
        return fitting
    keys = [*_keys_that_save_memory(config), "more ranks to shard over"]
    if config.activation_checkpoint.mode not in ("auto", "full"):
        keys.insert(0, 'activation_checkpoint.mode = "auto"')
    reason = (
        f"even the smallest microbatch size, {sizes[0]}, does not fit into {format_limit(hardware)}: the job needs "
        f"about {needed:.4g} GiB; try {', '.join(keys)}, or devices with more memory"
    )
    raise config_error(_BATCH, reason, "auto", also=(("planner",),))
