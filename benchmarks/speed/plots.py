"""Plots of step time and command time against size."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.speed.latency import WORLDS, by_world
from benchmarks.speed.runs import Run
from benchmarks.speed.scaling import AXES, line, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_METADATA: dict[str, Any] = {"Date": None}


def check_matplotlib() -> None:
    """End with an error if matplotlib is not installed. Call this before the measurements."""
    if find_spec("matplotlib") is None:
        raise SystemExit("error: --images needs matplotlib: pip install matplotlib, or drop --images")


def plot_scaling(runs: Sequence[Run], path: Path) -> None:
    """Plot the step time along every axis, with the fitted straight line if the axis is linear."""
    from matplotlib.figure import Figure  # unlike pyplot, this does not need a display

    figure = Figure(figsize=(3 * len(AXES), 3), layout="constrained")
    for axes, axis in zip(figure.subplots(1, len(AXES)), AXES, strict=True):
        found = points(axis, runs)
        axes.plot([x for x, _ in found], [y for _, y in found], "o", color="tab:blue")
        fitted = line(axis, found)
        if fitted is not None:
            ends = [0.0, max(x for x, _ in found)]
            axes.plot(ends, [fitted(x) for x in ends], color="0.6", zorder=0)
        axes.set(title=axis.name, xlabel=axis.label, ylim=(0, None), xlim=(0, None))
    figure.axes[0].set_ylabel("ms per step")
    _save(figure, path)


def plot_worlds(runs: Sequence[Run], path: Path) -> None:
    """Plot the seconds of a plan and of a dry run against the number of ranks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3), layout="constrained")
    axes = figure.add_subplot()
    for kind in ("plan", "dry run"):
        found = by_world(runs, kind)
        axes.plot([world for world, _ in found], [seconds for _, seconds in found], "o-", label=kind)
    axes.set_xscale("log", base=2)
    axes.set_xticks(WORLDS, [str(world) for world in WORLDS])
    axes.set(xlabel="ranks", ylabel="s", ylim=(0, None))
    axes.legend()
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata=_METADATA if path.suffix == ".svg" else None)
