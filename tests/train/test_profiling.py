"""Profiles of steps: by the job, and by a signal."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.distributed import run_ranks
from tests.train.jobs import run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.train.build import build_run
from titan_launch.train.loop import fit, train_one_step
from titan_launch.train.profiling import SIGNAL


def profiled(folder: Path) -> None:
    run_job(tiny_job(folder, profiling={"start_step": 2, "num_steps": 2, "ranks": [1]}))


def names_in(trace: Path) -> set[str]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return {event["name"] for event in events}


def test_a_window_of_steps_is_profiled_on_the_chosen_rank(tmp_path: Path) -> None:
    run_ranks(profiled, 2, tmp_path)
    folder = tmp_path / "tiny" / "profiling"
    assert sorted(file.name for file in folder.iterdir()) == ["step-3_rank-1.json.gz", "step-3_rank-1.txt"]
    names = names_in(folder / "step-3_rank-1.json.gz")
    phases = {"step 2", "step 3", "microbatch 0", "microbatch 1", "forward", "backward", "optimizer", "communication"}
    assert {*phases, "aten::mm"} <= names and not {"step 1", "step 4"} & names
    table = (
        folder / "step-3_rank-1.txt"
    ).read_text()  # the 30 operations that took longest, so under load not aten::mm
    assert table.count("aten::") > 3 and "Self CPU time total" in table


def signalled(folder: Path) -> None:
    assert SIGNAL is not None
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(tiny_job(folder)), this_rank(), stack)
        train_one_step(run)
        if dist.get_rank() == 0:
            os.kill(os.getpid(), SIGNAL)
        fit(run)


def test_a_signal_profiles_the_next_step_of_a_rank(tmp_path: Path) -> None:
    run_ranks(signalled, 2, tmp_path)
    folder = tmp_path / "tiny" / "profiling"
    assert sorted(file.name for file in folder.iterdir()) == ["step-2_rank-0.json.gz", "step-2_rank-0.txt"]
