"""The comparison of recorded runs: differences of the configuration, figures, and limits for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.resume_compatibility import differences, role_of
from titan_launch.core.errors import KeyPath, UserError, format_key
from titan_launch.core.terminal import aligned, one_line
from titan_launch.report.charts import Bar, Points, bar_chart, line_chart, text_chart, value_at, without_end
from titan_launch.report.figures import (
    LOSS,
    STEP_SECONDS,
    VALIDATION_LOSS,
    change,
    difference_of_curves,
    loss_axis,
    loss_curve,
    memory_peaks,
    part_colors,
    speed_tag,
    speed_unit,
    spread,
    time_parts,
)
from titan_launch.report.page import charts, folded, page, paragraphs, section, table
from titan_launch.report.recorded_run import RecordedRun

_MOST_KEYS = 20
"""Largest number of keys with different values that a page shows without a click."""


@dataclass(frozen=True)
class Line:
    """One figure of the comparison, such as the median speed, for all runs."""

    name: str
    values: tuple[float | None, ...]
    """The figure of each run; None if a run does not have the figure."""

    cells: tuple[str, ...]
    """The figure of each run as text, with its quartiles if it is a median."""

    is_change_relative: bool = True
    """True if a change is shown in percent, False if it is shown as a difference."""

    def changes(self) -> list[str]:
        """Return the change from the first run's figure to each other run's figure, as text; "" if a figure is missing
        or not finite."""
        return [self._change(value) for value in self.values[1:]]

    def _change(self, value: float | None) -> str:
        first = self.values[0]
        if value is None or first is None or not math.isfinite(value - first):
            return ""
        return change(value, first) if self.is_change_relative else f"{value - first:+.3g}"


class Comparison:
    """Two or more runs. The first is the reference."""

    def __init__(self, runs: Sequence[RecordedRun]):
        self.runs = runs
        self.names = _distinct_names(runs)
        """Names of the runs, all different."""

        self.keys = dict(_different_keys(runs))
        """Keys of the configuration that differ, with the value of each run; None for a key that is unset. Keys that
        change the model or the result come first. The last entry is the number of ranks, if it differs."""

        self.axis = loss_axis(runs)
        """The axis over which losses are compared: `step`, `tokens` or `images`."""

        self.step = max(set.intersection(*({step for step, _ in run.values(LOSS)} for run in runs)), default=None)
        """The last step for which all runs have reported a training loss; None if there is no such step."""

        self.lines = [line for line in _lines(self) if any(value is not None for value in line.values)]
        """The figures. Loss and speed come first."""

        common = set.intersection(*(set(run.tags) for run in runs))
        found = {name: sorted({*run.tags} - common) for name, run in zip(self.names, runs, strict=True)}
        self.only_in_some = {name: tags for name, tags in found.items() if tags}
        """For each run, by name: its metrics that at least one other run lacks. Runs without such metrics are
        omitted."""

    def loss_differences(self, tag: str) -> dict[str, Points]:
        """Return a series for each run but the first, by name: its loss `tag` minus that of the first run, over `axis`.
        Runs without a point in the range of the first run are omitted."""
        reference, *others = (loss_curve(run, tag, self.axis) for run in self.runs)
        found = zip(self.names[1:], others, strict=True)
        return {name: points for name, curve in found if (points := difference_of_curves(curve, reference))}

    def as_text(self) -> str:
        letters = [chr(ord("A") + index) for index in range(len(self.runs))]
        where = [
            f"{letter} = {one_line(str(run.folder))}: {run.state}, step {_progress(run)}"
            for letter, run in zip(letters, self.runs, strict=True)
        ]
        named = [f"{letter}: {name}" for letter, name in zip(letters, self.names, strict=True)]
        rows = [[f"  {key}", *(_short(value) for value in values)] for key, values in self.keys.items()]
        keys = [f"{self._num_keys()}", *(aligned([["", *named], *rows]) if rows else [])]
        head = ["", *letters, *(f"{letter} against A" for letter in letters[1:])]
        figures = aligned([head, *([line.name, *line.cells, *line.changes()] for line in self.lines)])
        only = [
            f"only in {letter}: {one_line(', '.join(self.only_in_some[name]))}"
            for letter, name in zip(letters, self.names, strict=True)
            if name in self.only_in_some
        ]
        return "\n".join([*keys, *where, *figures, *self._difference_as_text(letters), *only])

    def _num_keys(self) -> str:
        count = len(self.keys)
        return f"configuration: {count or 'no'} different {'key' if count == 1 else 'keys'}"

    def _difference_as_text(self, letters: Sequence[str]) -> list[str]:
        """Return the differences of the training loss as a chart, in which each run is drawn with its letter; [] if no
        difference is known."""
        curves = self.loss_differences(LOSS)
        letter_of = dict(zip(self.names, letters, strict=True))
        title = f"training loss of {', '.join(letter_of[name] for name in curves)} minus that of A"
        if curves and not any(value for points in curves.values() for _, value in points):
            return [f"{title}: 0 everywhere"]
        lines = text_chart({letter_of[name]: points for name, points in curves.items()}, self.axis)
        return [f"{title}:", *lines] if lines else []

    def as_data(self) -> dict[str, Any]:
        return {
            "runs": [
                {
                    "folder": str(run.folder),
                    "state": run.state,
                    "step": run.last_step,
                    "steps": run.total_steps,
                    "best_step": run.best_step,
                }
                for run in self.runs
            ],
            "configuration": {key: list(values) for key, values in self.keys.items()},
            "last_common_step": self.step,
            "figures": {line.name: list(line.values) for line in self.lines},
            "loss_differences": {"axis": self.axis, "runs": self.loss_differences(LOSS)},
            "time_parts_seconds": [time_parts(run) for run in self.runs],
            "only_in_some_runs": self.only_in_some,
        }

    def as_page(self) -> str:
        states = [
            (name, one_line(str(run.folder)), run.state, _progress(run))
            for name, run in zip(self.names, self.runs, strict=True)
        ]
        keys = [(key, *(_short(value, 200) for value in values)) for key, values in self.keys.items()]
        figures = [(line.name, *line.cells, *line.changes()) for line in self.lines]
        against = [f"{name} against {self.names[0]}" for name in self.names[1:]]
        tags = dict.fromkeys(tag for run in self.runs for tag in run.tags)
        speeds = dict.fromkeys(filter(None, map(speed_tag, self.runs)))
        main = [tag for tag in (LOSS, VALIDATION_LOSS, *speeds) if tag in tags]
        title = " and ".join(self.names)
        only = [(name, ", ".join(missing)) for name, missing in self.only_in_some.items()]
        head = ("key", *self.names)
        reason = f"The runs differ in the {self.axis} per step, so their losses are compared over {self.axis}."
        return page(
            title,
            [
                f"<h1>{escape(title)}</h1>",
                section(
                    self._num_keys().capitalize(),
                    table(head, keys[:_MOST_KEYS], "marked"),
                    folded(f"{len(keys) - _MOST_KEYS} more keys", table(head, keys[_MOST_KEYS:])),
                ),
                section("Runs", table(("run", "folder", "state", "step"), states)),
                section("Figures", table(("figure", *self.names, *against), figures)),
                section("Loss", paragraphs([] if self.axis == "step" else [reason]), charts(self._loss_charts())),
                section("Speed", charts(line_chart(speed_unit(tag), self._curves(tag)) for tag in speeds)),
                section("Where the time of a step goes", self._times()),
                section("Metrics that only some runs have", table(("run", "metrics"), only)),
                folded(
                    "All metrics",
                    charts(line_chart(tag, self._curves(tag), has_hover=False) for tag in tags if tag not in main),
                ),
            ],
        )

    def _loss_charts(self) -> Iterator[str]:
        for name, tag in (("training loss", LOSS), ("validation loss", VALIDATION_LOSS)):
            curves = {
                label: loss_curve(run, tag, self.axis)
                for label, run in zip(self._labels(), self.runs, strict=True)
                if tag in run.tags
            }
            if curves:
                yield line_chart(name, curves, self.axis)
            if differences := self.loss_differences(tag):
                minus = {f"{other} minus {self.names[0]}": points for other, points in differences.items()}
                yield line_chart(f"difference of the {name}", minus, self.axis, is_difference=True)

    def _labels(self) -> list[str]:
        """Return the names of the runs. If only one key differs, each name contains the run's value of this key."""
        if len(self.keys) != 1:
            return self.names
        ((key, values),) = self.keys.items()
        return [f"{name} ({key} = {_short(value)})" for name, value in zip(self.names, values, strict=True)]

    def _times(self) -> str:
        parts = {name: found for name, run in zip(self.names, self.runs, strict=True) if (found := time_parts(run))}
        bars = [Bar(f"{name}: {sum(found.values()):.4g} s", found) for name, found in parts.items()]
        colors = part_colors({part for found in parts.values() for part in found})
        return bar_chart("mean time of a step and of the pauses after it (s)", bars, "s", colors)

    def _curves(self, tag: str) -> dict[str, Points]:
        found = zip(self._labels(), self.runs, strict=True)
        return {label: run.values(tag) for label, run in found if tag in run.tags}

    def slower(self, percent: float) -> list[str]:
        """Return a sentence for each run whose median speed is unknown, or more than `percent` below that of the first
        run. If the speed of the first run is unknown, return a sentence for each other run. Raises UserError if a run
        reports no speed, or if the runs report different kinds of speed."""
        tags = [speed_tag(run) for run in self.runs]
        if None in tags or len({*tags}) > 1:
            kinds = ", ".join(f"{name}: {tag or 'none'}" for name, tag in zip(self.names, tags, strict=True))
            raise UserError(f"error: --fail-if-slower: all runs must report the same metric of speed ({kinds})")
        lines = [line for line in self.lines if tags[0] is not None and line.name == speed_unit(tags[0])]
        if not lines:
            return [f"{name} has no finite speed" for name in self.names]
        line = lines[0]
        first = line.values[0]
        return [
            f"{name} is slower than {self.names[0]} by more than {percent:g} %: {shown}"
            for name, value, shown in zip(self.names[1:], line.values[1:], line.changes(), strict=True)
            if value is None or first is None or not value >= first * (1 - percent / 100)
        ]

    def loss_differs(self, limit: float) -> list[str]:
        """Return a sentence for each run whose loss at the last common step is not finite, or differs by more than
        `limit` from that of the first run. Raises UserError if the runs have no loss at a common step."""
        if self.step is None:
            raise UserError("error: --fail-if-loss-differs: the runs have no loss at a common step")
        losses = [dict(run.values(LOSS))[self.step] for run in self.runs]
        return [
            f"the loss of {name} at step {self.step} differs from that of {self.names[0]} by more than {limit:g}: "
            f"{loss:.6g} and {losses[0]:.6g}"
            for name, loss in zip(self.names[1:], losses[1:], strict=True)
            if not abs(loss - losses[0]) <= limit
        ]


