"""Which mode `auto` stands for: a pure function of what is predicted. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, Problem
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.job import is_auto, is_configured_activation_checkpoint, with_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.report.comparison import Comparison, Engine, Row, compare
from titan_launch.plan.report.table import format_comparison
from titan_launch.plan.step_time import ModelFlops
from titan_launch.plan.types import Inventory

AS_GIVEN = "as the job says"
"""The reason for a choice that the job leaves nobody."""


@dataclass(frozen=True)
class Resolution:
    """What became of a job's `auto`."""

    config: JobConfig
    """The job with the choice made: neither mode is `auto`."""

    row: Row
    reason: str
    """A sentence, for the log."""


def resolve(comparison: Comparison, hardware: Hardware) -> Resolution:
    """Choose among the rows that the job admits: those that fit, never a tight one.

    The least bytes on the wire with a given recomputation; with `auto` for that too, the shortest step first, as far as
    its lower bound says, since computing again costs more than most traffic. A pure function of its arguments.

    Raises ConfigError where every mode is left out, no limit is known, or nothing fits: its text has the table, and
    remedies.
    """
    config = comparison.config
    own = [row for row in comparison.rows if row.is_own]
    if not own:
        raise ConfigError([_problem_of_auto(config, f"has nothing to choose from: {'; '.join(comparison.notes)}")])
    if not is_auto(config):
        return Resolution(with_choice(config, own[0].choice), own[0], AS_GIVEN)
    if hardware.memory_gib is None:
        remedy = "set planner.device or planner.memory_gib (plan: --device, --memory-gib)"
        raise ConfigError([_problem_of_auto(config, f"is chosen by memory, and no limit is known; {remedy}")])
    best = _best(own, by_time=config.activation_checkpoint.mode == "auto")
    if best is None:
        raise ConfigError([_problem_of_auto(config, _why_nothing_fits(comparison, hardware))])
    return Resolution(with_choice(config, best.row.choice), best.row, _reason(best, hardware))


def suggest(comparison: Comparison, hardware: Hardware) -> str | None:
    """For a job that leaves nothing open: what `gradient_accumulation.mode = "auto"` would be with its recomputation.

    None where there is nothing to say: no limit, or `auto`.
    """
    config = comparison.config
    if is_auto(config) or hardware.memory_gib is None:
        return None
    rows = [row for row in comparison.rows if is_configured_activation_checkpoint(config, row.choice.recomputation)]
    best = _best(rows, by_time=False)
    return "nothing: no mode fits" if best is None else _reason(best, hardware)


def resolve_auto(
    config: JobConfig,
    layout: Layout,
    inventory: Inventory,
    flops: ModelFlops,
    hardware: Hardware,
    engine: Engine,
) -> Resolution:
    """What `auto` stands for in a job: `compare` and `resolve` in one, of the rows that the job leaves open. Raises as
    these do; where nothing fits the table is complete."""
    comparison = compare(config, layout, inventory, flops, hardware, engine, only_own=True)
    if is_auto(config) and not any(row.verdict == "fits" for row in comparison.rows):
        comparison = compare(config, layout, inventory, flops, hardware, engine)
    return resolve(comparison, hardware)


@dataclass(frozen=True)
class _Best:
    """A row, and those it was chosen from."""

    row: Row
    fitting: Sequence[Row]
    num_candidates: int
    by_time: bool


def _best(candidates: Sequence[Row], by_time: bool) -> _Best | None:
    """The row to take of those that fit, if any does."""
    fitting = [row for row in candidates if row.verdict == "fits"]
    if not fitting:
        return None
    duration = _durations(fitting) if by_time else dict.fromkeys((row.choice.label for row in fitting), 0.0)
    row = min(
        fitting,
        key=lambda row: (
            duration[row.choice.label],
            row.wire.total,
            row.flops_per_rank or 0,  # where communication hides all of a recomputation, still do without it
            row.footprint.peak_bytes,
        ),
    )
    return _Best(row, fitting, len(candidates), by_time)


def _durations(rows: Sequence[Row]) -> dict[str, float]:
    """By label, what orders rows by the lower bound of their time: it, or FLOPs where a time is unknown, or the kind of
    recomputation where FLOPs are."""
    intervals = [row.time.interval for row in rows]
    if all(intervals):
        return {row.choice.label: interval[0] for row, interval in zip(rows, intervals, strict=True) if interval}
    if all(row.flops_per_rank is not None for row in rows):
        return {row.choice.label: float(row.flops_per_rank or 0) for row in rows}
    return {row.choice.label: _RECOMPUTED[row.choice.recomputation.mode] for row in rows}


_RECOMPUTED = {"none": 0.0, "selective": 1.0, "full": 2.0}


def _reason(best: _Best, hardware: Hardware) -> str:
    what = "the lowest bound of a step's time, then the least traffic," if best.by_time else "the least traffic"
    limit = f"{hardware.memory_gib:.4g} GiB ({hardware.memory_source})"
    reason = (
        f"{best.row.choice.label}: {what} of the {len(best.fitting)} of {best.num_candidates} that fit into {limit}"
    )
    others = [row for row in best.fitting if row is not best.row]
    ties = [row.choice.label for row in others if row.time.ties_with(best.row.time)]
    if best.row.time.interval is None or not ties:
        return reason
    tied = "the others that fit" if len(ties) == len(others) else ", ".join(f'"{label}"' for label in ties)
    return f"{reason}; in time a tie with {tied}"


def _problem_of_auto(config: JobConfig, reason: str) -> Problem:
    section = "gradient_accumulation" if config.gradient_accumulation.mode == "auto" else "activation_checkpoint"
    return Problem((section, "mode"), reason, "auto", also=(("planner",),))


def _why_nothing_fits(comparison: Comparison, hardware: Hardware) -> str:
    own = [row for row in comparison.rows if row.is_own]
    smallest = min(own, key=lambda row: row.reserved_bytes)
    limit = f"{hardware.memory_gib:.4g} GiB ({hardware.memory_source})"
    return (
        f"none of {len(own)} choices fits into {limit}; the smallest, {smallest.choice.label}, would take "
        f"{smallest.reserved_bytes / GIB:.4g} GiB; {'; '.join(_remedies(comparison, own))}\n"
        f"{format_comparison(comparison, hardware)}"
    )


def _remedies(comparison: Comparison, own: Sequence[Row]) -> Iterator[str]:
    others = [row.choice.label for row in comparison.rows if row.verdict == "fits"]
    if others:
        yield f"what fits: {', '.join(others)} (accumulation / recomputation)"
    tight = [row.choice.label for row in own if row.verdict == "tight"]
    if tight:
        yield f"tight ones may run, if the job asks for them: {', '.join(tight)}"
    more = "a smaller training.local_batch_size or seq_len, more training.loss_chunks, more ranks to shard over"
    yield f"{'else' if others or tight else 'remedies'}: {more}, devices with more memory"
