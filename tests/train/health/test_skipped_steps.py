"""Skipped steps: records with their samples, and the stop or the return to a checkpoint after too many of them in a
row."""

from __future__ import annotations

import json
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, nn

from tests.distributed import run_ranks
from tests.tensors import assert_equal, full_state
from tests.train.jobs import TINY_EXPERTS, read_metrics, this_rank, tiny_job
from titan_launch.checkpoint.state import Progress
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import RunError
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import build_tokenizer
from titan_launch.train.build import build_run
from titan_launch.train.health import skipped_steps
from titan_launch.train.health.skipped_steps import MAX_RECORDS
from titan_launch.train.loop import fit, train_one_step
from titan_launch.train.run import Run


def job_with(folder: Path, steps: int, **debug: Any) -> dict[str, Any]:
    """Return a job with checkpoints after steps 3, 6, ..., and two microbatches of one sample on each of two ranks."""
    return tiny_job(
        folder,
        model={"args": {"n_layers": 1}},
        training={"steps": steps},
        debug={"on_nonfinite": "skip", "max_skips": 2, **debug},
        checkpoint={"enable": True, "interval": 3},
        lr_scheduler={"kind": "warmup_stable_decay", "decay_ratio": 0.0},
    )


def poison(run: Run, bad: range, inputs: dict[int, list[Tensor]]) -> None:
    """Make the last rank's activations infinite in steps that begin at one of these positions. Record the inputs of
    these steps by position."""

    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        position = run.progress.data_position
        if position not in bad:
            return output
        inputs.setdefault(position, []).append(args[0])
        return output * (math.inf if run.ranks.rank == run.ranks.world_size - 1 else 1.0)

    run.model.get_submodule("tok_embeddings").register_forward_hook(hook)


def train_poisoned(job: dict[str, Any], bad: range) -> tuple[dict[str, Tensor], str, dict[int, list[Tensor]]]:
    """Train on poisoned data. Return the parameters at the end, the error that ended the run, and the inputs of the
    poisoned steps."""
    inputs: dict[int, list[Tensor]] = {}
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        poison(run, bad, inputs)
        try:
            fit(run)
        except RunError as error:
            return full_state(run.model), str(error), inputs
        return full_state(run.model), "", inputs


