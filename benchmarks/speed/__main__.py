"""Speed of the launcher: tables and plots.

    python -m benchmarks.speed [train] [latency] [accumulation] [scaling] [precision] [compile]
        [--peers PYTHON] [--rounds N] [--steps N] [--only TEXT ...] [--results FILE] [--write FILE.md] [--images FOLDER]

Without the name of a part, all parts run. Every training is a run of its own, with one thread per process. The same
clock times every tool (`clock/sitecustomize.py`). The compared tools take turns.
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
    """A plot below a table."""

    file: str
    title: str
    draw: Callable[[Sequence[Run], Path], None]


WORLDS = Picture("speed_worlds.svg", "Seconds of plan and of a dry run against the number of ranks", plots.plot_worlds)
SCALING = Picture(
    "speed_scaling.svg",
    "Step time against the varied quantity, with straight lines where they are expected",
    plots.plot_scaling,
)


@dataclass(frozen=True)
class Part:
    """One part of the suite: the runs of one table."""

    groups: Callable[[], list[list[Entry]]]
    rounds: int
    tables: Callable[[Sequence[Run]], str]
    picture: Picture | None = None


def parts(options: argparse.Namespace, installed: Sequence[str]) -> dict[str, Part]:
    """Return the parts by name."""
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
    """Run the entries that `only` names, or all if it is empty, and append every run to the results file."""
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
    """Draw a picture into a folder. Return the Markdown that shows it on a page."""
    path = images / picture.file
    picture.draw(runs, path)
    return f"![{picture.title}]({os.path.relpath(path, page.parent if page else '.')})"


def _is_wanted(entry: Entry, only: Sequence[str]) -> bool:
    return not only or any(word in (entry.group, entry.contestant.name) for word in only)


def main() -> None:
    """Run the parts, and publish their tables."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed", description=__doc__.partition("\n")[0] if __doc__ else None
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(NAMES)} (default: all)")
    parser.add_argument("--peers", metavar="PYTHON", help="Python of the environment with the other tools")
    parser.add_argument("--rounds", type=int, help="rounds of each part (default: the part's own number)")
    parser.add_argument("--steps", type=int, help="steps of every training of `train` (default: 8)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run these groups or contestants only")
    parser.add_argument("--results", type=Path, help="file to which one line of JSON per run is appended")
    parser.add_argument("--write", type=Path, help="Markdown file; tables replace the text between its markers")
    parser.add_argument("--images", type=Path, help="folder for the plots")
    options = parser.parse_args()
    unknown = set(options.parts) - set(NAMES)
    if unknown:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; the parts are {', '.join(NAMES)}")
    if options.peers is not None and shutil.which(options.peers) is None:
        parser.error(f"--peers {options.peers}: no such program; give the path of that environment's Python")
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
