"""Profiles of steps: by the job, and by a signal."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.train.jobs import run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.train.build import Surroundings, build_run
from titan_launch.train.health.coordination import StopRequest
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


def rolled_back(folder: Path) -> None:
    """Go back from step 4, the first step of the profile, to step 2. End the run after step 5, before the last step of
    the profile."""
    job = tiny_job(
        folder,
        profiling={"start_step": 4, "num_steps": 3},
        training={"steps": 6},
        debug={"on_nonfinite": "skip", "max_skips": 1, "on_repeated_skips": "rollback"},
        checkpoint={"enable": True, "interval": 2},
        lr_scheduler={"kind": "constant"},
    )
    with ExitStack() as stack:
        stop = StopRequest()
        run = build_run(JobConfig.model_validate(job), this_rank(), stack, Surroundings(stop=stop))

        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            stop.signal = signal.SIGTERM if run.progress.step == 4 else 0
            return output * (math.inf if run.progress.step == 3 and not run.progress.rollbacks else 1.0)

        run.model.get_submodule("tok_embeddings").register_forward_hook(hook)
        fit(run)


@pytest.mark.slow
def test_a_profile_is_written_if_a_rollback_or_the_end_of_the_run_leaves_its_window(tmp_path: Path) -> None:
    run_ranks(rolled_back, 1, tmp_path)
    folder = tmp_path / "tiny" / "profiling"
    steps = {path: {name for name in names_in(path) if name.startswith("step ")} for path in folder.glob("*.gz")}
    assert {path.name: found for path, found in steps.items()} == {
        "step-4_rank-0.json.gz": {"step 4"},
        "step-5_rank-0.json.gz": {"step 4", "step 5"},
    }


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
