"""Whole runs on gloo ranks: equal at every world size, resumable, and safe against non-finite steps."""

from __future__ import annotations

import gc
import signal
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed import run_ranks
from tests.tensors import assert_equal, full_state
from tests.train.jobs import read_metrics, run_and_interrupt, run_job, run_job_until, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import RunError
from titan_launch.core.signals import RESTART_SIGNAL
from titan_launch.data.sources import build_source
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.train import batches
from titan_launch.train.build import build_run
from titan_launch.train.loop import (
    due_after_step,
    due_now,
    fit,
    report,
    scheduled_garbage_collection,
    train_one_step,
    validation_scalars,
)
from titan_launch.train.step import validate

NOTHING: dict[str, Any] = {}
SAVES = {"checkpoint": {"enable": True, "interval": 4}}
SAVES_LAST = {"checkpoint": {"save_last": True}}
VALIDATES = {"validation": {"freq": 3, "data": {"kind": "synthetic", "vocab_size": 61}}}
SIGNAL = int(signal.SIGTERM)


@pytest.mark.parametrize(
    ("sections", "step", "stop_signal", "save_is_due", "due"),
    [
        (NOTHING, 2, 0, False, ""),
        (NOTHING, 1, 0, False, "report"),  # the first step of the process
        (NOTHING, 5, 0, False, "report"),  # log_freq
        (NOTHING, 12, 0, False, "report"),  # the last step
        (NOTHING, 2, SIGNAL, True, ""),
        (VALIDATES, 3, 0, False, "report validate pool"),
        (VALIDATES, 4, 0, False, ""),
        (VALIDATES, 3, SIGNAL, False, ""),  # a run that stops before its last step does not validate
        (VALIDATES, 12, SIGNAL, False, "report validate pool"),
        (SAVES, 4, 0, False, "report save pool"),
        (SAVES, 12, 0, False, "report save pool"),
        (SAVES, 2, 0, True, "report save pool restore_statistics"),  # interval_minutes
        (SAVES, 2, SIGNAL, False, "report save pool restore_statistics"),
        (SAVES, 2, RESTART_SIGNAL, False, "report save pool restore_statistics"),
        (SAVES, 4, SIGNAL, True, "report save pool"),
        (SAVES_LAST, 4, 0, False, ""),
        (SAVES_LAST, 12, 0, False, "report save pool"),
        (SAVES_LAST, 2, SIGNAL, False, "report save pool restore_statistics"),
        (SAVES_LAST, 2, RESTART_SIGNAL, False, ""),
        (SAVES | VALIDATES, 3, SIGNAL, False, "report save pool"),  # an uninterrupted run validates here too
        (SAVES | VALIDATES, 12, 0, False, "report validate save pool"),
    ],
)
def test_what_is_due_after_a_step(
    sections: dict[str, Any], step: int, stop_signal: int, save_is_due: bool, due: str
) -> None:
    sections = {"training": {"steps": 12}, "metrics": {"log_freq": 5}, **sections}
    config = JobConfig.model_validate(tiny_job(Path("unused"), **sections))
    found = due_after_step(config, step, first_step=1, stop_signal=stop_signal, save_is_due=save_is_due)
    assert {name for name, is_due in vars(found).items() if is_due} == set(due.split())


