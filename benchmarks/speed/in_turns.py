"""Cost of the launcher's loop to one percent: its steps and the bare loop's take turns in the same processes.

    python -m benchmarks.speed.in_turns [--pairs 40] [--reports] [--write docs/verification/benchmarks.md]

If cores are shared, whole runs one after the other differ by more than one percent. Here every step is compared with
the step next to it. With `--reports`, every step of the launcher is compared with the report after it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from benchmarks.publishing import markdown_table, publish
from benchmarks.speed.contestants import launcher_sections, processes
from benchmarks.speed.jobs import Job
from benchmarks.speed.machine import machine_line
from benchmarks.speed.runs import process_environment
from benchmarks.speed.summary import quartiles

JOBS = (
    Job(precision="float32"),
    Job(),
    Job(precision="float32", ranks=2),
    Job(ranks=2),
)
WARM_UP = 3

Pair = tuple[float, float]
"""Seconds of a step of the bare loop and of a step of the launcher, or of the launcher's step and of its report."""


def main() -> None:
    """Measure all jobs, and publish their table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--reports", action="store_true", help="measure the launcher's reports")
    parser.add_argument("--write", type=Path, help="Markdown file; the table replaces the text between its markers")
    options = parser.parse_args()
    measured = [(job, measure(job, options.pairs, options.reports)) for job in JOBS]
    rows, name = (report_table(measured), "reports") if options.reports else (table(measured), "in_turns")
    publish(f"{machine_line()}\n\n{rows}", f"speed-{name}", options.write)


def measure(job: Job, pairs: int, reports: bool = False) -> list[Pair]:
    """Measure a job in new processes with one thread each. Return the times of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "pairs.json")
        words = [*processes(sys.executable, job.ranks), __file__, job.dump(), str(pairs), str(result), str(reports)]
        subprocess.run(words, env=process_environment({}), check=True, stdout=subprocess.DEVNULL)
        return [(first, second) for first, second in json.loads(result.read_text())]


def table(measured: Sequence[tuple[Job, Sequence[Pair]]]) -> str:
    """Return a Markdown table with one row for each job."""
    rows: list[Sequence[str]] = [("job", "pairs", "bare, ms", "launcher, ms", "ratio of medians", "ratio of pairs")]
    for job, pairs in measured:
        bare, launcher = (1000 * median(pair[index] for pair in pairs) for index in (0, 1))
        ratios = quartiles(own / other for other, own in pairs)
        ranks = "one process" if job.ranks == 1 else f"{job.ranks} processes"
        rows.append(
            (
                f"{ranks}, {job.precision}",
                str(len(pairs)),
                f"{bare:.1f}",
                f"{launcher:.1f}",
                f"{launcher / bare:.3f}",
                ratios.cell(".3f"),
            )
        )
    return markdown_table(rows)


def report_table(measured: Sequence[tuple[Job, Sequence[Pair]]]) -> str:
    """Return a Markdown table of the time of a report and of its part of ten steps, the default of
    `metrics.log_freq`."""
    rows: list[Sequence[str]] = [("job", "reports", "step, ms", "report, ms", "cost of a report every 10 steps")]
    for job, pairs in measured:
        step, report = (1000 * median(pair[index] for pair in pairs) for index in (0, 1))
        ranks = "one process" if job.ranks == 1 else f"{job.ranks} processes"
        cost = report / (10 * step)
        rows.append((f"{ranks}, {job.precision}", str(len(pairs)), f"{step:.1f}", f"{report:.2f}", f"{cost:.3%}"))
    return markdown_table(rows)


def train_in_turns(job: Job, pairs: int, result: Path, reports: bool) -> None:
    """Run one rank, which builds both trainings. The first loop of a pair alternates, but a report follows its step."""
    from titan_launch.distributed.process_group import process_group

    with ExitStack() as stack:
        ranks = stack.enter_context(process_group("cpu", timeout_seconds=300))
        step, report = launcher_step(job, result.parent, stack, ranks)
        steps = (step, report) if reports else (bare_step(job, ranks.rank), step)
        gc.disable()
        orders = [(0, 1), (0, 1) if reports else (1, 0)]
        times = [_time_pair(steps, orders[number % 2]) for number in range(WARM_UP + pairs)][WARM_UP:]
        if ranks.is_rank_0:
            result.write_text(json.dumps(times))
        os._exit(0)  # gloo's threads can abort an interpreter that shuts down


def _time_pair(steps: Sequence[Callable[[], object]], order: Sequence[int]) -> Pair:
    """Time both functions in an order, each from the arrival of all ranks until the last rank has finished.

    Otherwise a step would wait for a rank that has not finished the step before.
    """
    import torch.distributed as dist

    seconds = [0.0, 0.0]
    for index in order:
        dist.barrier()
        start = time.perf_counter()
        steps[index]()
        dist.barrier()
        seconds[index] = time.perf_counter() - start
    return seconds[0], seconds[1]


def bare_step(job: Job, rank: int) -> Callable[[], object]:
    """Return a function that runs one step of the hand-written loop."""
    from benchmarks.speed.tools.bare import prepare, train_step
    from benchmarks.speed.tools.tokens import random_sequences

    model, parameters, optimizer = prepare(job)
    batches = itertools.cycle(random_sequences(job, rank).split(job.local_sequences))
    return lambda: train_step(model, parameters, optimizer, [next(batches)], job)


def launcher_step(
    job: Job, folder: Path, stack: ExitStack, ranks: object
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a function that runs one step of the launcher's loop, with everything that a step without a report has,
    and a function that reports the last step with the default metrics and sinks.

    All ranks have their run in `folder`.
    """
    from titan_launch.config.job import JobConfig
    from titan_launch.distributed.process_group import Ranks
    from titan_launch.train.build import build_run
    from titan_launch.train.health.skipped_steps import act_on_skipped_steps
    from titan_launch.train.loop import due_now, looks_for_skipped_steps, report, train_one_step

    assert isinstance(ranks, Ranks)
    sections = launcher_sections(Job(**vars(job) | {"steps": 10_000}), folder)
    run = build_run(JobConfig.model_validate(sections), ranks, stack)

    def step() -> None:
        train_one_step(run)
        run.control.agree()
        if looks_for_skipped_steps(run, due_now(run)):
            act_on_skipped_steps(run)

    return step, lambda: report(run, due_now(run))


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1].startswith("{"):
        train_in_turns(Job.load(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] == "True")
    else:
        main()
