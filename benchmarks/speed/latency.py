"""Time of the commands before training: `check`, `plan`, and a dry run in a world of many ranks."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.publishing import markdown_table
from benchmarks.speed.contestants import Contestant
from benchmarks.speed.jobs import Job
from benchmarks.speed.runs import Entry, Run
from benchmarks.speed.summary import fit, spread

ROUNDS = 3
WORLDS = (1, 8, 64, 512)
_LAUNCHER = ("-m", "titan_launch")
_8B = ("--config", "configs/llama3_8b.toml")
_COMMANDS = {
    "`python -c pass`": ("-c", "pass"),
    '`python -c "import torch"`': ("-c", "import torch"),
    "`check`, debug Llama": (*_LAUNCHER, "check", "--config", "{job}"),
    "`check`, 8B on 8 ranks": (*_LAUNCHER, "check", *_8B, "--world-size", "8"),
    "`plan`, debug Llama": (*_LAUNCHER, "plan", "--config", "{job}"),
    "`plan`, 8B on 8 ranks": (*_LAUNCHER, "plan", *_8B, "--world-size", "8"),
}
_BY_WORLD = {
    "plan": (*_LAUNCHER, "plan", "--config", "{job}", "--world-size"),
    "dry run": (*_LAUNCHER, "--config", "{job}", "--fake-world-size"),
}
"""Commands whose last argument is the number of ranks."""

_LABELS = {"plan": "`plan --world-size`", "dry run": "`--fake-world-size`: mesh, units, optimizer and one step"}


def groups() -> list[list[Entry]]:
    """Return the group of single commands, and the group of commands in worlds of several sizes."""
    once = [_entry("commands", name, Job(), words) for name, words in _COMMANDS.items()]
    worlds = [
        _entry(kind, str(world), Job(ranks=world, sequences=world), (*words, str(world)))
        for kind, words in _BY_WORLD.items()
        for world in WORLDS
    ]
    return [once, worlds]


def _entry(group: str, name: str, job: Job, words: tuple[str, ...]) -> Entry:
    return Entry(group, Contestant(name, name, "titan_launch"), job, words=words)


def tables(runs: Sequence[Run]) -> str:
    """Return two Markdown tables with the seconds of a whole process."""
    good = [run for run in runs if not run.failure]
    rows: list[Sequence[str]] = [("command", "s")]
    for name in _COMMANDS:
        values = [run.first_step_s for run in good if run.contestant == name]
        rows += [(name, spread(values).cell(".2f"))] if values else []
    worlds: list[Sequence[str]] = [
        ("command, debug Llama", *(f"{n} rank{'s' if n > 1 else ''}, s" for n in WORLDS), "ms per rank")
    ]
    for kind, label in _LABELS.items():
        points = by_world(good, kind)
        if len(points) == len(WORLDS):
            slope = fit(points).slope
            worlds.append((label, *(f"{seconds:.2f}" for _, seconds in points), f"{1000 * slope:.2f}"))
    return f"{markdown_table(rows)}\n\n{markdown_table(worlds)}"


def by_world(runs: Sequence[Run], kind: str) -> list[tuple[float, float]]:
    """Return, for each number of ranks, the number and the median seconds of a command."""
    points = []
    for world in WORLDS:
        of_world = [run for run in runs if (run.group, run.contestant) == (kind, str(world)) and not run.failure]
        if of_world:
            points.append((float(world), spread(run.first_step_s for run in of_world).median))
    return points
