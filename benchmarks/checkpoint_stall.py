"""Cost of a checkpoint by `checkpoint.async_mode`: seconds that training waits, and the slowdown of its steps.

    torchrun --nproc-per-node 2 benchmarks/checkpoint_stall.py --write docs/verification/cpu.md

The script trains a Llama of 52 million parameters (208 MB in fp32, 624 MB with AdamW's state) on the ranks of this
machine. Every round first times some steps without a checkpoint. Then it begins a checkpoint, and times the steps until
the checkpoint is complete. The slowdown is the ratio of the medians over all rounds of one run, so other load on the
machine affects both sides. The script prints a table, and writes it between the markers of a Markdown file.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from publishing import publish

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.checkpoint import AsyncMode
from titan_launch.core.process import exit_process
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.process_group import Ranks, process_group
from titan_launch.train.build import build_run
from titan_launch.train.loop import train_one_step
from titan_launch.train.run import Run

ROUNDS, STEPS_ALONE = 4, 6


@dataclass(frozen=True)
class Figures:
    """Medians over the rounds of one mode, in seconds."""

    stall: float
    writing: float
    """Time from the call to the end of the save."""

    step_alone: float
    step_meanwhile: float | None
    """Time of a step during a save; None if no step runs during a save."""

    megabytes: float


def measure(mode: AsyncMode, ranks: Ranks, folder: Path) -> Figures:
    """Measure one mode."""
    with ExitStack() as stack:
        run = build_run(job(mode, folder), ranks, stack)
        assert run.checkpoints is not None
        for _ in range(3):
            train_one_step(run)
        save_and_train(run)  # the first save also allocates the copy, and may wait for the start of the writer process
        stalls, writings, alone, meanwhile = [], [], [], []
        for _ in range(ROUNDS):
            alone += [timed_step(run) for _ in range(STEPS_ALONE)]
            stall, writing, steps = save_and_train(run)
            stalls.append(stall)
            writings.append(writing)
            meanwhile += steps
        latest = run.output.folder.path / "checkpoints/latest"
        size = on_rank_0(lambda: sum(f.stat().st_size for f in latest.resolve().iterdir()))
    return Figures(
        statistics.median(stalls),
        statistics.median(writings),
        statistics.median(alone),
        statistics.median(meanwhile) if meanwhile else None,
        size / 1e6,
    )


def save_and_train(run: Run) -> tuple[float, float, list[float]]:
    """Save once, and train until the save is complete.

    Return the seconds that training waited, the seconds until the save was complete, and the seconds of each step.
    """
    assert run.checkpoints is not None
    start = time.perf_counter()
    run.checkpoints.save()
    stall = time.perf_counter() - start
    steps = []
    while is_being_written(run):
        steps.append(timed_step(run))
    run.checkpoints.finish()
    return stall, time.perf_counter() - start, steps


def is_being_written(run: Run) -> bool:
    """Return True if the save is in flight on any rank: all ranks must run the same number of steps. Collective."""
    assert run.checkpoints is not None
    flag = torch.tensor(int(run.checkpoints.poll()))
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag)


def timed_step(run: Run) -> float:
    """Run one step, and return its seconds."""
    start = time.perf_counter()
    train_one_step(run)
    return time.perf_counter() - start


def job(mode: AsyncMode, folder: Path) -> JobConfig:
    """Return a job with many parameters and short steps."""
    args = {"dim": 1024, "n_layers": 4, "n_heads": 8, "n_kv_heads": 8, "hidden_dim": 2816, "vocab_size": 256}
    sections = {
        "job": {"name": mode, "dump_folder": str(folder), "device": "cpu"},
        "model": {"args": args},
        "data": {"kind": "synthetic", "vocab_size": 256},
        "training": {"seq_len": 64, "local_batch_size": 1, "global_batch_size": 2, "steps": 10_000},
        "precision": {"param_dtype": "float32"},
        "checkpoint": {"enable": True, "async_mode": mode, "keep_latest": 1},
        "metrics": {"enable_tensorboard": False},
        "debug": {"audit_precision": False},
    }
    return JobConfig.model_validate(sections)


def as_table(figures: dict[AsyncMode, Figures]) -> str:
    """Return a Markdown table and a line with the machine."""
    lines = [
        "| `async_mode` | training waits | save complete after | step without a save | step during a save | slowdown |",
        "|---|---|---|---|---|---|",
    ]
    for mode, f in figures.items():
        step, factor = "none", "-"
        if f.step_meanwhile is not None:
            step, factor = f"{f.step_meanwhile:.3f} s", f"{f.step_meanwhile / f.step_alone:.2f}"
        lines.append(f"| `{mode}` | {f.stall:.3f} s | {f.writing:.2f} s | {f.step_alone:.3f} s | {step} | {factor} |")
    size = max(f.megabytes for f in figures.values())
    where = f"{os.cpu_count()} cores, {platform.system()}, torch {torch.__version__}, {dist.get_world_size()} ranks"
    return "\n".join([*lines, "", f"A checkpoint of {size:.0f} MB; {where}; medians of {ROUNDS} saves."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    arguments = parser.parse_args()
    modes: tuple[AsyncMode, ...] = ("disabled", "thread", "process")
    with process_group("cpu", 600) as ranks, ExitStack() as stack:
        folder = on_rank_0(lambda: Path(stack.enter_context(tempfile.TemporaryDirectory())))
        figures = {mode: measure(mode, ranks, folder) for mode in modes}
        if ranks.is_rank_0:
            publish(as_table(figures), "checkpoint_stall", arguments.write)


if __name__ == "__main__":
    main()
    exit_process(0)
