"""The search for layouts held against measurements: every layout of small jobs, trained on CPU ranks of this machine.

    python benchmarks/measured_layouts.py [--only GLOB] [--ranks 2 4] [--kept FILE] [--write FILE]

All jobs take two hours on 2 cores, on which nothing else may run: 4 ranks share them, and any other process changes
the order of the layouts. With `--kept`, each row of the table is added to a file, and a later command goes on.

First, `titan-launch measure-device` measures the machine with as many ranks. For each job, `plan --search` finds the
layout with the shortest expected step from these speeds. Then every layout trains some steps: all degrees of tensor,
pipeline and expert parallelism, all replicas, with and without an optimizer that is sharded over them, all sizes of the
microbatch, and all modes of gradient accumulation. The schedule is 1F1B, and activation checkpointing and chunks of the
loss stay those of the job. The time of a layout is the median of its steps. The winner and the fastest layouts train
again, in turns, so that a lucky run does not decide. If another layout then has the lowest time, it and the winner
train once more, in turns, and only these times are compared: of several noisy times, the lowest is too low. Memory is
the peak that a run reports of its third step. A thread of gloo sometimes frees a buffer late, so the smallest of the
winner's runs counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import product
from pathlib import Path
from typing import Any

from publishing import markdown_table, publish

from titan_launch.commands.parser import recordings_of
from titan_launch.commands.plan_search import search_layouts
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.config.rules import first_problem
from titan_launch.core.errors import ConfigError, RunError
from titan_launch.plan.hardware import GIB, hardware_of
from titan_launch.plan.job import with_choice, with_unsharded_parameters, with_values
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.report.modes import ComparedJob, PlanRow, compare
from titan_launch.prove.ranks import run_ranks, start_server

_TRAINING = [
    "--job.device=cpu",
    "--training.local_batch_size=1",
    "--activation_checkpoint.mode=none",
    "--parallelism.pipeline_parallel_schedule=1F1B",
]
_TEXT = [
    "--config=llama_debug",
    *_TRAINING,
    "--data.kind=synthetic",
    "--training.seq_len=64",
    "--training.global_batch_size=8",
]
_FAMILY = ["--model.flavor=debug", "--model.args.n_layers=4"]
JOBS: dict[str, list[str]] = {
    "Llama": [*_TEXT, "--model.args.n_layers=4"],
    "Llama, float32": [*_TEXT, "--model.args.n_layers=4", "--precision.param_dtype=float32"],
    "Llama, long sequences": [*_TEXT, "--model.args.n_layers=2", "--training.seq_len=512"],
    "Llama, large vocabulary": [*_TEXT, "--model.args.n_layers=2", "--model.args.vocab_size=16384"],
    "Llama, wide": [*_TEXT, "--model.args.n_layers=2", "--model.args.dim=512", "--model.args.hidden_dim=1024"],
    "Gemma 3": [*_TEXT, "--model.name=gemma3", *_FAMILY],
    "Qwen 3 with experts": [*_TEXT, "--model.name=qwen3_moe", *_FAMILY],
    "ViT": ["--config=vit_debug", *_TRAINING, "--training.global_batch_size=32"],
}
_HELD = (
    ("parallelism", "pipeline_parallel_schedule"),
    ("parallelism", "context_parallel_degree"),  # PyTorch has no ring attention for CPUs
    ("loss", "chunks"),
    ("activation_checkpoint", "mode"),
    ("training", "enable_cpu_offload"),
)
_WARM_UP = 2
_STEPS, _STEPS_OF_FINALISTS = 4, 10
_FINALISTS, _ROUNDS, _ROUNDS_OF_TWO = 8, 3, 4


@dataclass
class Measured:
    """A layout with its runs."""

    config: JobConfig
    layout: Layout
    row: PlanRow
    seconds: list[float] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    """GiB."""

    @property
    def time(self) -> float:
        """Median of the runs' steps in seconds."""
        return statistics.median(self.seconds)

    def __str__(self) -> str:
        layout, parts = self.layout, []
        degrees = {"TP": layout.tensor, "PP": layout.pipeline, "EP": layout.expert}
        parts += [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        parts.append(f"{layout.replicate} x {layout.shard}{' *' if layout.shards_optimizer else ''}")
        parts.append(f"{layout.num_microbatches} of {layout.local_batch_size}")
        return ", ".join([*parts, self.row.choice.accumulation.label])


def every_layout(job: JobConfig, ranks: int) -> Iterator[Measured]:
    """Plan all layouts of a job."""
    section, powers = "parallelism", [size for size in (1, 2, 4) if size <= ranks]
    for tensor, pipeline, expert, replicas in product(powers, repeat=4):
        for sharded, size in product((False, True), (1, 2, 4, 8, 16, 32)):
            values: dict[tuple[str, str], Any] = {
                (section, "tensor_parallel_degree"): tensor,
                (section, "pipeline_parallel_degree"): pipeline,
                (section, "expert_parallel_degree"): expert,
                (section, "data_parallel_replicate_degree"): replicas,
                (section, "shard_optimizer_over_replicas"): sharded,
                ("training", "local_batch_size"): size,
            }
            one = with_values(job, values)
            if first_problem(one) is not None:
                continue
            try:
                layout = plan_layout(one.parallelism, one.training, ranks)
                hardware = hardware_of(one, ranks)
                planned = with_unsharded_parameters(one, layout)
                recordings = recordings_of(planned, layout, hardware.kernels, is_silent=True)
                rows = compare(
                    planned, layout, ComparedJob.replayed(planned, layout, hardware, recordings), hardware
                ).rows
            except ConfigError:
                continue
            for row in rows:
                if row.choice.activation_checkpoint.mode == one.activation_checkpoint.mode:
                    yield Measured(with_choice(one, row.choice), layout, row)


def train(one: Measured, ranks: int, steps: int) -> bool:
    """Train some steps of a layout on new ranks, and note their time and memory. Return False if it does not run."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            reports = run_ranks("measured_layouts:run_steps", ranks, _running(one.config, folder, steps), timeout=120)[
                0
            ]
        except (RunError, ConfigError) as error:
            print(f"  {one}: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
            return False
    one.seconds += [row["time/step_s"] for row in reports if row["step"] > _WARM_UP]
    one.peaks += [row[_PEAK] for row in reports if _PEAK in row]
    return True


def train_in_turns(layouts: Sequence[Measured], ranks: int, rounds: int) -> None:
    """Measure the times of some layouts anew, in turns."""
    for one in layouts:
        one.seconds.clear()
    for _ in range(rounds):
        for one in layouts:
            train(one, ranks, _STEPS_OF_FINALISTS)


_PEAK = "memory/max_active_gib"


def _running(config: JobConfig, folder: str, steps: int) -> JobConfig:
    """Return the job of a run."""
    return with_values(
        config,
        {
            ("job", "dump_folder"): folder,
            ("training", "steps"): steps,
            ("metrics", "log_freq"): 1,
            ("checkpoint", "save_last"): False,
            ("planner", "speeds"): None,
            ("lr_scheduler", "warmup_steps"): 0,
            ("validation", "freq"): 0,
        },
    )


def run_steps(config: JobConfig) -> list[dict[str, float]]:
    """Train as a rank of the process group. Return the reports of the run on rank 0."""
    import torch
    import torch.distributed as dist

    from titan_launch.distributed.process_group import Ranks
    from titan_launch.train.build import build_run
    from titan_launch.train.loop import fit

    with ExitStack() as stack:
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
        fit(build_run(config, ranks, stack))
    files = list(Path(config.job.dump_folder).glob("**/metrics.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def compared(name: str, ranks: int, speeds: str) -> list[str]:
    """Return the table row of a job."""
    job = load_job(JOBS[name][0].removeprefix("--config="), [*JOBS[name][1:], f"--planner.speeds={speeds}"]).config
    begin = time.perf_counter()
    found = search_layouts(job, ranks, _HELD).best[0]
    searched = time.perf_counter() - begin
    layouts = [one for one in every_layout(job, ranks) if train(one, ranks, _STEPS)]
    winner = min(layouts, key=lambda one: (one.layout != found.layout, one.row.choice != found.row.choice))
    assert (winner.layout, winner.row.choice) == (found.layout, found.row.choice), "the winner did not run"
    fastest = sorted(layouts, key=lambda one: one.time)[:_FINALISTS]
    finalists = [winner, *(one for one in fastest if one is not winner)]
    train_in_turns(finalists, ranks, _ROUNDS)
    best = min(finalists, key=lambda one: one.time)
    if best is not winner:
        train_in_turns([winner, best], ranks, _ROUNDS_OF_TWO)
    slowest = max(layouts, key=lambda one: one.time)
    ratios = [one.row.time.expected / one.time for one in layouts if one.row.time.expected is not None]
    memory = winner.row.footprint.peak_bytes / GIB / min(winner.peaks) - 1
    expected = winner.row.time.expected
    assert expected is not None
    for one in sorted(layouts, key=lambda one: one.time):
        planned = one.row.footprint.peak_bytes / GIB / min(one.peaks) - 1
        times = f"{1e3 * one.time:.1f} ms, expected {1e3 * (one.row.time.expected or 0):.1f}"
        print(f"  {one}: {times}; planned memory {100 * planned:+.2f} %", file=sys.stderr)
    print(f"{name}, {ranks} ranks: winner {winner} {1e3 * winner.time:.1f} ms, best {best} {1e3 * best.time:.1f} ms")
    return [
        name,
        str(ranks),
        str(len(layouts)),
        f"{searched:.0f}",
        str(winner),
        f"{1e3 * expected:.1f}",
        f"{1e3 * winner.time:.1f}",
        f"{winner.time / best.time:.3f}",
        f"{slowest.time / best.time:.1f}",
        f"{statistics.median(ratios):.2f}",
        f"{100 * memory:+.2f} %",
    ]


_HEADER = [
    "job",
    "ranks",
    "layouts",
    "search s",
    "winner: degrees, replicas x shards, microbatches, mode",
    "expected ms",
    "measured ms",
    "winner / best",
    "slowest / best",
    "expected / measured, median of all",
    "planned memory of the winner",
]


def measured_speeds(ranks: int, folder: Path) -> str:
    """Measure this machine with a number of ranks. Return the file."""
    file = folder / f"speeds{ranks}.json"
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    command = [sys.executable, "-m", *torchrun, "titan_launch", "measure-device", "--out", str(file)]
    subprocess.run(command, check=True)
    return str(file)


def main() -> None:
    """Measure the jobs, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="GLOB")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--speeds", metavar="FILE", help="measured speeds, instead of a new measurement")
    parser.add_argument("--kept", type=Path, metavar="FILE", help="rows of earlier commands, to which others are added")
    parser.add_argument("--write", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    start_server()
    kept: Path | None = arguments.kept
    rows: list[Sequence[str]] = [] if kept is None or not kept.exists() else json.loads(kept.read_text())
    with tempfile.TemporaryDirectory() as folder:
        for ranks in arguments.ranks:
            done = {name for name, of_ranks, *_ in rows if of_ranks == str(ranks)}
            if not (names := [name for name in JOBS if fnmatch(name, arguments.only) and name not in done]):
                continue
            speeds = arguments.speeds or measured_speeds(ranks, Path(folder))
            for name in names:
                rows.append(compared(name, ranks, speeds))
                if kept is not None:
                    kept.write_text(json.dumps(rows, indent=1))
    import torch

    table = markdown_table([_HEADER, *rows])
    publish(f"{table}\n\n2 cores, torch {torch.__version__}, gloo.", "measured_layouts", arguments.write)


if __name__ == "__main__":
    main()
