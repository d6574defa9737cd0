"""The decision to skip a step is common to all ranks, leaves no trace, and is the same after a resume."""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.tensors import assert_equal, full_state
from tests.train.jobs import this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.run import DebugConfig
from titan_launch.core.errors import RunError
from titan_launch.train.build import build_run
from titan_launch.train.health.skipped_steps import act_on_skipped_steps
from titan_launch.train.health.step_guard import SkippedStep, StepGuard
from titan_launch.train.loop import train_one_step

CPU = torch.device("cpu")


def decide(
    config: DebugConfig, bad_rank: int, values: list[tuple[float, float]]
) -> tuple[list[float], list[SkippedStep]]:
    """Run steps in which one rank has these losses and norms, and the others have ones. Return the decisions and the
    skipped steps."""
    guard = StepGuard(config, CPU)
    decisions = []
    for pair in values:
        loss, norm = pair if dist.get_rank() == bad_rank else (1.0, 1.0)
        decisions.append(guard.check(torch.tensor(loss), torch.tensor(norm)).item())
    return decisions, guard.pop_skipped_steps(12)  # the run resumed before step 13 - len(values)


GOOD = (1.0, 1.0)


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf)])
def test_a_bad_step_of_one_rank_is_skipped_on_all_ranks(bad: tuple[float, float]) -> None:
    config = DebugConfig(on_nonfinite="skip")
    for rank, (decisions, skipped) in enumerate(run_ranks(decide, 2, config, 1, [GOOD, bad, GOOD])):
        assert decisions == [0, 1, 0]
        (skipped_step,) = skipped
        assert (skipped_step.step, skipped_step.reason, skipped_step.is_last) == (11, "nonfinite", False)
        # Rank 1 has the bad batch.
        assert math.isfinite(skipped_step.own_loss) == (rank == 0 or math.isfinite(bad[0]))


def test_after_a_stop_all_steps_are_skipped() -> None:
    for decisions, skipped in run_ranks(decide, 2, DebugConfig(), 0, [GOOD, (math.nan, 1.0), GOOD]):
        assert decisions == [0, 1, 1]
        (skipped_step,) = skipped
        assert skipped_step.step == 11 and skipped_step.is_last


def test_consecutive_skipped_steps_are_counted() -> None:
    bad = (math.inf, 1.0)
    values = [bad, bad, GOOD, bad, bad, bad, GOOD]
    for decisions, skipped in run_ranks(decide, 2, DebugConfig(on_nonfinite="skip", max_skips=3), 0, values):
        assert decisions == [1, 1, 0, 1, 1, 1, 1]  # nothing is updated after the third
        assert [skipped_step.step for skipped_step in skipped] == [6, 7, 9, 10, 11]
        assert [skipped_step.is_last for skipped_step in skipped] == [False, False, False, False, True]


LOSSES = [9.0, 3.0, 3.1, 2.9, 3.05, 3.0, 3.1, 8.0, 3.0, 3.2, 9.5, 3.1]
SPIKES = DebugConfig(spike_sigma=3.0, spike_window=6)


def find_spikes(saved_before: int) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Feed half of each loss on either rank to a guard that is saved and restored on the way. Return the decisions, the
    limits, and the guard's last state."""
    guard, decisions, limits = StepGuard(SPIKES, CPU), [], []
    for index, loss in enumerate(LOSSES):
        if index == saved_before:
            state, guard = guard.state_dict(), StepGuard(SPIKES, CPU)
            guard.load_state_dict(state)
        decisions.append(guard.check(torch.tensor(loss / 2), torch.tensor(1.0)).item())
        limits += [skipped_step.loss_limit for skipped_step in guard.pop_skipped_steps(index)]
    return decisions, limits, guard.state_dict()  # type: ignore[return-value]


