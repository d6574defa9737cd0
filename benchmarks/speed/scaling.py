"""Growth of the launcher's step time with width, depth, sequence length, microbatches and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.publishing import markdown_table
from benchmarks.speed.contestants import CONTESTANTS, LAUNCHER
from benchmarks.speed.jobs import Job
from benchmarks.speed.runs import Entry, Run
from benchmarks.speed.summary import Line, fit, spread

ROUNDS = 5
BASE = Job(seq_len=128, steps=5)


@dataclass(frozen=True)
class Axis:
    """One varied quantity. All other settings are those of `BASE`."""

    name: str
    label: str
    jobs: tuple[Job, ...]
    x: Callable[[Job], float]
    """The varied quantity."""

    is_linear: bool = True
    """True if the step time is expected to be linear in `x`."""


def _wide(dim: int) -> Job:
    """Return `BASE` with another width. The head width stays 32, and the feed-forward layer three times `dim`."""
    return replace(BASE, dim=dim, n_heads=dim // 32, n_kv_heads=dim // 64, hidden_dim=3 * dim)


AXES = (
    Axis(
        "width",
        "million parameters of the blocks",
        tuple(map(_wide, (128, 256, 384, 512))),
        lambda job: job.block_parameters / 1e6,
    ),
    Axis("depth", "blocks", tuple(replace(BASE, n_layers=n) for n in (2, 6, 10, 14)), lambda job: job.n_layers),
    Axis(
        "sequence",
        "tokens in a sequence",
        tuple(replace(BASE, seq_len=n) for n in (128, 256, 512, 1024)),
        lambda job: job.seq_len,
        is_linear=False,
    ),
    Axis(
        "microbatches",
        "microbatches",
        tuple(replace(BASE, microbatches=n) for n in (1, 2, 4, 8)),
        lambda job: job.microbatches,
    ),
    Axis(
        "ranks",
        "ranks, of equal work",
        tuple(replace(BASE, ranks=n, sequences=4 * n) for n in (1, 2, 4)),
        lambda job: job.ranks,
        is_linear=False,
    ),
)


def groups() -> list[list[Entry]]:
    """Return one group for each axis."""
    launcher = CONTESTANTS[LAUNCHER]
    return [[Entry(axis.name, launcher, job) for job in axis.jobs] for axis in AXES]


def points(axis: Axis, runs: Sequence[Run]) -> list[tuple[float, float]]:
    """Return, for each job of an axis, x and the median milliseconds of a step."""
    found = []
    for job in axis.jobs:
        own = [run.step_s for run in runs if run.group == axis.name and run.job == job and not run.failure]
        if own:
            found.append((axis.x(job), 1000 * spread(own).median))
    return found


def line(axis: Axis, found: Sequence[tuple[float, float]]) -> Line | None:
    """Return the fitted line; None if the axis is not linear, or if fewer than two points have different x."""
    return fit(found) if axis.is_linear and len({x for x, _ in found}) > 1 else None


def tables(runs: Sequence[Run]) -> str:
    """Return a Markdown table with the points of each axis, and the fitted line of each linear axis."""
    head = ("varied", "x", "step in ms at x", "times the first step", "ms at x = 0", "ms per x", "largest residual")
    rows: list[Sequence[str]] = [head]
    for axis in AXES:
        found = points(axis, runs)
        if not found:
            continue
        values = ", ".join(f"{y:.0f} at {_short(x)}" for x, y in found)
        ratios = ", ".join(f"{y / found[0][1]:.1f}" for _, y in found[1:])
        fitted = line(axis, found)
        figures = ("", "", "")
        if fitted is not None:
            figures = (f"{fitted.intercept:.1f}", f"{fitted.slope:.3g}", f"{100 * fitted.residual:.1f} %")
        rows.append((axis.name, axis.label, values, ratios, *figures))
    return markdown_table(rows)


def _short(x: float) -> str:
    return f"{x:g}" if x == int(x) else f"{x:.3g}"