def _progress(run: RecordedRun) -> str:
    best = "" if run.best_step is None else f", best step {run.best_step}"
    return f"{run.last_step} of {run.total_steps}{best}"


def _distinct_names(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the shortest ends of the folders' paths that are all different. Raises UserError for equal folders."""
    parts = [run.folder.resolve().parts for run in runs]
    for length in range(1, max(map(len, parts)) + 1):
        names = [one_line(str(Path(*path[-length:]))) for path in parts]
        if len({*names}) == len(names):
            return names
    raise UserError(f"error: {runs[0].folder}: the same run is named twice; name different runs")


def _different_keys(runs: Sequence[RecordedRun]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    changed: dict[KeyPath, dict[int, Any]] = {}
    for index, run in enumerate(runs[1:], start=1):
        for difference in differences(runs[0].config, run.config):
            if difference.key not in (("job", "name"), ("job", "dump_folder")):  # they usually differ
                found = changed.setdefault(difference.key, dict.fromkeys(range(len(runs)), difference.was))
                found[index] = difference.now
    for key in sorted(changed, key=lambda key: (role_of(key) == "operation", format_key(key))):
        yield format_key(key), tuple(changed[key].values())
    ranks = tuple(run.num_ranks for run in runs)
    if len({*ranks}) > 1:
        yield "number of ranks", ranks


def _lines(comparison: Comparison) -> Iterator[Line]:
    runs, step, axis = comparison.runs, comparison.step, comparison.axis
    curves = [loss_curve(run, LOSS, axis) for run in runs]
    if axis != "step" and all(curves) and max(curve[0][0] for curve in curves) <= min(curve[-1][0] for curve in curves):
        place = min(curve[-1][0] for curve in curves)
        yield _exact(f"loss at {place:,.0f} {axis}", [value_at(curve, place) for curve in curves], False)
    if step is not None:
        yield _exact(f"loss at step {step}", [dict(run.values(LOSS))[step] for run in runs], False)
    for tag in dict.fromkeys(filter(None, map(speed_tag, runs))):
        yield _median(speed_unit(tag), tag, runs, "{:,.0f}")
    yield _median("seconds per step", STEP_SECONDS, runs, "{:.4g}")
    if step is None:
        yield _exact("last loss", [run.last(LOSS) for run in runs], False)
    for name, tag in (("last validation loss", VALIDATION_LOSS), ("last accuracy", "validation/accuracy")):
        yield _exact(name, [run.last(tag) for run in runs], False)
    yield _median("gradient norm", "train/grad_norm", runs, "{:.4g}")
    yield _median("MFU in %", "throughput/mfu_percent", runs, "{:.1f}")
    peaks = [memory_peaks(run) for run in runs]
    for tag in dict.fromkeys(tag for one in peaks for tag in one):
        name = tag.partition("/")[2].removesuffix("_gib").replace("_", " ")
        yield _exact(f"{name} in GiB", [one.get(tag) for one in peaks], True)
    for name, tag in (("skipped steps", "train/skipped_steps"), ("rollbacks", "train/rollbacks")):
        counts = [run.last(tag) for run in runs]
        if any(counts):
            yield _exact(name, counts, False, "{:.0f}")


def _exact(name: str, values: Sequence[float | None], is_change_relative: bool, pattern: str = "{:.6g}") -> Line:
    cells = ("-" if value is None else pattern.format(value) for value in values)
    return Line(name, tuple(values), tuple(cells), is_change_relative)


def _median(name: str, tag: str, runs: Sequence[RecordedRun], pattern: str) -> Line:
    found = [spread(run.steady(tag)) for run in runs]
    cells = ("-" if one is None else one.format(pattern) for one in found)
    return Line(name, tuple(None if one is None else one.median for one in found), tuple(cells))


def _short(value: Any, longest: int = 40) -> str:
    return without_end("unset" if value is None else toml_value(value), longest)