def test_a_spike_is_relative_to_the_steps_that_were_not_skipped() -> None:
    trained, decisions, limits = list[float](), [], []
    for loss in LOSSES:
        window = trained[-6:]
        limit = statistics.fmean(window) + 3 * statistics.pstdev(window) if len(window) >= 3 else math.inf
        decisions.append(float(loss > limit))
        (limits if loss > limit else trained).append(limit if loss > limit else loss)
    assert decisions == [0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 0]
    for found in run_ranks(find_spikes, 2, 9):
        assert found[0] == decisions
        assert found[1] == pytest.approx(limits, rel=1e-6)


def test_a_restored_guard_continues_bitwise() -> None:
    (_, limits, state), *_ = run_ranks(find_spikes, 2, 9)
    (_, uninterrupted, same), *_ = run_ranks(find_spikes, 2, 10**9)
    assert limits == uninterrupted
    assert_equal(state, same)


def test_a_spike_does_not_count_as_not_finite() -> None:
    """`on_nonfinite = "stop"` continues after a spike."""
    (_, limits, state), *_ = run_ranks(find_spikes, 1, 10**9)
    assert len(limits) == 2 and state["skips"] == 0


SHARED = ({"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2})
"""Divisions in which ranks have the same samples. Their losses and norms must count once."""


def train_with_spikes(folder: Path) -> list[list[tuple[float, float]]]:
    """Train jobs whose learning rate is far too high. Return loss and gradient norm of every skipped step."""
    found = []
    for index, parallelism in enumerate(SHARED if dist.get_world_size() == 2 else ({},)):
        job = tiny_job(
            folder / str(index),
            model={"args": {"vocab_size": 64}},
            data={"vocab_size": 64},
            training={"local_batch_size": 2},
            optimizer={"lr": 0.3, "eps": 1e-5},
            parallelism=parallelism,
            debug={"spike_sigma": 0.5, "spike_window": 2},
        )
        with ExitStack() as stack:
            run = build_run(JobConfig.model_validate(job), this_rank(), stack)
            for _ in range(4):
                train_one_step(run)
            steps = run.step.guard.pop_skipped_steps(4)
        assert [(each.step, each.reason) for each in steps] == [(step, "spike") for step in (2, 3, 4)]
        found.append([(skipped_step.loss, skipped_step.grad_norm) for skipped_step in steps])
    return found


def test_spikes_do_not_depend_on_the_division_of_ranks(tmp_path: Path) -> None:
    ((alone,),) = run_ranks(train_with_spikes, 1, tmp_path / "1")
    for of_rank in run_ranks(train_with_spikes, 2, tmp_path / "2"):
        for spikes in of_rank:
            for spike, expected in zip(spikes, alone, strict=True):
                assert spike == pytest.approx(expected, rel=1e-5)


def train_with_poison(job: dict[str, Any], bad_step: int, bad_rank: int) -> tuple[list[dict[str, Tensor]], str]:
    """Train while one rank's activations are infinite at one step. Return the state after every step, and the
    outcome."""
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
                act_on_skipped_steps(run)
                states.append(full_state(run.model))
        except RunError as error:
            return states, str(error)
        return states, f"skipped {run.progress.skipped_steps}"


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    job = tiny_job(
        tmp_path,
        model={"args": {"norm": "batchnorm", "n_layers": 1}},
        training={"steps": 3},
        debug={"on_nonfinite": "skip"},
        parallelism={"data_parallel_replicate_degree": 2},
    )
    for states, message in run_ranks(train_with_poison, 4, job, 2, 3):
        assert_equal(states[0], states[1])  # this includes running statistics
        assert not torch.equal(states[1]["output.weight"], states[2]["output.weight"])
        assert all(bool(tensor.isfinite().all()) for tensor in states[-1].values())
        assert message == "skipped 1"


def test_a_non_finite_step_stops_the_run(tmp_path: Path) -> None:
    for states, message in run_ranks(train_with_poison, 2, tiny_job(tmp_path), 3, 1):
        assert len(states) == 2
        assert message.startswith("step 3: the loss or the gradient is not finite (loss nan, on rank 1; gradient norm")
        assert f"The samples of the step are in {tmp_path / 'tiny' / 'skipped_steps' / 'step-3.json'}" in message
