"""Runs that are disturbed: killed, signalled during a save, on a full file system, or on a read-only one."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import error_of_run, read_metrics, run_job, this_rank, tiny_job
from titan_launch.checkpoint import writer
from titan_launch.checkpoint.manifest import checkpoint_steps, complete_steps
from titan_launch.config.job import JobConfig
from titan_launch.train.build import Surroundings, build_run
from titan_launch.train.explain import explain_full_disk
from titan_launch.train.health.coordination import StopRequest
from titan_launch.train.loop import due_now, ending, fit, report, train_one_step

REPO = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_short_fault_injection_campaign_loses_no_data() -> None:
    """Run a job with kills, and some of the other disturbances. docs/verification/reliability.md has the full
    campaign, and tests/launch/test_torchrun.py one kill and one signal."""
    disturbances = 12
    command = [sys.executable, "benchmarks/fault_injection.py", "--runs", "1", "--seed", "5"]
    command += ["--disturbances", str(disturbances)]
    command += ["--modes", "disabled", "thread"]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    runs = 1 + disturbances
    found = re.search(rf"(\d+) faults in {runs} runs.*: \*\*0 lost, 0 mismatched, 0 orphans\*\*", result.stdout)
    assert found is not None and int(found[1]) >= runs, result.stdout


def run_signalled_while_writing(job: dict[str, Any]) -> str:
    """Train while the last rank gets SIGTERM during its write of the second checkpoint. Return the run's last
    message."""
    written = 0

    def write_and_signal(write: Callable[..., int]) -> Callable[..., int]:
        def signalled(stream: Any, data: Any) -> int:
            nonlocal written
            folder = Path(job["job"]["dump_folder"], "tiny", "checkpoints")
            if checkpoint_steps(folder) and not written and this_rank().rank == this_rank().world_size - 1:
                written = write(stream, data)
                os.kill(os.getpid(), signal.SIGTERM)
                return written
            return write(stream, data)

        return signalled

    stop = StopRequest()
    with stop.listening(), ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer._RecordedStream, "write", write_and_signal(writer._RecordedStream.write))
        run = build_run(JobConfig.model_validate(job), this_rank(), stack, Surroundings(stop=stop))
        fit(run)
        return ending(run)


@pytest.mark.slow
def test_a_signal_during_a_save_stops_the_run_after_it(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, training={"steps": 6}, checkpoint={"enable": True, "interval": 2, "async_mode": "thread"})
    whole = run_ranks(run_job, 2, {**job, "job": {**job["job"], "name": "whole"}})
    (text, _) = run_ranks(run_signalled_while_writing, 2, job)
    found = re.match(r"stopped by SIGTERM after step (\d+) of 6; a checkpoint of step \1 is saved", text)
    assert found is not None and int(found[1]) >= 4, text
    assert max(complete_steps(tmp_path / "tiny" / "checkpoints")) == int(found[1])
    for a, b in zip(whole, run_ranks(run_job, 2, job), strict=True):
        assert_equal(a, b)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 2 MB, if this user may."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Remount a file system with other options."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@pytest.mark.slow
def test_a_run_survives_a_full_disk(tmp_path: Path, small_disk: Path) -> None:
    def job(folder: Path) -> dict[str, Any]:
        checkpoint = {"enable": True, "interval": 1, "keep_latest": 0}
        return tiny_job(folder, training={"steps": 6}, checkpoint=checkpoint)

    run_ranks(run_job, 2, {**job(tmp_path), "checkpoint": {"save_last": False}})
    errors = run_ranks(error_of_run, 2, job(small_disk))
    assert errors[0] == errors[1] and errors[0].startswith("step 6 could not be saved to "), errors
    saved = complete_steps(small_disk / "tiny" / "checkpoints")
    assert 1 <= max(saved) < 6
    remount(small_disk, "size=50m")
    assert run_ranks(error_of_run, 2, job(small_disk)) == ["", ""]
    whole, went_on = (
        [(report["step"], report["train/loss"]) for report in read_metrics(folder)] for folder in (tmp_path, small_disk)
    )
    assert went_on == whole


def warnings_with_a_full_disk_from_step_3_to_20(job: dict[str, Any]) -> list[str]:
    """Train a job on this rank. Return its warnings."""
    config = JobConfig.model_validate(job)
    filler, warned = Path(config.job.dump_folder) / "filler", list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("titan_launch.metrics").addHandler(handler)
    with ExitStack() as stack:
        run = build_run(config, this_rank(), stack, Surroundings(quiet=True))
        while run.progress.step < config.training.steps:
            train_one_step(run)
            if run.progress.step == 3:
                with filler.open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(b"x" * 512)
            if run.progress.step == 21:
                filler.unlink()
            report(run, due_now(run))
    return warned


def test_a_full_disk_loses_reports_but_not_the_run(small_disk: Path) -> None:
    metrics = {"log_freq": 1, "enable_tensorboard": True}
    job = tiny_job(small_disk, training={"steps": 22}, metrics=metrics)
    (warned,) = run_ranks(warnings_with_a_full_disk_from_step_3_to_20, 1, job)
    assert warned == [
        "reports cannot be written: No space left on device; training continues, and reports are lost until there is "
        "room"
    ]
    reports = read_metrics(small_disk)
    steps = [report["step"] for report in reports]
    assert steps[:2] == [1, 2] and steps[-2:] == [21, 22] and len(steps) < 14  # the last blocks have room for a few
    events = EventAccumulator(str(small_disk / "tiny" / "tb"))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("train/loss")}
    assert {1, 2, 21, 22} <= shown.keys() and 20 not in shown
    assert shown[22] == pytest.approx(reports[-1]["train/loss"])


def test_files_that_find_no_room_at_the_start_end_the_run_with_one_sentence(small_disk: Path) -> None:
    config = JobConfig.model_validate(tiny_job(small_disk, checkpoint={"enable": True, "load": 2}))
    text = (
        f"^{small_disk}/tiny cannot be written to: No space left on device; free disk space, and run the same command "
        "again "
    )
    with pytest.raises(OSError) as full:
        (small_disk / "file").write_bytes(b"x" * 10_000_000)
    assert re.match(text + "with --checkpoint.load=latest", str(explain_full_disk(full.value, config)))
    in_a_cache = OSError(errno.ENOSPC, "no room", "/tmp/cache/kernel.so")
    assert str(explain_full_disk(in_a_cache, config)).startswith("/tmp/cache/kernel.so cannot be written to: ")
    with pytest.raises(FileExistsError) as exists:
        small_disk.mkdir()
    assert explain_full_disk(exists.value, config) is None


def test_a_folder_that_cannot_be_written_is_an_error_before_the_first_step(small_disk: Path) -> None:
    remount(small_disk, "ro")
    errors = run_ranks(error_of_run, 2, tiny_job(small_disk))
    assert errors[0] == errors[1]
    assert "cannot be written: Read-only file system" in errors[0] and errors[0].startswith("job.dump_folder: ")
