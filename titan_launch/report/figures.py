"""Figures of a recorded run: medians with quartiles, parts of the step's time, and sentences for a summary."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from titan_launch.core.terminal import counted
from titan_launch.metrics.sinks.jsonl import json_number
from titan_launch.metrics.tags import OTHER, PAUSES, STEP_PARTS
from titan_launch.models.architectures import named_flavor
from titan_launch.report.charts import NUM_COLORS, Column
from titan_launch.report.recorded_run import RecordedRun

LOSS, VALIDATION_LOSS, STEP_SECONDS = "train/loss", "validation/loss", "time/step_s"
PREDICTED, MEASURED = "memory/predicted_active_gib", "memory/max_active_gib"
_NOT_PARTS = (STEP_SECONDS, "time/compile_s", "time/checkpoint_stall_s")
"""Metrics `time/*_s` that are neither a part of a step nor a pause."""

UNMEASURED = "not measured"


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a metric over the reports of a run."""

    median: float
    low: float
    high: float
    count: int

    def format(self, pattern: str = "{:,.4g}") -> str:
        """Return `median (quartile to quartile)`, or only the median if there is one value."""
        if self.count < 2:
            return pattern.format(self.median)
        return f"{pattern.format(self.median)} ({pattern.format(self.low)} to {pattern.format(self.high)})"


def spread(values: Sequence[float]) -> Spread | None:
    """Return median and quartiles of the finite values; None if no value is finite."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return None
    if len(finite) == 1:
        return Spread(finite[0], finite[0], finite[0], 1)
    low, median, high = statistics.quantiles(finite, n=4, method="inclusive")
    return Spread(median, low, high, len(finite))


def speed_tag(run: RecordedRun) -> str | None:
    """Return the metric of the run's throughput, such as `throughput/tokens_per_second`; None if there is none."""
    return next((tag for tag in run.tags if tag.startswith("throughput/") and tag.endswith("_per_second")), None)


def speed_unit(tag: str) -> str:
    """Return `tokens per second` for `throughput/tokens_per_second`."""
    return tag.partition("/")[2].replace("_", " ")


_PART_ORDER = (*STEP_PARTS, OTHER, *PAUSES, UNMEASURED)

_MAX_COLUMNS = 120
"""Largest number of columns of `step_columns`."""


def part_colors(names: Collection[str]) -> dict[str, int]:
    """Return the number of the color of each part of a step, in the order in which parts are shown. The parts in
    `_PART_ORDER` have the same color in all charts."""
    unknown = sorted({*names} - {*_PART_ORDER})
    known = {name: index for index, name in enumerate(_PART_ORDER) if name in names}
    return known | {name: (len(_PART_ORDER) + index) % NUM_COLORS for index, name in enumerate(unknown)}


def _part_tags(run: RecordedRun) -> dict[str, str]:
    """Return the metrics of the parts of a step and of the pauses, by name, in the order of the charts."""
    found = [tag for tag in run.tags if tag.startswith("time/") and tag.endswith("_s") and tag not in _NOT_PARTS]
    tags = {tag.removeprefix("time/").removesuffix("_s"): tag for tag in found}
    return {name: tags[name] for name in part_colors(tags)}


def time_parts(run: RecordedRun) -> dict[str, float]:
    """Return the mean seconds per step of each part of a step and of each pause. Empty for a run without a finite step
    time.

    The mean of a part is over the reports of `RecordedRun.steady`. The mean of a pause is over all steps. Step time
    that belongs to no metric is the part UNMEASURED, if it exceeds 0.1 % of the step time.
    """
    step = _mean(run.steady(STEP_SECONDS))
    if step is None:
        return {}
    tags = _part_tags(run)
    means = {name: _mean(run.steady(tag)) for name, tag in tags.items()}
    parts = {name: mean for name, mean in means.items() if mean is not None}
    pauses = {name: _mean_of_steps(run, tags[name]) for name in PAUSES if parts.pop(name, None) is not None}
    rest = step - sum(parts.values())
    return parts | ({UNMEASURED: rest} if rest > 0.001 * step else {}) | pauses