class Traced(torch.nn.Sequential):
    """A model that records which functions of the launcher call it."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Embedding(61, 8), torch.nn.Linear(8, 61))
        self.callers: list[list[str]] = []

    def forward(self, tokens: Tensor) -> Tensor:
        stack = traceback.extract_stack()
        self.callers.append([frame.name for frame in stack if "/titan_launch/train/" in frame.filename])
        return super().forward(tokens)


def callers_of_forward(folder: Path) -> list[list[str]]:
    job = tiny_job(folder, training={"steps": 2})
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate({**job, "model": {"name": f"{__name__}:Traced"}}), this_rank(), stack)
        fit(run)
        assert isinstance(run.model, Traced)
        return run.model.callers


def test_the_loop_calls_the_model_through_six_functions(tmp_path: Path) -> None:
    """The first step, which is audited, has the same calls as the others."""
    (callers,) = run_ranks(callers_of_forward, 1, tmp_path)
    assert callers == [["fit", "train_one_step", "__call__", "__call__", "forward_backward", "run_model"]] * 8


def losses(folder: Path, tag: str = "train/loss") -> list[float]:
    return [report[tag] for report in read_metrics(folder) if tag in report]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("one_rank")
    return folder, run_ranks(run_job, 1, tiny_job(folder, validation=VALIDATION))[0]


VALIDATION: dict[str, Any] = {
    "freq": 2,
    "local_batch_size": 3,
    "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 7, "seed": 1},
}


@pytest.mark.parametrize(("world_size", "replicate"), [(4, 2), pytest.param(4, 1, marks=pytest.mark.slow)])
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
    run_ranks(run_job, 1, tiny_job(tmp_path, training={"steps": 30, "local_batch_size": 4}, optimizer={"lr": 2e-2}))
    assert losses(tmp_path)[-1] < losses(tmp_path)[0] - 1


@pytest.mark.parametrize(
    ("norm", "param_dtype", "accumulation", "replicate", "async_mode", "num_workers", "ranks"),
    [
        pytest.param("rmsnorm", "float32", "deferred_all_reduce", 2, "disabled", 2, 2, marks=pytest.mark.slow),
        ("batchnorm", "bfloat16", "deferred", 1, "thread", 0, 2),
        pytest.param("batchnorm", "float32", "deferred_all_reduce", 2, "disabled", 0, 4, marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(
    tmp_path: Path,
    norm: str,
    param_dtype: str,
    accumulation: str,
    replicate: int,
    async_mode: str,
    num_workers: int,
    ranks: int,
) -> None:
    def job(name: str) -> dict[str, Any]:
        return tiny_job(
            tmp_path / name,
            model={"args": {"norm": norm, "n_layers": 1}},
            precision={"param_dtype": param_dtype},
            data={"num_workers": num_workers},
            parallelism={"data_parallel_replicate_degree": replicate},
            gradient_accumulation={"mode": accumulation},
            training={"steps": 4, "global_batch_size": 2 * ranks},
            checkpoint={"enable": True, "interval": 2, "async_mode": async_mode},
            lr_scheduler={"kind": "cosine", "warmup_steps": 2},
            validation=VALIDATION,
        )

    uninterrupted = run_ranks(run_and_interrupt, ranks, job("whole"), job("parts"), 3)  # step 3 is lost
    resumed = run_ranks(run_job, ranks, job("parts"))
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert_equal(a, b)
    for tag in ("train/loss", "train/grad_norm", "train/lr", "train/samples_seen", "validation/loss"):
        assert losses(tmp_path / "parts", tag) == losses(tmp_path / "whole", tag), tag


class Recorded:
    """A data source that records the samples that are read."""

    def __init__(self, source: Any, asked: list[int]):
        self._source = source
        self._asked = asked
        self.num_classes = source.num_classes
        self.describe = source.describe
        self.fingerprint = source.fingerprint

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self._asked.append(index)
        sample: tuple[Tensor, Tensor] = self._source[index]
        return sample


def run_recorded_until(job: dict[str, Any], step: int) -> list[int]:
    """Train a job on this rank up to a step. Return the samples that it read, in order."""
    asked: list[int] = []

    def build_recorded(*args: Any) -> Recorded:
        return Recorded(build_source(*args), asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "build_source", build_recorded)
        run_job_until(job, step)
    return asked


@pytest.mark.parametrize(
    "divisions", [((1, 1), (2, 1), (1, 1)), pytest.param(((2, 1), (4, 2), (1, 1)), marks=pytest.mark.slow)], ids=str
)
def test_a_run_resumes_on_another_number_of_ranks(divisions: tuple[tuple[int, int], ...], tmp_path: Path) -> None:
    """`divisions`: the ranks and the replicas of each part of the run."""

    def job(name: str, replicate: int = 1) -> dict[str, Any]:
        return tiny_job(
            tmp_path / name,
            model={"args": {"n_layers": 1}},
            training={"steps": 6},
            checkpoint={"enable": True, "interval": 2},
            parallelism={"data_parallel_replicate_degree": replicate},
        )

    (uninterrupted,) = run_ranks(run_recorded_until, 1, job("whole"), 6)
    for (ranks, replicate), step in zip(divisions, (2, 4, 6), strict=True):
        asked = run_ranks(run_recorded_until, ranks, job("parts", replicate), step)
        samples = sorted(sample for of_rank in asked for sample in of_rank)
        assert samples == sorted(uninterrupted[4 * (step - 2) : 4 * step]), f"{ranks} ranks to step {step}"
    assert len(uninterrupted) == 4 * 6
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    assert len(losses(tmp_path / "parts")) == 6


def fit_without_a_place_to_save(folder: Path) -> str:
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(tiny_job(folder, checkpoint={"save_last": True})), this_rank(), stack)
        (folder / "tiny/checkpoints").touch()
        with pytest.raises(RunError) as error:
            fit(run)
        return str(error.value)


def test_a_last_step_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    (message,) = run_ranks(fit_without_a_place_to_save, 1, tmp_path)
    assert message.startswith(f"step 4 could not be saved to {tmp_path}/tiny/checkpoints: ")
    assert message.endswith("; there is no checkpoint yet")


def test_an_incomplete_checkpoint_is_not_resumed_from(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, training={"steps": 1}, checkpoint={"enable": True})
    run_ranks(run_job, 1, job)
    (tmp_path / "tiny" / "checkpoints" / "step-9.tmp").mkdir()
    (tmp_path / "tiny" / "checkpoints" / "step-8").mkdir()  # a checkpoint without .metadata is incomplete
    run_ranks(run_job, 1, {**job, "training": {**job["training"], "steps": 2}})
    assert [report["step"] for report in read_metrics(tmp_path)] == [1, 2]


def validate_again(job: dict[str, Any]) -> tuple[list[float], dict[str, float], bool]:
    """Train to a validation and validate again. Return running statistics, metrics, and True if nothing has changed."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        for _ in range(3):
            train_one_step(run)
        report(run, due_now(run))
        before = full_state(run.model)
        metrics = validation_scalars(run)
        after = full_state(run.model)
        assert all(isinstance(parameter, DTensor) for parameter in run.model.parameters())  # nothing is left gathered
        statistics = [float(tensor.double().sum()) for name, tensor in after.items() if "running" in name]
        return statistics, metrics, all(map(torch.equal, before.values(), after.values()))


