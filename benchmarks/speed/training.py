"""Comparison of the launcher with a bare loop and other tools: step time, throughput, and launch to first step."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.publishing import markdown_table
from benchmarks.speed.contestants import BARE, CONTESTANTS, LAUNCHER
from benchmarks.speed.jobs import Job
from benchmarks.speed.runs import Entry, Run
from benchmarks.speed.summary import paired, spread

ROUNDS = 5
PEER_ROUNDS = 3
_FLASH = "launcher-flash"
_PEERS = ("trainer", "accelerate", "litgpt", "torchtitan")

_GROUPS: dict[str, tuple[Job, tuple[str, ...]]] = {
    "one process, fp32": (Job(precision="float32"), (BARE, LAUNCHER)),
    "one process, bf16": (Job(), (BARE, LAUNCHER, _FLASH, "bare-whole", *_PEERS)),
    "two processes, sharded, fp32": (Job(precision="float32", ranks=2), (BARE, LAUNCHER)),
    "two processes, sharded, bf16": (
        Job(ranks=2),
        (BARE, LAUNCHER, _FLASH, "launcher-agent", "accelerate", "torchtitan"),
    ),
    "two processes, replicated, bf16": (Job(ranks=2, division="replicated"), ("bare-ddp", LAUNCHER, _FLASH, *_PEERS)),
}
"""Job and contestants of each group. The first contestant is the baseline of the others."""


def groups(steps: int | None, installed: Sequence[str]) -> list[list[Entry]]:
    """Return the entries of all groups. `installed`: installed packages of the peers."""
    result = []
    for group, (job, names) in _GROUPS.items():
        entries = []
        for name in names:
            contestant = CONTESTANTS[name]
            division = contestant.division or ("whole" if contestant.package and job.ranks == 1 else job.division)
            own = Job(**vars(job) | {"division": division, "steps": steps or job.steps})
            rounds = None if name in (names[0], LAUNCHER) else PEER_ROUNDS
            if contestant.package is None or contestant.package in installed:
                entries.append(Entry(group, contestant, own, rounds))
        result.append(entries)
    return result


def tables(runs: Sequence[Run]) -> str:
    """Return one Markdown table for each group."""
    parts = []
    for group, (job, names) in _GROUPS.items():
        of_group = [run for run in runs if run.group == group]
        if of_group:
            lines = [f"{heading(group)}, {job.tokens:,} tokens per step:", "", _table(of_group, names)]
            absent = [CONTESTANTS[name].label for name in names if name not in {run.contestant for run in of_group}]
            if absent:
                lines += ["", f"Not installed, or not selected: {', '.join(absent)}."]
            parts.append("\n".join(lines))
    return "\n\n".join(parts)


def heading(group: str) -> str:
    """Return the heading of a group's table."""
    return f"**{group[0].upper()}{group[1:]}**"


def _table(runs: Sequence[Run], names: Sequence[str]) -> str:
    head = ("tool", "rounds", "step, ms", "over baseline", "tokens/s", "launch to first step, s", "over baseline")
    baseline = [run for run in runs if run.contestant == names[0] and not run.failure]
    rows: list[Sequence[str]] = [head]
    for name in names:
        own = [run for run in runs if run.contestant == name]
        if own:
            rows.append(_row(CONTESTANTS[name].label, own, baseline))
    return markdown_table(rows)


def _row(label: str, runs: Sequence[Run], baseline: Sequence[Run]) -> list[str]:
    good = [run for run in runs if not run.failure]
    if not good:
        return [label, "0", f"failed: {runs[0].failure}", *[""] * 4]
    steps = paired(good, baseline, lambda run: run.step_s)
    starts = paired(good, baseline, lambda run: run.first_step_s)
    return [
        label,
        str(len(good)),
        spread(1000 * run.step_s for run in good).cell(".1f"),
        steps.cell(".3f") if steps else "",
        f"{spread(run.job.tokens / run.step_s for run in good).median:,.0f}",
        spread(run.first_step_s for run in good).cell(".2f"),
        starts.cell(".2f") if starts else "",
    ]
