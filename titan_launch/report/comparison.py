"""The comparison of recorded runs: differences of the configuration, figures, and limits for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase
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
    memory_peaks,
    part_colors,
    speed_tag,
    speed_unit,
    spread,
    time_parts,
)
from titan_launch.report.page import charts, folded, page, paragraphs, section, table
from titan_launch.report.recorded_run import RecordedRun

_SAMPLES = "train/samples_seen"

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


class RunComparison:
    """A comparison of two or more runs. The first run is the reference."""

    def __init__(self, runs: Sequence[RecordedRun]):
        self.runs = dict(zip(_distinct_names(runs), runs, strict=True))
        """The runs by their names, which are all different."""

        self.reference, *self.others = self.runs
        """The name of the first run, and the names of the others."""

        self.keys = dict(_different_keys(runs))
        """Keys of the configuration that differ, with the value of each run; None for a key that is unset. Keys that
        change the model or the result come first. The last entry is the number of ranks, if it differs."""

        self.axis = _loss_axis(runs)
        """The axis over which losses are compared: `step`, `tokens` or `images`."""

        self.step = max(set.intersection(*({step for step, _ in run.values(LOSS)} for run in runs)), default=None)
        """The last step for which all runs have reported a training loss; None if there is no such step."""

        self.lines = [line for line in _lines(runs, self.step, self.axis) if {*line.values} != {None}]
        """The figures that at least one run has. Loss and speed come first."""

        common = set.intersection(*(set(run.tags) for run in runs))
        found = {name: sorted({*run.tags} - common) for name, run in self.runs.items()}
        self.only_in_some = {name: tags for name, tags in found.items() if tags}
        """For each run, by name: its metrics that at least one other run lacks. Runs without such metrics are
        omitted."""

    def loss_differences(self, tag: str) -> dict[str, Points]:
        """Return a series for each run but the first, by name: its loss `tag` minus that of the first run, over `axis`.
        Runs without a point in the range of the first run are omitted."""
        curves = {name: _loss_curve(run, tag, self.axis) for name, run in self.runs.items()}
        found = {name: _difference_of_curves(curves[name], curves[self.reference]) for name in self.others}
        return {name: points for name, points in found.items() if points}

    def as_text(self) -> str:
        # A, B, ... Z, a, b, ... z, A1, B1, ...
        alphabet = ascii_uppercase + ascii_lowercase
        letters = {name: alphabet[index % 52] + str(index // 52 or "") for index, name in enumerate(self.runs)}
        where = [
            f"{letters[name]} = {one_line(str(run.folder))}: {run.state}, step {_progress(run)}"
            for name, run in self.runs.items()
        ]
        named = [f"{letter}: {name}" for name, letter in letters.items()]
        rows = [[f"  {key}", *(_short(value) for value in values)] for key, values in self.keys.items()]
        keys = [self._num_keys(), *(aligned([["", *named], *rows]) if rows else [])]
        head = ["", *letters.values(), *(f"{letters[name]} against A" for name in self.others)]
        figures = aligned([head, *([line.name, *line.cells, *line.changes()] for line in self.lines)])
        only = [f"only in {letters[name]}: {one_line(', '.join(tags))}" for name, tags in self.only_in_some.items()]
        return "\n".join([*keys, *where, *figures, *self._difference_as_text(letters), *only])

    def _num_keys(self) -> str:
        count = len(self.keys)
        return f"configuration: {count or 'no'} different {'key' if count == 1 else 'keys'}"

    def _difference_as_text(self, letters: Mapping[str, str]) -> list[str]:
        """Return the differences of the training loss as a chart, in which each run is drawn with its letter; [] if no
        difference is known."""
        curves = {letters[name]: points for name, points in self.loss_differences(LOSS).items()}
        title = f"training loss of {', '.join(curves)} minus that of A"
        if curves and not any(value for points in curves.values() for _, value in points):
            return [f"{title}: 0 everywhere"]
        lines = text_chart(curves, self.axis)
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
                for run in self.runs.values()
            ],
            "configuration": {key: list(values) for key, values in self.keys.items()},
            "last_common_step": self.step,
            "figures": {line.name: list(line.values) for line in self.lines},
            "loss_differences": {"axis": self.axis, "runs": self.loss_differences(LOSS)},
            "time_parts_seconds": [time_parts(run) for run in self.runs.values()],
            "only_in_some_runs": self.only_in_some,
        }

    def as_page(self) -> str:
        names, runs = [*self.runs], self.runs.values()
        states = [(name, one_line(str(run.folder)), run.state, _progress(run)) for name, run in self.runs.items()]
        keys = [(key, *(_short(value, 200) for value in values)) for key, values in self.keys.items()]
        figures = [(line.name, *line.cells, *line.changes()) for line in self.lines]
        against = [f"{name} against {self.reference}" for name in self.others]
        tags = dict.fromkeys(tag for run in runs for tag in run.tags)
        speeds = dict.fromkeys(filter(None, map(speed_tag, runs)))
        main = [tag for tag in (LOSS, VALIDATION_LOSS, *speeds) if tag in tags]
        title = " and ".join(names)
        only = [(name, ", ".join(missing)) for name, missing in self.only_in_some.items()]
        head = ("key", *names)
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
                section("Figures", table(("figure", *names, *against), figures)),
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
            if curves := {label: _loss_curve(run, tag, self.axis) for label, run in self._labelled(tag)}:
                yield line_chart(name, curves, self.axis)
            if differences := self.loss_differences(tag):
                minus = {f"{other} minus {self.reference}": points for other, points in differences.items()}
                yield line_chart(f"difference of the {name}", minus, self.axis, is_difference=True)

    def _labelled(self, tag: str) -> Iterator[tuple[str, RecordedRun]]:
        """Yield the runs with the metric `tag`, each with its name. If only one key differs, the name contains the
        run's value of this key."""
        only = self.keys.items() if len(self.keys) == 1 else ()
        for index, (name, run) in enumerate(self.runs.items()):
            if tag in run.tags:
                yield name + "".join(f" ({key} = {_short(values[index])})" for key, values in only), run

    def _times(self) -> str:
        parts = {name: found for name, run in self.runs.items() if (found := time_parts(run))}
        bars = [Bar(f"{name}: {sum(found.values()):.4g} s", found) for name, found in parts.items()]
        colors = part_colors({part for found in parts.values() for part in found})
        return bar_chart("mean time of a step and of the pauses after it (s)", bars, "s", colors)

    def _curves(self, tag: str) -> dict[str, Points]:
        return {label: run.values(tag) for label, run in self._labelled(tag)}

    def slower(self, percent: float) -> list[str]:
        """Return a sentence for each run whose median speed is unknown, or more than `percent` below that of the first
        run. If the speed of the first run is unknown, return a sentence for each other run. If no run has a finite
        speed, return a sentence for each run. Raises UserError if a run reports no speed, or if the runs report
        different kinds of speed."""
        tags = {name: speed_tag(run) for name, run in self.runs.items()}
        tag = tags[self.reference]
        if tag is None or len({*tags.values()}) > 1:
            kinds = ", ".join(f"{name}: {tag or 'none'}" for name, tag in tags.items())
            reason = f"all runs must report the same metric of speed ({kinds}); remove this option"
            raise UserError(f"error: --fail-if-slower: {reason}")
        line = next((line for line in self.lines if line.name == speed_unit(tag)), None)
        if line is None:
            return [f"{name} has no finite speed" for name in self.runs]
        first = line.values[0]
        return [
            f"{name} is slower than {self.reference} by more than {percent:g} %: {shown}"
            if shown
            else f"the speed of {name} or of {self.reference} is unknown"
            for name, value, shown in zip(self.others, line.values[1:], line.changes(), strict=True)
            if value is None or first is None or not value >= first * (1 - percent / 100)
        ]

    def loss_differs(self, limit: float) -> list[str]:
        """Compare losses at the last common step. Return a sentence for each run whose loss is not finite, or differs
        by more than `limit` from that of the first run. Raises UserError if the runs have no loss at a common step."""
        if self.step is None:
            raise UserError("error: --fail-if-loss-differs: the runs have no loss at a common step; remove this option")
        losses = {name: dict(run.values(LOSS))[self.step] for name, run in self.runs.items()}
        first = losses[self.reference]
        return [
            f"the loss of {name} at step {self.step} differs from that of {self.reference} by more than {limit:g}: "
            f"{losses[name]:.6g} and {first:.6g}"
            for name in self.others
            if not abs(losses[name] - first) <= limit
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
    twice = next((run for run, path in zip(runs, parts, strict=True) if parts.count(path) > 1), runs[0])
    raise UserError(f"error: {twice.folder}: the same run is named twice; name different runs")


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


def _loss_axis(runs: Sequence[RecordedRun]) -> str:
    """Return the axis over which losses of runs are compared. If the runs are known to have different numbers of tokens
    or images per step, return `tokens` or `images`. Otherwise return `step`."""
    seen = [dict(run.values(_SAMPLES)) for run in runs]
    images = any("images" in (speed_tag(run) or "") for run in runs)
    sizes = [1 if images else run.seq_len for run in runs]
    per_step = [
        {size * samples / step for step, samples in found.items() if step}
        for size, found in zip(sizes, seen, strict=True)
        if size is not None
    ]
    if len(per_step) < len(runs) or not all(per_step) or all(found == per_step[0] for found in per_step):
        return "step"
    return "images" if images else "tokens"


def _loss_curve(run: RecordedRun, tag: str, axis: str) -> Points:
    """Return the points of a loss. `axis`: a result of `_loss_axis`. A point is omitted if its coordinate on the axis
    is not finite, or not larger than that of the previous point."""
    if axis == "step":
        return run.values(tag)
    size = 1 if axis == "images" else run.seq_len or 1
    seen = dict(run.values(_SAMPLES))
    found: list[tuple[float, float]] = []
    for step, value in run.values(tag):
        place = size * seen.get(step, math.nan)
        if math.isfinite(place) and (not found or place > found[-1][0]):
            found.append((place, value))
    return found


def _difference_of_curves(curve: Points, reference: Points) -> Points:
    """Return `curve` minus `reference`, at each point of `curve` that lies between the first and the last point of
    `reference`. The reference is interpolated between its points."""
    first, last = (reference[0][0], reference[-1][0]) if reference else (0.0, -1.0)
    return [(place, value - value_at(reference, place)) for place, value in curve if first <= place <= last]


def _lines(runs: Sequence[RecordedRun], step: int | None, axis: str) -> Iterator[Line]:
    """Yield the figures. `step`: last step for which all runs have a loss. `axis`: a result of `_loss_axis`."""
    curves = [_loss_curve(run, LOSS, axis) for run in runs]
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
