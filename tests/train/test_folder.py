"""Run folders: nothing is overwritten, mixed up or lost."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.train.jobs import run_job, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.errors import ConfigError, UserError
from titan_launch.train.attempt import Agent, Attempt
from titan_launch.train.folder import (
    Load,
    effective_load,
    prepare_run_folder,
    recorded_modes,
    supersede_later_checkpoints,
)
from titan_launch.train.records import record_run

ALONE = Attempt()
"""A process that nothing restarts."""

CHECKPOINT = {"enable": True, "interval": 2}


def prepare(folder: Path, stack: ExitStack | None = None, attempt: Attempt = ALONE, **sections: dict[str, Any]) -> None:
    """Prepare and record a run's folder as a process would; without a stack of the caller's, the process ends."""
    config = JobConfig.model_validate(tiny_job(folder, **sections))
    with ExitStack() as own:
        used = own if stack is None else stack
        prepare_run_folder(folder / "tiny", config, attempt, used)
        record_run(folder / "tiny", config, attempt, used)


def save_steps(folder: Path, *steps: int) -> Path:
    """Folders that count as complete checkpoints."""
    checkpoints = folder / "tiny" / "checkpoints"
    for step in steps:
        (checkpoints / f"step-{step}").mkdir(parents=True)
        (checkpoints / f"step-{step}" / "manifest.json").write_text("{}")
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def set_start(folder: Path, started: datetime) -> str:
    """Let the run in a folder have started at that time; returns the name that it gets when it is moved aside."""
    os.utime(folder / "tiny/lock", (started.timestamp(), started.timestamp()))
    return f"tiny.{started:%Y-%m-%d_%H-%M-%S}"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(folder: Path, **sections: dict[str, Any]) -> str:
    """The message with which a start is refused that must leave everything as it is."""
    before = contents(folder)
    with pytest.raises(ConfigError) as error:
        prepare(folder, **sections)
    assert contents(folder) == before
    return str(error.value)


def test_an_earlier_run_is_moved_aside_as_a_whole_and_named_after_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="titan_launch")
    for number, hour in enumerate((15, 15, 16)):
        prepare(tmp_path)
        (tmp_path / "tiny" / "metrics.jsonl").write_text(str(number))
        aside = set_start(tmp_path, datetime(2026, 11, 22, hour, 4, 5))
    prepare(tmp_path)
    moved = ["tiny.2026-11-22_15-04-05", "tiny.2026-11-22_15-04-05_1", "tiny.2026-11-22_16-04-05"]
    assert names(tmp_path) == ["tiny", *moved] and aside == moved[-1]
    assert [(tmp_path / name / "metrics.jsonl").read_text() for name in moved] == ["0", "1", "2"]
    lines = [f"moved the earlier run in {tmp_path}/tiny to {tmp_path}/{name}" for name in moved]
    assert [record.getMessage() for record in caplog.records] == lines
    started = datetime.fromtimestamp((tmp_path / "tiny/lock").stat().st_mtime)
    assert datetime.now() - started < timedelta(minutes=1)


def test_a_resumed_run_keeps_the_time_of_its_first_start(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2)
    aside = set_start(tmp_path, datetime(2026, 11, 22, 15, 4, 5))
    prepare(tmp_path, checkpoint=CHECKPOINT)
    prepare(tmp_path, checkpoint={**CHECKPOINT, "load": "none"})
    assert names(tmp_path) == ["tiny", aside]


def test_a_folder_that_is_not_a_runs_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.txt").write_text("years of work")
    assert "exists and is not a run's" in refusal(tmp_path)


def test_a_start_that_failed_before_the_run_began_leaves_no_folder_behind(tmp_path: Path) -> None:
    with ExitStack() as stack:
        prepare_run_folder(tmp_path / "tiny", JobConfig.model_validate(tiny_job(tmp_path)), ALONE, stack)
    too_early = set_start(tmp_path, datetime(2026, 11, 22, 15, 4, 5))
    prepare(tmp_path, optimizer={"lr": 1.0})
    assert names(tmp_path) == ["tiny"]
    prepare(tmp_path)
    assert len(names(tmp_path)) == 2 and too_early not in names(tmp_path)


def test_two_runs_cannot_write_into_one_folder(tmp_path: Path) -> None:
    with ExitStack() as first:
        prepare(tmp_path, first)
        messages = run_ranks(refused, 2, tiny_job(tmp_path))  # processes of their own, as the locks are
        assert len(messages) == 2 and all("another run is writing" in message for message in messages)
        assert names(tmp_path) == ["tiny"]
    prepare(tmp_path)


def refused(job: dict[str, Any]) -> str:
    """Train a job on this rank; the message with which it is refused, or nothing."""
    try:
        run_job(job)
    except UserError as error:
        return str(error)
    return ""


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


def test_changes_of_the_operation_are_logged_key_by_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="titan_launch")
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2)
    prepare(tmp_path, checkpoint=CHECKPOINT, training={"steps": 9}, validation={"max_samples": 3})
    assert [record.getMessage() for record in caplog.records] == [
        "changed since the run began: training.steps was 4, is 9",
        "changed since the run began: validation.max_samples was unset, is 3",
    ]


OTHER: dict[str, Any] = {"optimizer": {"lr": 0.5}, "data": {"noise": 0.0, "num_workers": 1}}


def test_another_experiment_that_could_be_resumed_is_refused_with_every_difference(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2)
    aside = set_start(tmp_path, datetime(2026, 11, 22, 15, 4, 5))
    assert refusal(tmp_path, checkpoint=CHECKPOINT, **OTHER).split("\n") == [
        f"job.name: {tmp_path}/tiny holds a run of another experiment; {tmp_path}/tiny/config.json records",
        "    data.noise was 0.1, is 0.0",
        "    optimizer.lr was 0.01, is 0.5",
        "  --checkpoint.accept_changes=true resumes it all the same",
        "  --checkpoint.load=none starts anew, and moves it aside",
        "  --job.name=... takes another folder",
    ]
    prepare(tmp_path, checkpoint={**CHECKPOINT, "accept_changes": True}, **OTHER)
    assert names(tmp_path) == ["tiny"]
    prepare(tmp_path, checkpoint={**CHECKPOINT, "load": "none"})
    assert names(tmp_path) == ["tiny", aside]


@pytest.mark.parametrize("sections", [OTHER, {"model": {"args": {"n_layers": 1}}}], ids=["experiment", "model"])
@pytest.mark.parametrize("enable", [False, True])
def test_another_experiment_with_nothing_to_resume_is_moved_aside(
    tmp_path: Path, enable: bool, sections: dict[str, Any]
) -> None:
    prepare(tmp_path)
    if not enable:
        save_steps(tmp_path, 2)  # the result of a run that is over
    (tmp_path / "tiny/metrics.jsonl").write_text("reports")
    before = {path.name: path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()}
    aside = set_start(tmp_path, datetime(2026, 11, 22, 15, 4, 5))
    prepare(tmp_path, checkpoint={"enable": enable}, **sections)
    assert names(tmp_path) == ["tiny", aside] and names(tmp_path / "tiny") == ["config.json", "launch.json", "lock"]
    assert {path.name: path.read_bytes() for path in (tmp_path / aside).rglob("*") if path.is_file()} == before


def test_another_model_is_refused_whatever_is_accepted(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2)
    other = {"args": {"n_layers": 1}}
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "accept_changes": True}, model=other)
    assert "another model, which cannot be resumed" in message and "model.args.n_layers was 2, is 1" in message
    assert "accept_changes" not in message


def test_damaged_checkpoints_are_not_moved_aside_unasked(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    (save_steps(tmp_path, 2) / "step-2/manifest.json").unlink()
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "accept_changes": True}, training={"seed": 1})
    assert "training.seed was 0, is 1" in message and "accept_changes" not in message


def test_a_step_or_a_path_that_does_not_fit_the_folder_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2, 4)
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "load": 3})
    assert message.startswith("checkpoint.load: no such step in ") and "steps 2, 4" in message
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "load": "other/checkpoints/step-9"})
    assert "checkpoints of its own, up to step 4" in message


def test_a_checkpoint_is_not_loaded_from_a_folder_that_is_moved_aside(tmp_path: Path) -> None:
    prepare(tmp_path)
    save_steps(tmp_path, 2)
    for key, path in (("load", tmp_path / "tiny/checkpoints/step-2"), ("initial_load_path", tmp_path / "tiny")):
        message = refusal(tmp_path, checkpoint={key: str(path)})
        assert message.startswith(f"checkpoint.{key}: is in {tmp_path}/tiny, where this run would begin anew; resume ")


def test_a_damaged_record_of_what_could_be_resumed_is_an_error(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2)
    (tmp_path / "tiny" / "config.json").write_text("{")
    assert "config.json is damaged" in refusal(tmp_path, checkpoint=CHECKPOINT)
    prepare(tmp_path)
    assert len(names(tmp_path)) == 2


AGENT = Agent("host", "/tmp/torchelastic_1/none_2", 1, None)


@pytest.mark.parametrize(
    ("first", "second", "is_restart"),
    [
        (Attempt((AGENT,)), Attempt((Agent("new", "/tmp/torchelastic_9/none_2", 1, None), AGENT)), True),
        (Attempt((AGENT,)), Attempt((Agent("host", "/tmp/torchelastic_3/none_4", 1, None),)), False),
        (Attempt(slurm_job="7"), Attempt(slurm_job="7", is_requeued=True), True),
        (Attempt(slurm_job="7"), Attempt(slurm_job="7"), False),
        (Attempt(slurm_job="7"), Attempt(slurm_job="8", is_requeued=True), False),
        (ALONE, ALONE, False),
    ],
)
@pytest.mark.parametrize("saved", [False, True])
def test_a_restart_keeps_its_folder_and_does_not_apply_the_load_again(
    tmp_path: Path, first: Attempt, second: Attempt, is_restart: bool, saved: bool
) -> None:
    def start(load: Load, attempt: Attempt) -> Load:
        config = JobConfig.model_validate(tiny_job(tmp_path, checkpoint={**CHECKPOINT, "load": load}))
        with ExitStack() as stack:
            prepare_run_folder(tmp_path / "tiny", config, attempt, stack)
            effective = effective_load(tmp_path / "tiny", config, attempt)
            assert (recorded_modes(tmp_path / "tiny", config, attempt) is None) == (effective == "none" or not saved)
            record_run(tmp_path / "tiny", config, attempt, stack)
        return effective

    assert start("none", first) == "none"
    if saved:
        save_steps(tmp_path, 2)
    aside = set_start(tmp_path, datetime(2026, 11, 22, 15, 4, 5))
    assert start("none", second) == ("latest" if is_restart else "none")
    assert names(tmp_path) == ["tiny"] if is_restart else ["tiny", aside]


def test_a_restart_after_the_end_of_its_run_keeps_the_result_apart(tmp_path: Path) -> None:
    prepare(tmp_path, attempt=Attempt((AGENT,)))
    save_steps(tmp_path, 4)
    prepare(tmp_path, attempt=Attempt((AGENT,)))
    assert len(names(tmp_path)) == 2 and not (tmp_path / "tiny/checkpoints").exists()


def test_a_restart_starts_at_the_other_runs_checkpoint_until_it_has_one(tmp_path: Path) -> None:
    config = JobConfig.model_validate(tiny_job(tmp_path, checkpoint={**CHECKPOINT, "load": "other/step-9"}))
    prepare(tmp_path, attempt=Attempt((AGENT,)), checkpoint={**CHECKPOINT, "load": "other/step-9"})
    assert effective_load(tmp_path / "tiny", config, Attempt((AGENT,))) == "other/step-9"
    save_steps(tmp_path, 2)
    assert effective_load(tmp_path / "tiny", config, Attempt((AGENT,))) == "latest"
    assert effective_load(tmp_path / "tiny", config, ALONE) == "other/step-9"


def test_later_checkpoints_are_moved_aside_with_the_reports(tmp_path: Path) -> None:
    prepare(tmp_path)
    checkpoints = save_steps(tmp_path, 2, 4, 6)
    (checkpoints / "latest").symlink_to("step-6")
    (checkpoints / "best").symlink_to("step-4")
    (tmp_path / "tiny" / "metrics.jsonl").write_text("reports")
    for _ in range(2):  # the second time there is nothing to do
        supersede_later_checkpoints(tmp_path / "tiny", 2)
        assert names(checkpoints) == ["latest", "step-2", "superseded-1"]
        assert names(checkpoints / "superseded-1") == ["metrics.jsonl", "step-4", "step-6"]
        assert os.readlink(checkpoints / "latest") == "step-2"


def test_a_launch_between_two_attempts_keeps_its_folder(tmp_path: Path) -> None:
    """The ranks have died, so the lock is free; their torchrun (here: this process) is about to start them again."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    agent = Agent(socket.gethostname(), "/tmp/torchelastic_1/none_2", os.getpid(), ticks)
    with pytest.raises(UserError), ExitStack() as stack:
        prepare(tmp_path, stack, Attempt((agent,)), checkpoint=CHECKPOINT)
        raise UserError("a rank has failed")
    save_steps(tmp_path, 2)
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "load": "none"})
    assert f"another launch (process {os.getpid()}) is about to start its ranks" in message
    prepare(tmp_path, attempt=Attempt((agent,)), checkpoint=CHECKPOINT)  # its own restart, which ends well
    prepare(tmp_path, checkpoint=CHECKPOINT)
    assert names(tmp_path) == ["tiny"]