def validate_a_frozen_norm() -> bool:
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    model[0].eval()
    validate(model, [], torch.device("cpu"), CrossEntropy())
    return model.training and model[1].training and not model[0].training


def test_validation_does_not_unfreeze_a_batchnorm() -> None:
    assert run_ranks(validate_a_frozen_norm, 1) == [True]


def test_validation_evaluates_one_model_and_does_not_change_it(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, model={"args": {"norm": "batchnorm"}}, validation={**VALIDATION, "freq": 3})
    (statistics, again, unchanged), (others, others_again, _) = run_ranks(validate_again, 2, job)
    assert unchanged and len(statistics) == 10 and statistics == others  # all ranks have the same pooled statistics
    (reported,) = read_metrics(tmp_path)
    assert {name: reported[name] for name in again} == again == others_again


def test_a_resume_takes_the_optimizer_settings_of_the_config(tmp_path: Path) -> None:
    groups = [{"match": "**.wq.weight", "lr_factor": 0.5}]
    run_ranks(run_job, 1, tiny_job(tmp_path, checkpoint={"enable": True}, training={"steps": 1}))
    changed = {"lr": 1e-2, "weight_decay": 0.3, "beta1": 0.5, "eps": 1e-3, "param_groups": groups}
    checkpoint = {"enable": True, "accept_changes": True}
    job = tiny_job(tmp_path, checkpoint=checkpoint, training={"steps": 2}, optimizer=changed)
    (settings,) = run_ranks(settings_of, 1, job)
    assert {(g["weight_decay"], g["betas"], g["eps"]) for g in settings} == {
        (0.3, (0.5, 0.95), 1e-3),
        (0.0, (0.5, 0.95), 1e-3),
    }
    assert sorted({g["lr_factor"] for g in settings}) == [0.5, 1.0]


def settings_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups after a resume and a step."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        assert run.progress.step == 1
        train_one_step(run)
        return [{k: v for k, v in group.items() if k != "params"} for group in run.optimizer.param_groups]


class PartlyUsed(torch.nn.Module):
    """A model with dropout, with tied parameters, and with a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(61, 16)
        self.dropout = torch.nn.Dropout(0.2)
        self.output = torch.nn.Linear(16, 61, bias=False)
        self.output.weight = self.embedding.weight
        self.unused = torch.nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.dropout(self.embedding(tokens)))


def test_dropout_unused_and_tied_parameters_resume_bitwise(tmp_path: Path) -> None:
    def job(folder: str) -> dict[str, Any]:
        job = tiny_job(tmp_path / folder, checkpoint={"enable": True, "interval": 2})
        return {**job, "model": {"name": f"{__name__}:PartlyUsed"}}

    uninterrupted = run_ranks(run_and_interrupt, 2, job("whole"), job("parts"), 3)
    resumed = run_ranks(run_job, 2, job("parts"))
    for a, b in zip(uninterrupted, resumed, strict=True):
        assert_equal(a, b)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")


class Cycle:
    """An object in a reference cycle, which only the garbage collector frees."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


def test_garbage_is_collected_on_schedule_and_at_no_other_time() -> None:
    with scheduled_garbage_collection(every_steps=3) as collect:
        assert not gc.isenabled()
        for step in (1, 2):
            Cycle()
            collect(step)
        assert Cycle.alive == 2
        collect(3)
        assert Cycle.alive == 0
    assert gc.isenabled()