def step_columns(run: RecordedRun) -> list[Column]:
    """Return the parts of the step time in seconds over the run, without pauses.

    There is a column for each report. In a long run, a column has the mean of several consecutive reports, weighted by
    their steps. Step time that belongs to no metric is the part UNMEASURED, if it exceeds 0.1 % of `time/step_s`.
    Reports with a time that is not finite are omitted.
    """
    totals = run.values(STEP_SECONDS)
    tags = {name: dict(run.values(tag)) for name, tag in _part_tags(run).items() if name not in PAUSES}
    columns, before = [], run.first_step
    for step, total in totals:
        parts = {name: values[step] for name, values in tags.items() if step in values}
        rest = total - sum(parts.values())
        parts |= {UNMEASURED: rest} if rest > 0.001 * total else {}
        if step > before and math.isfinite(total) and math.isfinite(rest):
            columns.append(Column(before + 1, step, parts))
        before = step
    size = -(-len(columns) // _MAX_COLUMNS)
    return [_merged(columns[start : start + size]) for start in range(0, len(columns), size or 1)]


def _merged(columns: Sequence[Column]) -> Column:
    """Return the mean of columns, weighted by their numbers of steps."""
    names = dict.fromkeys(name for column in columns for name in column.parts)
    steps = [column.last - column.first + 1 for column in columns]
    means = {
        name: sum(column.parts.get(name, 0.0) * weight for column, weight in zip(columns, steps, strict=True))
        / sum(steps)
        for name in names
    }
    return Column(columns[0].first, columns[-1].last, means)


def _mean_of_steps(run: RecordedRun, tag: str) -> float:
    """Return the mean of a metric over all steps. In each report, the metric is the mean of the steps since the
    previous report."""
    values = run.values(tag)
    first = [run.first_step, *(step for step, _ in values)]
    total = sum((step - before) * value for (step, value), before in zip(values, first, strict=False))
    return total / max(values[-1][0] - run.first_step, 1)


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.fmean(finite) if finite else None


def memory_peaks(run: RecordedRun) -> dict[str, float]:
    """Return the largest value of every metric of memory in GiB, by tag."""
    tags = [tag for tag in run.tags if tag.startswith("memory/") and tag.endswith("_gib")]
    return {tag: max(value for _, value in run.values(tag)) for tag in tags}


def summary(run: RecordedRun) -> list[str]:
    """Return the summary of a run: sentences, each with one fact."""
    sentences = [_state(run)]
    if not run.reports.steps:
        return [*sentences, "There is no report yet."]
    sentences += [_fall("training loss", run, LOSS), _validation(run), _speed(run), _share_of_data(run), _memory(run)]
    sentences += [_not_finite(run), _interruptions(run), _saved(run)]
    return [sentence for sentence in sentences if sentence]


def _state(run: RecordedRun) -> str:
    model = run.config.get("model", {})
    name = model.get("name", "a model")
    flavor = f" ({found})" if (found := named_flavor(name, model.get("flavor"))) else ""
    ranks = "" if run.num_ranks is None else f" on {counted(run.num_ranks, 'rank')}"
    verb = {"running": "is running", "finished": "is finished", "ended early": "ended early"}
    verb |= {"stopped": "was stopped", "failed": "has failed"}
    text = f"The run of {name}{flavor}{ranks} {verb[run.state]}: step {run.last_step:,} of {run.total_steps:,}"
    if run.state == "failed" and run.starts:
        last = run.starts[-1]
        reason = last.end if last.is_error else "the process was killed; its logs have no error"
        return f"{text}. Its last start ended with: {reason}" + "." * (not reason.endswith("."))
    return f"{text}."


def _fall(what: str, run: RecordedRun, tag: str) -> str:
    found = [(step, value) for step, value in run.values(tag) if math.isfinite(value)]
    if not found:
        return ""
    (first, before), (last, now) = found[0], found[-1]
    if first == last:
        return f"The {what} is {now:.4f} at step {last:,}."
    verb = "fell" if now < before else "rose" if now > before else "did not change"
    return f"The {what} {verb} from {before:.4f} at step {first:,} to {now:.4f} at step {last:,}."


def _validation(run: RecordedRun) -> str:
    found = [(value, step) for step, value in run.values(VALIDATION_LOSS) if math.isfinite(value)]
    if not found:
        return ""
    lowest, at = min(found)
    last, last_step = found[-1]
    if at == last_step:
        return f"The validation loss is {last:.4f} at step {last_step:,}, the lowest of the run."
    return f"The validation loss is {last:.4f} at step {last_step:,}; the lowest was {lowest:.4f} at step {at:,}."


def _speed(run: RecordedRun) -> str:
    tag = speed_tag(run)
    speed = spread(run.steady(tag)) if tag else None
    step = spread(run.steady(STEP_SECONDS))
    if tag is None or speed is None or step is None:
        return ""
    mfu = spread(run.steady("throughput/mfu_percent"))
    at = f", at a model FLOPs utilization of {mfu.median:.1f} %" if mfu else ""
    half = f"; half of the reported speeds are from {speed.low:,.0f} to {speed.high:,.0f}" if speed.count > 3 else ""
    return f"The median speed is {speed.median:,.0f} {speed_unit(tag)}, {step.median:.3g} s per step{at}{half}."


def _share_of_data(run: RecordedRun) -> str:
    parts = time_parts(run)
    total = sum(parts.values())
    if "data" not in parts or not total > 0:
        return ""
    return f"Training waits for data in {100 * parts['data'] / total:.1f} % of its time."


def _memory(run: RecordedRun) -> str:
    peaks = memory_peaks(run)
    if MEASURED in peaks and PREDICTED in peaks:
        planned, measured = peaks[PREDICTED], peaks[MEASURED]
        return f"The peak memory is {gib(measured)}, {change(measured, planned)} against the planned {gib(planned)}."
    if MEASURED in peaks:
        return f"The peak memory is {gib(peaks[MEASURED])}; there is no prediction."
    return ""


def _not_finite(run: RecordedRun) -> str:
    bad = [step for step, value in run.values(LOSS) if not math.isfinite(value)]
    return f"The loss is not finite in {counted(len(bad), 'report')}, first at step {bad[0]:,}." if bad else ""


def _interruptions(run: RecordedRun) -> str:
    last = (run.last(tag) or 0 for tag in ("train/skipped_steps", "train/rollbacks"))
    skipped, rollbacks = (int(value) if math.isfinite(value) else 0 for value in last)
    again = f"The ranks were started {counted(run.num_starts, 'time')}." if run.num_starts > 1 else ""
    lost = [f"Skipped steps: {skipped:,}."] if skipped else []
    lost += [f"Rollbacks: {rollbacks:,}."] if rollbacks else []
    return " ".join(filter(None, [again, *lost])) or "There was no restart, no skipped step and no rollback."


def _saved(run: RecordedRun) -> str:
    if not run.checkpoints:
        return "There is no checkpoint."
    result = "" if run.best_step is None else f" The best is of step {run.best_step:,}, and is the result of the run."
    return f"Checkpoints: {len(run.checkpoints):,}. The newest is of step {run.checkpoints[0].step:,}.{result}"


def gib(size: float) -> str:
    """Return a size as text: in GiB, or in MiB below 0.1 GiB. `size`: in GiB."""
    return f"{size:.2f} GiB" if size >= 0.1 else f"{size * 1024:.1f} MiB"


def change(value: float, before: float) -> str:
    """Return the relative change as text: `+3.2 %`, or "" if it is not defined."""
    if not (math.isfinite(value) and math.isfinite(before) and before):
        return ""
    return f"{100 * (value / before - 1):+.1f} %"


def to_json(data: object) -> str:
    """Return plain data as JSON. Numbers that are not finite become "nan", "inf" or "-inf", which `float` accepts."""

    def finite(value: object) -> object:
        if isinstance(value, float):
            return json_number(value)
        if isinstance(value, Mapping):
            return {key: finite(item) for key, item in value.items()}
        return [finite(item) for item in value] if isinstance(value, list | tuple) else value

    return json.dumps(finite(data), indent=2, allow_nan=False)
