"""Statistics of runs: medians, ranges, paired ratios and fitted lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, median, quantiles

from benchmarks.speed.runs import Run


@dataclass(frozen=True)
class Spread:
    """Median and range of the values of one or several rounds."""

    median: float
    least: float
    most: float
    rounds: int

    def cell(self, form: str) -> str:
        """Return the median as text, and the range if there are several rounds."""
        if self.rounds == 1:
            return f"{self.median:{form}}"
        return f"{self.median:{form}} ({self.least:{form}} to {self.most:{form}})"


def spread(values: Iterable[float]) -> Spread:
    """Return the median, minimum and maximum of at least one value."""
    known = list(values)
    return Spread(median(known), min(known), max(known), len(known))


def quartiles(values: Iterable[float]) -> Spread:
    """Return the median of at least two values, with the quartiles instead of minimum and maximum."""
    known = list(values)
    low, middle, high = quantiles(known, n=4)
    return Spread(middle, low, high, len(known))


def paired(runs: Sequence[Run], baseline: Sequence[Run], value: Callable[[Run], float]) -> Spread | None:
    """Return the ratios of `value` to the baseline's value in the same round; None if no round has both."""
    by_round = {run.round: value(run) for run in baseline}
    ratios = [value(run) / by_round[run.round] for run in runs if run.round in by_round]
    return spread(ratios) if ratios else None


@dataclass(frozen=True)
class Line:
    """A line fitted by least squares: y = intercept + slope * x."""

    intercept: float
    slope: float
    residual: float
    """The largest distance of a point from the line, relative to the point."""

    def __call__(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """Fit a line to points, of which at least two have different x."""
    mean_x, mean_y = mean(x for x, _ in points), mean(y for _, y in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
    intercept = mean_y - slope * mean_x
    return Line(intercept, slope, max(abs(y - intercept - slope * x) / y for x, y in points))
