"""Whole runs on gloo ranks: equal at every world size, resumable, and safe against non-finite steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, run_job_until, tiny_job


def losses(folder: Path, tag: str = "train/loss") -> list[float]:
    return [report[tag] for report in read_metrics(folder) if tag in report]


def assert_equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("one_rank")
    return folder, run_ranks(run_job, 1, tiny_job(folder, validation=VALIDATION))[0]


VALIDATION: dict[str, Any] = {
    "freq": 2,
    "local_batch_size": 3,
    "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 7, "seed": 1},
}


@pytest.mark.parametrize(("world_size", "replicate"), [(2, 1), (4, 1), (4, 2)])
def test_the_number_of_ranks_does_not_change_the_run(
    tmp_path: Path, one_rank: tuple[Path, dict[str, Tensor]], world_size: int, replicate: int
) -> None:
    parallelism = {"data_parallel_replicate_degree": replicate}
    states = run_ranks(run_job, world_size, tiny_job(tmp_path, parallelism=parallelism, validation=VALIDATION))
    for tag in ("train/loss", "train/grad_norm", "validation/loss"):
        assert losses(tmp_path, tag) == pytest.approx(losses(one_rank[0], tag), rel=1e-6), tag
    for name, tensor in one_rank[1].items():
        torch.testing.assert_close(states[0][name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_the_loss_falls(tmp_path: Path) -> None:
    run_ranks(run_job, 1, tiny_job(tmp_path, training={"steps": 60, "local_batch_size": 4}))
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 1


@pytest.mark.parametrize("norm", ["rmsnorm", "batchnorm"])
@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tmp_path: Path, norm: str, param_dtype: str) -> None:
    def job(name: str) -> dict[str, Any]:
        return tiny_job(
            tmp_path / name,
            model={"args": {"norm": norm}},
            precision={"param_dtype": param_dtype},
            training={"steps": 6},
            checkpoint={"enable": True, "interval": 3},
            lr_scheduler={"kind": "cosine", "warmup_steps": 2},
            validation=VALIDATION,
        )

    whole = run_ranks(run_job, 2, job("whole"))
    run_ranks(run_job_until, 2, job("parts"), 5)  # steps 4 and 5 are lost
    resumed = run_ranks(run_job, 2, job("parts"))
    for a, b in zip(whole, resumed, strict=True):
        assert_equal(a, b)
    for tag in ("train/loss", "train/grad_norm", "train/lr", "train/samples_seen", "validation/loss"):
        assert losses(tmp_path / "parts", tag) == losses(tmp_path / "whole", tag), tag


@pytest.mark.parametrize(("first", "second"), [(2, 4), (4, 1)])
def test_a_run_resumes_on_another_number_of_ranks(tmp_path: Path, first: int, second: int) -> None:
    def job(name: str, steps: int) -> dict[str, Any]:
        return tiny_job(
            tmp_path / name,
            training={"steps": steps},
            checkpoint={"enable": True},
            lr_scheduler={"kind": "warmup_stable_decay", "decay_ratio": 0.0},
        )

    whole = run_ranks(run_job, 1, job("whole", 6))[0]
    run_ranks(run_job, first, job("parts", 3))
    resumed = run_ranks(run_job, second, job("parts", 6))[0]
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-6)
    for name, tensor in whole.items():
        torch.testing.assert_close(resumed[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


def test_an_incomplete_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, checkpoint={"enable": True, "interval": 2})
    run_ranks(run_job, 1, job)
    (tmp_path / "tiny" / "checkpoints" / "step-9.tmp").mkdir()
    (tmp_path / "tiny" / "checkpoints" / "step-8").mkdir()  # without .metadata: not complete
    run_ranks(run_job, 1, {**job, "training": {**job["training"], "steps": 5}})
    assert [report["step"] for report in read_metrics(tmp_path)] == [1, 2, 3, 4, 5]


def train_with_poison(job: dict[str, Any], bad_step: int, bad_rank: int) -> tuple[list[dict[str, Tensor]], str]:
    """Train while one rank's loss is NaN at one step; the state after every step, and the error at the end."""
    from contextlib import ExitStack

    from tests.train.jobs import this_rank, whole_state
    from titan_launch.config.job import JobConfig
    from titan_launch.errors import RunError
    from titan_launch.train.build import build_run
    from titan_launch.train.loop import train_one_step

    states = []
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        hook = run.model.register_forward_hook(
            lambda _module, _inputs, logits: (
                logits * math.nan if run.progress.step + 1 == bad_step and run.ranks.rank == bad_rank else logits
            )
        )
        try:
            while run.progress.step < job["training"]["steps"]:
                train_one_step(run)
                states.append(whole_state(run.model))
        except RunError as error:
            return states, str(error)
        finally:
            hook.remove()
        return states, f"skipped {run.guard.take_skipped()}"


def test_a_non_finite_loss_on_one_rank_is_skipped_on_all(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, debug={"on_nonfinite": "skip"}, parallelism={"data_parallel_replicate_degree": 2})
    for states, message in run_ranks(train_with_poison, 4, job, 2, 3):
        assert_equal(states[0], states[1])
        assert not torch.equal(states[1]["output.weight"], states[2]["output.weight"])
        assert all(bool(tensor.isfinite().all()) for tensor in states[-1].values())
        assert message == "skipped 1"


def test_a_non_finite_loss_stops_the_run_and_names_the_step(tmp_path: Path) -> None:
    for states, message in run_ranks(train_with_poison, 2, tiny_job(tmp_path), 3, 1):
        assert len(states) == 2
        assert message.startswith("step 3: the loss or the gradient is not finite")
