"""Comparison of predictions with figures that others have published: peak memory and speed of training runs.

    python benchmarks/published_memory.py [--write docs/verification/planner.md]
    python benchmarks/published_memory.py --all [--source torchtitan] [--write docs/verification/planner.md]
        [--rows benchmarks/published_results.md]
    python benchmarks/published_memory.py --fit [--write docs/verification/planner.md]

`benchmarks/published_runs.toml` has the runs, with the sources and the settings that they name. Without `--all`, the
benchmark checks the runs of Llama 3 8B with FSDP2 that TorchTitan published. The exit status is 1 if the predicted
active memory of such a run is not below the published reserved memory, or not within 25 % of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import tomli
from publishing import markdown_table, publish

from titan_launch.config.job import JobConfig
from titan_launch.plan.hardware import GIB, Hardware, planned_hardware
from titan_launch.plan.job import Choice, with_unsharded_parameters
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.recordings import Recordings
from titan_launch.plan.report.modes import ComparedJob, PlanRow, predict_row
from titan_launch.trace.recorder import TorchRecorder

RUNS = Path(__file__).with_name("published_runs.toml")
PRECISIONS = {"eager": "eager bf16", "compiled": "compiled bf16", "float8": "8 bits or fewer"}
OWN = "this project, H200"
"""Source of the runs of this project. They are compared with predictions, but not used for fits."""


@dataclass(frozen=True)
class Run:
    """One published run."""

    source: str
    name: str
    ranks: int
    device: str
    kind: str
    """Key of `PRECISIONS`."""

    job: Mapping[str, Any]
    reserved_gib: float | None = None
    active_gib: float | None = None
    tokens_per_s_per_gpu: float | None = None
    assumed: tuple[str, ...] = ()
    """Settings that the source does not say."""

    differs: tuple[str, ...] = ()
    """Settings of the source that are predicted differently."""

    is_checked: bool = False


@dataclass(frozen=True)
class Prediction:
    """The predictions for a run, in GiB and in seconds per step."""

    run: Run
    config: JobConfig
    hardware: Hardware
    row: PlanRow
    tokens: int
    """Tokens of a step."""

    @property
    def active(self) -> float:
        """Predicted active memory."""
        return self.row.footprint.peak_bytes / GIB

    @property
    def streams(self) -> float:
        """Sum of the CUDA streams' peaks: reserved memory without fragmentation and overhead."""
        return self.row.footprint.stream_bytes / GIB

    @property
    def reserved(self) -> float:
        """Estimated memory that the allocator reserves: without the process's overhead."""
        return self.row.reserved_bytes / GIB - self.hardware.overhead_gib

    @cached_property
    def seconds(self) -> float | None:
        """Published seconds of a step."""
        speed = self.run.tokens_per_s_per_gpu
        return None if speed is None else self.tokens / (speed * self.run.ranks)

    @property
    def active_ratio(self) -> float | None:
        """Predicted active memory over published active memory, or over published reserved memory."""
        published = self.run.active_gib or self.run.reserved_gib
        return None if published is None else self.active / published

    @property
    def reserved_ratio(self) -> float | None:
        """Estimated over published reserved memory."""
        return None if self.run.reserved_gib is None else self.reserved / self.run.reserved_gib

    @property
    def time_ratio(self) -> float | None:
        """Expected over published time of a step."""
        expected = self.row.time.expected
        return None if self.seconds is None or expected is None else expected / self.seconds

    @property
    def is_in_interval(self) -> bool:
        """True if the published time of a step lies in the predicted interval."""
        interval = self.row.time.interval
        return self.seconds is not None and interval is not None and interval[0] <= self.seconds <= interval[1]


def read_runs(path: Path = RUNS) -> list[Run]:
    """Return all runs. The job of a run consists of those of its source, of the presets that it uses, and its own."""
    content = tomli.loads(path.read_text())
    return [_run(source, row, content["presets"]) for source in content["source"] for row in source.get("rows", ())]


