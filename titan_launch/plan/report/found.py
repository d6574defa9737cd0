"""The result of `plan --search`: as text, as data for JSON, and as a job file. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

from titan_launch.config.axes import MODEL_AXES, PIPELINE, Axis
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.core.terminal import aligned
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.report.table import format_gib
from titan_launch.plan.search import SEARCHED, Found, Result, value_of


def _degree(axis: Axis, job: Found) -> str:
    schedule = job.kind.schedule if axis is PIPELINE else ""
    return f"{job.layout.degree(axis)} {schedule}".rstrip()


_COLUMNS: tuple[tuple[str, Callable[[Found], str]], ...] = (
    ("step s", lambda job: "~{:.3g} ({:.3g} .. {:.3g})".format(job.seconds, *(job.row.time.interval or (0, 0)))),
    ("reserved GiB", lambda job: f"~{format_gib(job.row.reserved_bytes)}"),
    *((axis.short.upper(), partial(_degree, axis)) for axis in MODEL_AXES),
    (
        "replicas x shards",
        lambda job: f"{job.layout.replicate} x {job.layout.shard}" + " *" * job.layout.shards_optimizer,
    ),
    ("microbatches", lambda job: f"{job.layout.num_microbatches} of {job.layout.local_batch_size}"),
    ("checkpointing", lambda job: job.row.choice.activation_checkpoint.label),
    ("accumulation", lambda job: job.row.choice.accumulation.label),
    ("loss chunks", lambda job: str(job.config.loss.chunks)),
)
_AXES = {axis.short.upper(): axis.name for axis in MODEL_AXES}
_MEANINGS = {
    "step s": "expected time (shortest .. longest); expected: computation and collectives run in the order of FSDP2",
    "reserved GiB": "estimated memory that the process of one rank takes from the device",
    " ".join(_AXES): f"degrees of {', '.join(_AXES.values())} parallelism",
    "replicas x shards": "*: the optimizer is sharded over the replicas",
    "microbatches": "microbatches of a step, and samples of each",
}


def format_result(result: Result, hardware: Hardware) -> str:
    """Return the result as text: the parts of the best job's step time, a table of the best jobs, and the number of
    planned layouts. If no job fits, the text has only this number and the reason."""
    best = result.best
    counts = f"{result.tried} of {result.families} layouts were planned"
    counts += "; the others do not fit or cannot be faster." if result.tried < result.families else "."
    if refused := sum(result.refused.values()):
        most = max(result.refused, key=lambda reason: result.refused[reason])
        counts += f" {refused} more {'is' if refused == 1 else 'are'} not possible; the most frequent reason: {most}."
    if not best:
        fits = f"fits into {hardware.memory_gib:.4g} GiB per rank with the margin"
        return f"No layout {fits if result.families else 'is possible'}.\n{counts}"
    lines = [[title, *(cell(job) for job in best)] for title, cell in _COLUMNS]
    table = "\n".join(aligned(list(zip(*lines, strict=True))))
    legend = "\n".join(aligned([(f"{name}:", text) for name, text in _MEANINGS.items()]))
    return f"{_reason(best)}\n\n{table}\n\n{legend}\n\n{counts}"


def _reason(best: tuple[Found, ...]) -> str:
    first, time = best[0], best[0].row.time
    assert time.compute is not None and time.communication is not None
    parts = [f"computation {time.compute - time.bubble:.3g} s"]
    parts += [f"pipeline bubble {time.bubble:.3g} s"] * (time.bubble > 0)
    exposed = ", ".join(axis.name for axis in MODEL_AXES if axis.delays_computation)
    parts += [f"exposed communication ({exposed} parallelism) {time.exposed:.3g} s"] * (time.exposed > 0)
    rest, waits = time.communication - time.exposed, first.seconds - time.compute - time.exposed
    hidden = "overlaps with computation" + ("" if waits < 0.01 * first.seconds else f" except for {waits:.3g} s")
    what = "the rest of the communication" if time.exposed > 0 else "communication"
    parts += [f"{what}, {rest:.3g} s, {hidden}"] * (rest > 0)
    lead = ""
    if len(best) > 1:
        share = 100 * (best[1].seconds / first.seconds - 1)
        longer = f"{share:.2g} % longer" if share >= 0.1 else "as long"
        lead = f" The next-best layout takes {longer}."
    samples = first.layout.global_batch_size / first.seconds
    return f"Best: ~{first.seconds:.3g} s per step, ~{samples:.3g} samples/s: {'; '.join(parts)}.{lead}"


def describe_result(result: Result) -> dict[str, Any]:
    """Return the results for JSON."""
    return {
        "tried": result.tried,
        "layouts": result.families,
        "refused": dict(result.refused),
        "best": [
            {
                "seconds": job.seconds,
                "interval": job.row.time.interval,
                "active_bytes": job.row.footprint.peak_bytes,
                "reserved_bytes": job.row.reserved_bytes,
                "layout": asdict(job.layout),
                "keys": {".".join(key): value_of(job.config, key) for key in SEARCHED},
            }
            for job in result.best
        ],
    }


def overlay(base: JobConfig | None, config: JobConfig, extends: str) -> str:
    """Return the text of a job file for `config` that extends the file `extends`. `base`: the job of this file; None if
    the file is not a valid job without overrides. If `base` is None, return a complete job file instead. Do the same if
    `base` sets a key that `config` leaves unset, because `extends` cannot unset keys."""
    try:
        if base is None:
            raise _UnsetError
        lines, tables = [f"extends = {toml_value(extends)}"], list(_tables(base, config))
    except _UnsetError:
        lines, tables = [], list(_tables(None, config))
    lines += [line for name, keys in tables for line in ("", f"[{name}]", *keys)]
    return "\n".join([*lines, ""]).lstrip("\n")


class _UnsetError(ValueError):
    """Raised if the base job is not valid, or sets a key that the found job leaves unset."""


def _tables(base: JobConfig | None, config: JobConfig) -> Iterator[tuple[str, list[str]]]:
    """Yield the sections that differ, each with its changed keys. `base`: None for an empty job file. Raises
    _UnsetError if `base` sets a key that `config` leaves unset."""
    before, after = (job.model_dump(mode="json", exclude_none=True) for job in (base or JobConfig(), config))
    for section, table in after.items():
        own = before[section]
        if "kind" in table and own.get("kind") != table["kind"]:
            own = {}  # for another kind, all keys of the section are new
        elif base is not None and own.keys() - table.keys():
            raise _UnsetError
        changed = {key: value for key, value in table.items() if own.get(key) != value}
        if not changed.get("keep_params_unsharded", True) and not own.get("keep_params_unsharded"):
            del changed["keep_params_unsharded"]  # unset and false are the same for a mode that is not `auto`
        if changed:
            yield section, [f"{key} = {toml_value(value)}" for key, value in changed.items()]
