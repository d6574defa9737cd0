"""How fast the launcher is: tables and plots.

    python -m benchmarks.speed [train] [latency] [accumulation] [scaling] [precision] [compile]
        [--peers PYTHON] [--rounds N] [--steps N] [--only TEXT ...] [--results FILE] [--write FILE.md] [--images FOLDER]

Without a part: all of them. Every training is a run of its own from its launch on, with one thread per process, and
every tool is timed by the same clock (`clock/sitecustomize.py`). What is compared is run in turns.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.publishing import publish
from benchmarks.speed import compilation, latency, plots, scaling, training, variants
from benchmarks.speed.contestants import Environments
from benchmarks.speed.machine import machine_line
from benchmarks.speed.runs import Entry, Run, interleaved, run, say

NAMES = ("train", "latency", "accumulation", "scaling", "precision", "compile")


@dataclass(frozen=True)
class Picture:
    """What goes with a table."""

    file: str
    title: str
    draw: Callable[[Sequence[Run], Path], None]


WORLDS = Picture("speed_worlds.svg", "Seconds of plan and of a dry run against the number of ranks", plots.plot_worlds)
SCALING = Picture("speed_scaling.svg", "Step time against what is varied, with straight lines", plots.plot_scaling)


@dataclass(frozen=True)
class Part:
    """One question to the clock."""

    groups: Callable[[], list[list[Entry]]]
    rounds: int
    tables: Callable[[Sequence[Run]], str]
    picture: Picture | None = None


def parts(options: argparse.Namespace, installed: Sequence[str]) -> dict[str, Part]:
    """By name."""
    return {
        "train": Part(partial(training.groups, options.steps, installed), training.ROUNDS, training.tables),
        "latency": Part(latency.groups, latency.ROUNDS, latency.tables, WORLDS),
        "accumulation": Part(variants.accumulation_groups, variants.ACCUMULATION_ROUNDS, variants.accumulation_tables),
        "scaling": Part(scaling.groups, scaling.ROUNDS, scaling.tables, SCALING),
        "precision": Part(variants.precision_groups, variants.PRECISION_ROUNDS, variants.precision_tables),
        "compile": Part(compilation.groups, compilation.ROUNDS, compilation.tables),
    }


def measure(
    part: Part, rounds: int, only: Sequence[str], environments: Environments, results: Path | None
) -> list[Run]:
    """Run what `only` names (all, where it is empty) and add every run to the results."""
    groups = [[entry for entry in group if _is_wanted(entry, only)] for group in part.groups()]
    runs = []
    for turn, entry in interleaved([group for group in groups if group], rounds):
        result = run(entry, turn, environments)
        say(result)
        runs.append(result)
        if results is not None:
            with results.open("a") as file:
                file.write(result.dump() + "\n")
    return runs


def draw(picture: Picture, runs: Sequence[Run], images: Path, page: Path | None) -> str:
    """Draw a picture into a folder. Returns what shows it on a page of Markdown."""
    path = images / picture.file
    picture.draw(runs, path)
    return f"![{picture.title}]({os.path.relpath(path, page.parent if page else '.')})"


def _is_wanted(entry: Entry, only: Sequence[str]) -> bool:
    return not only or any(word in (entry.group, entry.contestant.name) for word in only)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(NAMES)}; without one: all")
    parser.add_argument("--peers", metavar="PYTHON", help="of the environment with the other tools")
    parser.add_argument("--rounds", type=int, help="instead of each part's own number")
    parser.add_argument("--steps", type=int, help="of every training of `train`, instead of 8")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="groups, or contestants")
    parser.add_argument("--results", type=Path, help="file for a line of JSON about every run; lines are added")
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    parser.add_argument("--images", type=Path, help="folder for the plots")
    options = parser.parse_args()
    unknown = set(options.parts) - set(NAMES)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.peers is not None and shutil.which(options.peers) is None:
        parser.error(f"--peers {options.peers}: there is no such program; name the Python of that environment")
    if options.images is not None:
        plots.check_matplotlib()
    environments = Environments(peers=options.peers)
    line = machine_line(environments)
    installed = list(environments.versions())
    for name, part in parts(options, installed).items():
        if options.parts and name not in options.parts:
            continue
        runs = measure(part, options.rounds or part.rounds, options.only, environments, options.results)
        text = f"{line}\n\n{part.tables(runs)}"
        if part.picture is not None and options.images is not None:
            text += f"\n\n{draw(part.picture, runs, options.images, options.write)}"
        publish(text, f"speed-{name}", options.write)


if __name__ == "__main__":
    main()
