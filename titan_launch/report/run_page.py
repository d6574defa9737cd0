"""The page of one run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from html import escape
from itertools import groupby
from typing import Any

from titan_launch.config.loading.provenance import toml_value
from titan_launch.core.errors import leaves
from titan_launch.core.terminal import one_line
from titan_launch.metrics.tags import tag_of
from titan_launch.report.charts import Bar, Points, bar_chart, line_chart, stacked_chart
from titan_launch.report.figures import (
    LOSS,
    MEASURED,
    PREDICTED,
    STEP_SECONDS,
    VALIDATION_LOSS,
    change,
    gib,
    memory_peaks,
    part_colors,
    speed_tag,
    speed_unit,
    spread,
    step_columns,
    summary,
    time_parts,
)
from titan_launch.report.page import charts, folded, page, paragraphs, section, table
from titan_launch.report.recorded_run import RecordedRun


def run_page(run: RecordedRun) -> str:
    """Return the page of a run. Sections for which the run has no data are omitted."""
    state = f'<span class="state {run.state}">{run.state}</span>'
    now = f"{datetime.now():%Y-%m-%d %H:%M:%S}"
    return page(
        f"{run.name}: step {run.last_step}",
        [
            f"<h1>{escape(run.name)} {state}</h1>",
            f'<p class="dim">{escape(one_line(str(run.folder)))}, as of {now}</p>',
            section("Summary", paragraphs(summary(run))),
            section("Loss and speed", charts(_main_charts(run))),
            section("Where the time of a step goes", _times(run)),
            section("Memory", _memory(run)),
            section("Precision", _precision(run)),
            section("Proof of the layout", "" if run.proof is None else f"<pre>{escape(run.proof.text())}</pre>"),
            section("Starts", _starts(run)),
            section("Skipped steps and rollbacks", _skips(run)),
            section("Checkpoints", _checkpoints(run)),
            folded("All metrics", charts(_all_charts(run))),
            folded("Configuration", _config(run)),
        ],
    )


def _main_charts(run: RecordedRun) -> Iterator[str]:
    tags = (LOSS, VALIDATION_LOSS, "validation/ema_loss")
    losses = {tag: run.values(tag) for tag in tags if tag in run.tags}
    if losses:
        yield line_chart("loss", losses)
    if (tag := speed_tag(run)) is not None:
        yield line_chart(speed_unit(tag), {speed_unit(tag): run.values(tag)})


def _all_charts(run: RecordedRun) -> Iterator[str]:
    by_chart: dict[tuple[str, str], dict[str, Points]] = {}
    for name in run.tags:
        tag = tag_of(name)
        chart = tag.chart if tag is not None and tag.chart is not None else (name.partition("/")[0], name)
        by_chart.setdefault(chart, {})[name] = run.values(name)
    for (_, title), series in by_chart.items():
        yield line_chart(title, series, has_hover=False)


def _times(run: RecordedRun) -> str:
    columns, parts = step_columns(run), time_parts(run)
    colors = part_colors({name for column in columns for name in column.parts})
    chart = stacked_chart("time of a step (s)", columns, "s", colors) if len(colors) > 1 else ""
    total = sum(parts.values())
    rows = [(name, f"{value:.4g}", f"{100 * value / total:.1f} %" if total else "") for name, value in parts.items()]
    return chart + table(("part", "seconds per step", "share"), rows)


_RESERVED, _HOST, _LIMIT = "memory/max_reserved_gib", "memory/max_rss_gib", "memory/limit_gib"

_BARS = {
    PREDICTED: "tensors, predicted by the planner",
    MEASURED: "tensors, measured",
    _RESERVED: "reserved by the CUDA allocator, measured",
    _HOST: "host memory of the process, measured",
}
"""Text of each bar of peak memory."""


def _memory(run: RecordedRun) -> str:
    peaks = memory_peaks(run)
    rows = []
    for tag, size in peaks.items():
        known = tag_of(tag)
        against = change(size, peaks[PREDICTED]) if tag == MEASURED and PREDICTED in peaks else ""
        rows.append((tag.partition("/")[2], gib(size), against, known.meaning.replace("`", "") if known else ""))
    shown = {tag: text for tag, text in _BARS.items() if math.isfinite(peaks.get(tag, math.inf))}
    if _RESERVED in shown:  # the other bars and the limit are GPU memory
        shown.pop(_HOST, None)
    bars = [Bar(f"{text}: {gib(peaks[tag])}", {text: peaks[tag]}) for tag, text in shown.items()]
    colors = {text: index for index, text in enumerate(_BARS.values())}
    limit = peaks.get(_LIMIT, 0.0)
    chart = bar_chart("peak memory of a rank (GiB)", bars, "GiB", colors, limit if 0 < limit < math.inf else None)
    return chart + table(("metric", "largest value", "against the plan", "meaning"), rows)


def _precision(run: RecordedRun) -> str:
    observed = {unit.name: unit.as_planned for unit in run.audit.units} if run.audit is not None else {}
    words = {True: "as planned", False: "differs", None: ""}
    rows = []
    for unit in run.units:
        dtypes = (unit.storage_dtype, unit.compute_dtype, unit.reduce_dtype, unit.output_dtype or "unchanged")
        cells = (f"{unit.parameters:,}", *dtypes, unit.reason, words[observed.get(unit.name)])
        rows.append((unit.name, cells))
    lines = []
    for cells, group in groupby(rows, key=lambda row: row[1]):
        names = [name for name, _ in group]
        lines.append((names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}", f"{len(names)}", *cells))
    head = (
        *("units", "number of units", "parameters per unit", "storage dtype", "compute dtype", "reduce dtype"),
        *("output dtype", "made by", "observed"),
    )
    differences = [] if run.audit is None else run.audit.differences
    return paragraphs(differences) + table(head, lines)


def _starts(run: RecordedRun) -> str:
    rows = [
        (
            str(start.number),
            "" if start.began is None else str(start.began),
            "" if start.began is None or start.ended is None else str(start.ended - start.began),
            str(start.step),
            str(start.num_logs),
            start.end,
        )
        for start in run.starts
    ]
    return table(("start", "began", "duration", "from step", "logs of ranks", "last message, or error"), rows)


def _skips(run: RecordedRun) -> str:
    rows = []
    for name, tag in (("skipped steps", "train/skipped_steps"), ("rollbacks", "train/rollbacks")):
        values = run.values(tag)
        rises = [step for (_, before), (step, now) in zip([(0, 0.0), *values], values, strict=False) if now > before]
        if rises:
            rows.append((name, f"{values[-1][1]:.0f}", _steps(rises)))
    undone = run.rolled_back
    if undone:
        rows.append(("undone reports", str(len(undone)), _steps(undone)))
    return table(("event", "number", "reported at steps"), rows)


def _steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:20]))
    return shown if len(steps) <= 20 else f"{shown} and {len(steps) - 20} more"


def _checkpoints(run: RecordedRun) -> str:
    rows = []
    for saved in run.checkpoints:
        loss = "" if saved.validation_loss is None else f"{saved.validation_loss:.4f}"
        rows.append((str(saved.step), f"{saved.num_bytes / 1e6:,.1f} MB", loss))
    return table(("step", "size", "validation loss"), rows)


def _config(run: RecordedRun) -> str:
    lines = [f"{key} = {toml_value(value)}" for key, value in leaves(run.config)]
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


def describe_run(run: RecordedRun) -> dict[str, Any]:
    """Return the name, state, steps, loss and median speed of a run as plain data. Unknown values are None."""
    tag = speed_tag(run)
    speed, seconds = spread(run.steady(tag)) if tag else None, spread(run.steady(STEP_SECONDS))
    return {
        "folder": str(run.folder),
        "name": run.name,
        "state": run.state,
        "step": run.last_step,
        "steps": run.total_steps,
        "best_step": run.best_step,
        "loss": dict(run.values(LOSS)).get(max(run.reports.steps[-1:], default=0)),
        "speed": None if speed is None else speed.median,
        "speed_unit": None if tag is None else speed_unit(tag),
        "seconds_per_step": None if seconds is None else seconds.median,
    }
