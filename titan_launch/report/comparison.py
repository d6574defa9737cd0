"""The comparison of recorded runs: differences of the configuration, figures, and limits for scripts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.resume_compatibility import differences
from titan_launch.core.errors import KeyPath, UserError, format_key
from titan_launch.core.terminal import one_line
from titan_launch.plan.report.table import aligned
from titan_launch.report.charts import Points, line_chart, stacked_bars
from titan_launch.report.figures import (
    LOSS,
    STEP_SECONDS,
    VALIDATION_LOSS,
    change,
    memory_peaks,
    speed_tag,
    speed_unit,
    spread,
    time_parts,
)
from titan_launch.report.page import charts, folded, page, section, table
from titan_launch.report.recorded_run import RecordedRun

_NAMES_OF_RUNS = (("job", "name"), ("job", "dump_folder"))
"""Keys that differ between any two runs."""

_LONGEST_VALUE = 40
"""Longest value of a key in a line of text."""


@dataclass(frozen=True)
class Line:
    """A figure of all runs."""

    name: str
    values: tuple[float | None, ...]
    """The figure of each run. None for a run without it."""

    cells: tuple[str, ...]
    """The same with its spread, as text."""

    is_change_relative: bool = True
    """True if a change is shown in percent, False if it is shown as a difference."""

    def changes(self) -> list[str]:
        """Return the change of each run from the first as text; "" for the first run."""
        return ["", *(self._change(value) for value in self.values[1:])]

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
        """Keys of the configuration that differ, with the value of each run; None for a key that is unset."""

        self.step = _last_common_step(runs)
        """The last step that all runs have reported; None if there is none."""

        self.lines = [line for line in _lines(self) if any(value is not None for value in line.values)]
        """The figures. Loss and speed are the first."""

        common = set.intersection(*(set(run.tags) for run in runs))
        found = {name: sorted({*run.tags} - common) for name, run in zip(self.names, runs, strict=True)}
        self.only_in_some = {name: tags for name, tags in found.items() if tags}
        """Metrics that not all runs have, by the run that has them."""

    def as_text(self) -> str:
        """Return the comparison as text."""
        letters = [chr(ord("A") + index) for index in range(len(self.runs))]
        where = [
            f"{letter} = {one_line(str(run.folder))}: {run.state}, step {_progress(run)}"
            for letter, run in zip(letters, self.runs, strict=True)
        ]
        rows = [[f"  {one_line(key)}", *(_short(value) for value in values)] for key, values in self.keys.items()]
        keys = [f"configuration: {len(rows) or 'no'} different {'key' if len(rows) == 1 else 'keys'}", *aligned(rows)]
        head = ["", *letters, *(f"{letter} against A" for letter in letters[1:])]
        figures = aligned([head, *([line.name, *line.cells, *line.changes()[1:]] for line in self.lines)])
        only = [
            f"only in {letter}: {one_line(', '.join(self.only_in_some[name]))}"
            for letter, name in zip(letters, self.names, strict=True)
            if name in self.only_in_some
        ]
        return "\n".join([*where, *(keys if rows else keys[:1]), *figures, *only])

    def as_data(self) -> dict[str, Any]:
        """Return the comparison as plain data."""
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
            "time_parts_seconds": [time_parts(run) for run in self.runs],
            "only_in_some_runs": self.only_in_some,
        }

    def as_page(self) -> str:
        """Return the comparison as a page."""
        states = [
            (name, one_line(str(run.folder)), run.state, _progress(run))
            for name, run in zip(self.names, self.runs, strict=True)
        ]
        keys = [(key, *(_short(value, 200) for value in values)) for key, values in self.keys.items()]
        figures = [(line.name, *line.cells, *line.changes()[1:]) for line in self.lines]
        against = [f"{name} against {self.names[0]}" for name in self.names[1:]]
        parts = {name: parts for name, run in zip(self.names, self.runs, strict=True) if (parts := time_parts(run))}
        tags = dict.fromkeys(tag for run in self.runs for tag in run.tags)
        main = [tag for tag in (LOSS, VALIDATION_LOSS, *filter(None, map(speed_tag, self.runs))) if tag in tags]
        title = " and ".join(self.names)
        only = [(name, ", ".join(missing)) for name, missing in self.only_in_some.items()]
        return page(
            title,
            [
                f"<h1>{escape(title)}</h1>",
                table(("run", "folder", "state", "step"), states),
                section(
                    "Differences of the configuration", table(("key", *self.names), keys) or "<p>There is none.</p>"
                ),
                section("Figures", table(("figure", *self.names, *against), figures)),
                section("Loss and speed", charts(self._chart(tag) for tag in dict.fromkeys(main))),
                section("Where the time of a step goes", stacked_bars(parts, "s") if parts else ""),
                section("Metrics that only some runs have", table(("run", "metrics"), only)),
                folded("All metrics", charts(self._chart(tag) for tag in tags if tag not in main)),
            ],
        )

    def _chart(self, tag: str) -> str:
        series: dict[str, Points] = {
            name: run.values(tag) for name, run in zip(self.names, self.runs, strict=True) if tag in run.tags
        }
        return line_chart(tag, series)

    def slower(self, percent: float) -> list[str]:
        """Return a sentence for each run whose median speed is more than `percent` below that of the first. Raises
        UserError if a run has no speed, or another kind of speed."""
        tags = [speed_tag(run) for run in self.runs]
        if None in tags or len({*tags}) > 1:
            kinds = ", ".join(f"{name}: {tag or 'none'}" for name, tag in zip(self.names, tags, strict=True))
            raise UserError(f"error: --fail-if-slower: the runs have different metrics of speed ({kinds})")
        (line,) = (line for line in self.lines if tags[0] is not None and line.name == speed_unit(tags[0]))
        first = line.values[0]
        return [
            f"{name} is slower than {self.names[0]} by more than {percent:g} %: {shown}"
            for name, value, shown in zip(self.names[1:], line.values[1:], line.changes()[1:], strict=True)
            if value is None or first is None or not value >= first * (1 - percent / 100)
        ]

    def loss_differs(self, limit: float) -> list[str]:
        """Return a sentence for each run whose loss at the last common step differs by more than `limit` from that of
        the first, or is not finite. Raises UserError if the runs have no loss at a common step."""
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
    """Return the shortest ends of the folders' paths that are all different."""
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
            if difference.key not in _NAMES_OF_RUNS:
                found = changed.setdefault(difference.key, dict.fromkeys(range(len(runs)), difference.was))
                found[index] = difference.now
    for key in sorted(changed, key=format_key):
        yield format_key(key), tuple(changed[key].values())
    ranks = tuple(run.num_ranks for run in runs)
    if len({*ranks}) > 1:
        yield "number of ranks", ranks


def _last_common_step(runs: Sequence[RecordedRun]) -> int | None:
    common = set.intersection(*({step for step, _ in run.values(LOSS)} for run in runs))
    return max(common, default=None)


def _lines(comparison: Comparison) -> Iterator[Line]:
    runs, step = comparison.runs, comparison.step
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


def _short(value: Any, longest: int = _LONGEST_VALUE) -> str:
    text = "unset" if value is None else toml_value(value)
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."
