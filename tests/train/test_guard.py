"""The decision to leave a step out: common to all ranks, and without traces."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.jobs import assert_equal, this_rank, tiny_job, whole_state
from titan_launch.config.job import JobConfig
from titan_launch.errors import RunError
from titan_launch.train.build import build_run
from titan_launch.train.guard import NonFiniteGuard
from titan_launch.train.loop import train_one_step

CPU = torch.device("cpu")


def decide(action: Any, bad_rank: int, values: tuple[float, float]) -> tuple[list[float], int, str]:
    """Three steps, of which one rank finds the second not finite: the decisions, the count, and the error."""
    guard = NonFiniteGuard(action, CPU)
    decisions = []
    for step in range(3):
        is_bad = step == 1 and dist.get_rank() == bad_rank
        loss, norm = values if is_bad else (1.0, 1.0)
        decisions.append(guard.check(torch.tensor(loss), torch.tensor(norm)).item())
    try:
        guard.raise_if_stopped(13)  # the run was resumed at step 10
    except RunError as error:
        return decisions, guard.take_skipped(), str(error)
    return decisions, guard.take_skipped(), ""


@pytest.mark.parametrize("values", [(math.nan, 1.0), (1.0, math.inf)])
def test_one_rank_decides_for_all(values: tuple[float, float]) -> None:
    for decisions, skipped, error in run_ranks(decide, 2, "skip", 1, values):
        assert (decisions, skipped, error) == ([0, 1, 0], 1, "")


def test_stop_leaves_out_all_that_follow_and_names_the_step() -> None:
    for decisions, skipped, error in run_ranks(decide, 2, "stop", 0, (math.nan, 1.0)):
        assert (decisions, skipped) == ([0, 1, 1], 2)
        assert error.startswith("step 12:")


def train_with_poison(job: dict[str, Any], bad_step: int, bad_rank: int) -> tuple[list[dict[str, Tensor]], str]:
    """Train while one rank's activations are infinite at one step; the state after every step, and the outcome."""
    states = []
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        embedding = run.model.get_submodule("tok_embeddings")
        embedding.register_forward_hook(
            lambda _module, _inputs, x: (
                x * math.inf if run.progress.step + 1 == bad_step and run.ranks.rank == bad_rank else x
            )
        )
        try:
            while run.progress.step < job["training"]["steps"]:
                train_one_step(run)
                states.append(whole_state(run.model))
        except RunError as error:
            return states, str(error)
        return states, f"skipped {run.guard.take_skipped()}"


@pytest.mark.parametrize("norm", ["rmsnorm", "batchnorm"])
def test_a_step_that_is_left_out_changes_nothing(tmp_path: Path, norm: str) -> None:
    job = tiny_job(
        tmp_path,
        model={"args": {"norm": norm}},
        debug={"on_nonfinite": "skip"},
        parallelism={"data_parallel_replicate_degree": 2},
    )
    for states, message in run_ranks(train_with_poison, 4, job, 2, 3):
        assert_equal(states[0], states[1])  # running statistics included
        assert not torch.equal(states[1]["output.weight"], states[2]["output.weight"])
        assert all(bool(tensor.isfinite().all()) for tensor in states[-1].values())
        assert message == "skipped 1"


def test_a_non_finite_step_stops_the_run(tmp_path: Path) -> None:
    for states, message in run_ranks(train_with_poison, 2, tiny_job(tmp_path), 3, 1):
        assert len(states) == 2
        assert message.startswith("step 3: the loss or the gradient is not finite")
