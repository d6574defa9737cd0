"""Run folders: nothing is overwritten, mixed up or lost."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.train.jobs import run_job, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.errors import ConfigError, UserError
from titan_launch.train.folder import prepare_run_folder, record_config


def prepare(folder: Path, stack: ExitStack | None = None, **sections: dict[str, Any]) -> None:
    """Prepare and record a run's folder as a process would; without a stack of the caller's, the process ends."""
    config = JobConfig.model_validate(tiny_job(folder, **sections))
    with ExitStack() as own:
        prepare_run_folder(folder / "tiny", config, own if stack is None else stack)
        record_config(folder / "tiny", config)


def test_an_earlier_run_is_moved_aside_as_a_whole(tmp_path: Path) -> None:
    for number in range(3):
        prepare(tmp_path)
        (tmp_path / "tiny" / "metrics.jsonl").write_text(str(number))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny", "tiny.1", "tiny.2"]
    assert [(tmp_path / n / "metrics.jsonl").read_text() for n in ("tiny.1", "tiny.2", "tiny")] == ["0", "1", "2"]


def test_a_folder_that_is_not_a_runs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"job\.name: .*exists and is not a run's"):
        prepare(tmp_path)
    assert [p.name for p in (tmp_path / "tiny").iterdir()] == ["thesis.txt"]


def test_two_runs_cannot_write_into_one_folder(tmp_path: Path) -> None:
    with ExitStack() as first:
        prepare(tmp_path, first)
        (message,) = run_ranks(attempt, 1, tiny_job(tmp_path))  # a process of its own, as the locks are
        assert "another run is writing" in message
        assert [p.name for p in tmp_path.iterdir()] == ["tiny"]
    prepare(tmp_path)


def hold(folder: Path) -> int:
    """Prepare a folder and die; a child, like a data worker, lives on. Returns the child's number."""
    with ExitStack() as stack:
        prepare(folder, stack)
        child = os.fork()
        if not child:
            time.sleep(20)
            os._exit(0)
        return child


def test_a_lock_does_not_outlive_its_process(tmp_path: Path) -> None:
    (child,) = run_ranks(hold, 1, tmp_path)
    try:
        prepare(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_changed_configuration_is_logged_key_by_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = tiny_job(tmp_path)
    after = tiny_job(tmp_path, training={"steps": 9}, validation={"freq": 0, "max_samples": 3})
    caplog.set_level("INFO", logger="titan_launch")
    for job in (before, after):
        record_config(tmp_path, JobConfig.model_validate(job))
    assert [record.getMessage() for record in caplog.records] == [
        "changed since the run began: training.steps was 4, is 9",
        "changed since the run began: validation.max_samples was unset, is 3",
    ]


CHECKPOINT = {"enable": True, "interval": 2}


def attempt(job: dict[str, Any]) -> str:
    """Train a job on this rank; the message with which it is refused, or nothing."""
    try:
        run_job(job)
    except UserError as error:
        return str(error)
    return ""


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    run_ranks(run_job, 1, tiny_job(tmp_path, checkpoint=CHECKPOINT))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = tiny_job(tmp_path, checkpoint=CHECKPOINT, model={"args": {"n_layers": 1}}, training={"steps": 6})
    (message,) = run_ranks(attempt, 1, other)
    assert message.startswith("model.args.n_layers: the checkpoints in") and "model.args.n_layers = 2" in message
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    run_ranks(run_job, 1, tiny_job(tmp_path, checkpoint=CHECKPOINT))
    (shard,) = (tmp_path / "tiny" / "checkpoints" / "step-4").glob("*.distcp")
    shard.unlink()
    (message,) = run_ranks(attempt, 1, tiny_job(tmp_path, checkpoint=CHECKPOINT, training={"steps": 6}))
    assert "checkpoints/step-4 cannot be loaded: FileNotFoundError" in message and 'checkpoint.load = "none"' in message


def test_without_loading_a_run_starts_anew_and_keeps_the_old_one(tmp_path: Path) -> None:
    run_ranks(run_job, 1, tiny_job(tmp_path, checkpoint=CHECKPOINT))
    run_ranks(run_job, 1, tiny_job(tmp_path, checkpoint={**CHECKPOINT, "load": "none"}))
    assert sorted(p.name for p in (tmp_path / "tiny.1" / "checkpoints").iterdir()) == ["step-2", "step-4"]