def checked_runs() -> list[Run]:
    """Return the runs whose predicted memory has bounds."""
    return [run for run in read_runs() if run.is_checked]


def _run(source: Mapping[str, Any], row: Mapping[str, Any], presets: Mapping[str, Any]) -> Run:
    merged: dict[str, Any] = {**source.get("defaults", {}), **row}
    used = [*source.get("defaults", {}).get("use", ()), *row.get("use", ())]
    jobs = [*(presets[name] for name in used), source.get("job", {}), row.get("job", {})]
    return Run(
        source=source["name"],
        job=_merged(jobs),
        assumed=(*source.get("assumed", ()), *row.get("assumed", ())),
        differs=(*source.get("differs", ()), *row.get("differs", ())),
        **{key: value for key, value in merged.items() if key not in ("use", "job", "assumed", "differs")},
    )


def _merged(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the keys of all tables, of which later ones come first. Tables within them are merged, too."""
    merged: dict[str, Any] = {}
    for table in tables:
        for key, value in table.items():
            merged[key] = _merged([merged.get(key, {}), value]) if isinstance(value, Mapping) else value
    return merged


def config_of(run: Run, as_published: bool = False) -> JobConfig:
    """Return the job of a run, `as_published` compiled and in fp8 where the source says so, which a plan does not
    predict."""
    job = _merged([run.job, {"planner": {"device": run.device}}])
    if as_published:
        compiles = {"compile": {"enable": run.kind != "eager"}, "float8": {"enable": run.kind == "float8"}}
        job = _merged([job, compiles])
    return JobConfig.model_validate(job)


def predict(run: Run) -> Prediction:
    """Return the predictions for a run."""
    config = config_of(run)
    layout = plan_layout(config.parallelism, config.training, run.ranks)
    config = with_unsharded_parameters(config, layout)
    hardware = planned_hardware(config, run.ranks)
    recordings = Recordings(config, layout, hardware.kernels, TorchRecorder)
    subject = ComparedJob.replayed(config, layout, hardware, recordings)
    choice = Choice(config.gradient_accumulation, config.activation_checkpoint)
    row = predict_row(choice, config, layout, subject, hardware)
    return Prediction(run, config, hardware, row, layout.global_batch_size * config.training.seq_len)


def check() -> tuple[str, bool]:
    """Return the table of the checked runs, and True if all of them are within their bounds."""
    columns = ("run", "activation checkpointing", "predicted active", "estimated reserved", "published")
    rows, is_right = [[*columns, "active / published", ""]], True
    for run in checked_runs():
        found = predict(run)
        assert run.reserved_gib is not None and found.active_ratio is not None
        is_right &= 0.75 <= found.active_ratio < 1
        figures = [f"{value:.1f}" for value in (found.active, found.reserved, run.reserved_gib)]
        mode = found.config.activation_checkpoint.mode
        rows.append([run.name, mode, *figures, f"{found.active_ratio:.2f}", ", ".join(run.differs)])
    return markdown_table(rows), is_right


def table_of_rows(found: Sequence[Prediction]) -> str:
    """Return a table of all runs. A run that has published only memory, or only speed, has only these predictions."""
    rows = [["source", "run", "precision", "active", "reserved", "published", "step s", "expected s", "published s"]]
    for each in found:
        run, time = each.run, each.row.time
        figures = [""] * 6
        if each.active_ratio is not None:
            published = {"active": run.active_gib, "reserved": run.reserved_gib}
            stated = ", ".join(f"{gib:.1f} {kind}" for kind, gib in published.items() if gib is not None)
            figures[:3] = (f"{each.active:.1f}", f"{each.reserved:.1f}", stated)
        if each.seconds is not None and time.interval is not None:
            figures[3:] = (
                f"{time.interval[0]:.3g} .. {time.interval[1]:.3g}",
                f"{time.expected:.3g}",
                f"{each.seconds:.3g}",
            )
        rows.append([run.source, run.name, PRECISIONS[run.kind], *figures])
    return markdown_table(rows, texts=3)


def table_of_groups(found: Sequence[Prediction]) -> str:
    """Return a table of the errors, by source and precision."""
    columns = ("source", "precision", "runs", "active / published active", "active / published reserved")
    rows = [[*columns, "reserved / published", "speed in the interval", "expected / published time"]]
    groups = dict.fromkeys((each.run.source, each.run.kind) for each in found)
    for source, kind in groups:
        own = [each for each in found if (each.run.source, each.run.kind) == (source, kind)]
        timed = [each for each in own if each.seconds is not None]
        inside = f"{sum(each.is_in_interval for each in timed)} of {len(timed)}" if timed else ""
        ratios = [
            median_and_worst([each.active_ratio for each in own if each.run.active_gib]),
            median_and_worst([each.active_ratio for each in own if not each.run.active_gib]),
            median_and_worst([each.reserved_ratio for each in own]),
        ]
        times = median_and_worst([each.time_ratio for each in own])
        rows.append([source, PRECISIONS[kind], str(len(own)), *ratios, inside, times])
    return markdown_table(rows, texts=2)


def median_and_worst(ratios: Sequence[float | None], digits: int = 2) -> str:
    """Return the median and the worst of the ratios that are not None as text; "" if all are None."""
    known = [ratio for ratio in ratios if ratio is not None]
    return f"{median(known):.{digits}f}, {_worst(known):.{digits}f}" if known else ""


def _worst(ratios: Sequence[float]) -> float:
    return max(ratios, key=lambda ratio: max(ratio, 1 / ratio))


def fit(found: Sequence[Prediction]) -> str:
    """Return a table: for some precisions, the fragmentation fitted to every second run, and the error on the others of
    the estimates with this fragmentation and with that of a plan. `found`: runs that name everything and publish
    reserved memory."""
    planned = found[0].hardware.fragmentation
    columns = ("precision", "fitted on", "tested on", "fitted value", "error with the fitted value")
    rows = [[*columns, f"error with {planned:g}"]]
    for kinds in (("eager",), ("compiled",), ("float8",), tuple(PRECISIONS)):
        own = [each for each in found if each.run.kind in kinds]
        factors = [each.run.reserved_gib / each.streams for each in own if each.run.reserved_gib]
        fitted, held = median(factors[::2]), factors[1::2]
        texts = []
        for factor in (fitted, 1 + planned):
            errors = [abs(factor / actual - 1) for actual in held]
            texts.append(f"{median(errors):.1%}, {max(errors):.1%}")
        label = "all" if len(kinds) > 1 else PRECISIONS[kinds[0]]
        rows.append([label, str(len(factors[::2])), str(len(held)), f"{fitted - 1:.3f}", *texts])
    return markdown_table(rows, texts=1)


def main() -> int:
    """Compare the checked runs, or all runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="compare all runs, and print the errors by source")
    parser.add_argument("--source", help="with --all: only sources whose names begin so")
    parser.add_argument("--fit", action="store_true", help="fit the fragmentation of reserved memory")
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    parser.add_argument("--rows", type=Path, help="with --all: Markdown file for the table of runs with memory")
    options = parser.parse_args()
    if not (options.all or options.fit):
        text, is_right = check()
        publish(text, "published_memory", options.write)
        return int(not is_right)
    runs = [run for run in read_runs() if run.source.startswith(options.source or "")]
    if options.fit:
        runs = [run for run in runs if run.reserved_gib and not run.assumed and run.source != OWN]
    found = [predict(run) for run in runs]
    if options.fit:
        publish(fit(found), "published_fit", options.write)
        return 0
    publish(table_of_groups(found), "published_groups", options.write)
    shown = [each for each in found if options.rows is None or each.active_ratio is not None]
    publish(table_of_rows(shown), "published_rows", options.rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