def train_past(job: dict[str, Any], step: int, position: int) -> dict[str, Tensor]:
    """Train without bad numbers, but continue from another data position after a step."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        while run.progress.step < job["training"]["steps"]:
            if run.progress.step == step:
                run.batches.train.move_to(position)
            train_one_step(run)
        return full_state(run.model)


BAD = range(16, 24)  # steps 5 and 6


def test_a_run_returns_to_its_checkpoint_and_skips_the_bad_data(tmp_path: Path) -> None:
    job = job_with(tmp_path / "run", 6, on_repeated_skips="rollback")
    reference = run_ranks(train_past, 2, job_with(tmp_path / "reference", 7), 3, 24)
    first = run_ranks(train_poisoned, 2, job, BAD)
    assert [message for _, message, _ in first] == ["", ""]
    resumed = run_ranks(train_poisoned, 2, {**job, "training": {**job["training"], "steps": 7}}, BAD)
    for (state, _, inputs), expected in zip(resumed, reference, strict=True):
        # The run has skipped the samples of steps 4 to 6, and the resume did not return to them.
        assert_equal(state, expected)
        assert not inputs

    reports = read_metrics(tmp_path / "run")
    assert [report["step"] for report in reports] == list(range(1, 8))
    assert [report["train/rollbacks"] for report in reports] == [0] * 3 + [1] * 4
    assert [report["train/epoch"] * 40 for report in reports[2:5]] == [12, 28, 32]
    assert reports[-1]["train/skipped_steps"] == 0
    rolled_back = (tmp_path / "run" / "tiny" / "metrics.rolled_back.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in rolled_back] == [4, 5]

    config = JobConfig.model_validate(job)
    source = build_source(config.data, build_tokenizer(config.tokenizer), config.training.seq_len, ("data",), None)
    for step, position in ((5, 16), (6, 20)):
        record = json.loads((tmp_path / "run" / "tiny" / "skipped_steps" / f"step-{step}.json").read_text())
        assert (record["step"], record["reason"], record["data_position"]) == (step, "nonfinite", position)
        assert [math.isfinite(float(rank["loss"])) for rank in record["ranks"]] == [True, False]
        for rank in record["ranks"]:
            given = first[rank["rank"]][2][position]
            named = [torch.stack([source[index][0] for index in samples]) for samples in rank["samples"]]
            assert len(given) == len(named) == 2 and all(map(torch.equal, given, named))


def test_the_first_report_after_a_rollback_covers_only_the_repeated_steps(tmp_path: Path) -> None:
    metrics = ("train/loss", "experts/balance_loss", "experts/z_loss")
    means = []
    for log_freq in (1, 100):
        job = job_with(tmp_path / str(log_freq), 6, on_repeated_skips="rollback")
        job["model"]["args"]["experts"] = {**TINY_EXPERTS, "first_dense_layers": 0}
        job["metrics"]["log_freq"] = log_freq
        ((_, error, _),) = run_ranks(train_poisoned, 1, job, BAD)
        assert not error
        reports = [report for report in read_metrics(tmp_path / str(log_freq)) if report["step"] > 3]
        assert len(reports) == (3 if log_freq == 1 else 1) and reports[0]["train/rollbacks"] == 1
        means.append([sum(report[name] for report in reports) / len(reports) for name in metrics])
    assert means[1] == pytest.approx(means[0])


def test_a_return_to_a_checkpoint_recomputes_the_scales_of_float8_all_gather(tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    jobs = [job_with(tmp_path / name, 6, on_repeated_skips="rollback") for name in ("run", "other")]
    for job in jobs:
        job["precision"] = {"param_dtype": "bfloat16"}
        job["float8"] = {"enable": True, "emulate": True, "recipe": "tensorwise", "all_gather": True}
    [(state, error, _), _] = run_ranks(train_poisoned, 2, jobs[0], BAD)
    assert not error
    assert [report["train/rollbacks"] for report in read_metrics(tmp_path / "run")][-1] == 1
    assert_equal(run_ranks(train_past, 2, jobs[1], 3, BAD.stop)[0], state)


def test_the_record_of_a_stream_names_no_samples(tmp_path: Path) -> None:
    job = job_with(tmp_path, 1)
    job["model"]["args"]["vocab_size"] = 257
    job["data"] = {"kind": "tests.data.sources.test_factory:Stream", "shuffle": False}
    job["debug"]["max_skips"] = 1
    ((_, message, _),) = run_ranks(train_poisoned, 1, job, range(4))
    path = tmp_path / "tiny" / "skipped_steps" / "step-1.json"
    assert message.endswith(f"The numbers of the step are in {path}")
    assert [rank["samples"] for rank in json.loads(path.read_text())["ranks"]] == [None]


def test_a_run_returns_to_a_checkpoint_a_limited_number_of_times(tmp_path: Path) -> None:
    job = job_with(tmp_path, 8, on_repeated_skips="rollback", max_rollbacks=2)
    ((_, message, _),) = run_ranks(train_poisoned, 1, job, range(16, 1000))
    assert message.startswith("step 5: the loss or the gradient is not finite")
    assert "it has gone back to a checkpoint 2 times already (debug.max_rollbacks = 2)" in message
    assert str(tmp_path / "tiny" / "skipped_steps" / "step-5.rollback-2.json") in message


def test_a_run_without_a_checkpoint_stops_with_an_error(tmp_path: Path) -> None:
    job = job_with(tmp_path, 8, on_repeated_skips="rollback")
    ((_, message, _),) = run_ranks(train_poisoned, 1, job, range(8))
    assert "The run stops, because it has saved no checkpoint since its start; set a smaller" in message


def test_a_checkpoint_of_a_later_data_position_gives_no_negative_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier start excluded the position in the data from loading."""
    run = MagicMock(progress=Progress(step=1100, samples_seen=400))

    def return_to_last() -> Path:
        run.progress.step, run.progress.samples_seen = 1000, 4000
        return Path("step-1000")

    run.checkpoints.return_to_last = return_to_last
    monkeypatch.setattr(skipped_steps, "set_timeouts", lambda seconds: None)
    skipped_steps._go_back(run, "")
    assert (run.progress.step, run.progress.samples_seen, run.progress.samples_skipped) == (1000, 400, 0)


def test_too_many_skipped_steps_stop_the_run_and_a_resume_continues_the_count(tmp_path: Path) -> None:
    job = job_with(tmp_path, 3)
    bad = range(8, 16)  # steps 3 and 4
    assert run_ranks(train_poisoned, 1, job, bad)[0][1] == ""
    faults = tmp_path / "tiny" / "skipped_steps"
    for number in range(MAX_RECORDS):
        (faults / f"step-{number + 100}.json").touch()
    ((_, message, _),) = run_ranks(train_poisoned, 1, {**job, "training": {**job["training"], "steps": 8}}, bad)
    assert message.startswith("step 4: ") and "(debug.max_skips = 2), and the run stops" in message
    assert (faults / "step-4.json").exists()  # the step that ends the run is always recorded
