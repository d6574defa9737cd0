"""Run folders: no run overwrites, mixes up or loses data."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import socket
import time
import zlib
from contextlib import ExitStack
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_command, run_ranks
from tests.sampling import sampled
from tests.train.jobs import error_of_run, model_source, read_metrics, tiny_job
from titan_launch.checkpoint.manifest import checkpoint_steps, read_manifest, record_of, write_manifest
from titan_launch.cli import main
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, UserError
from titan_launch.core.files import remove
from titan_launch.train.run_folder import folder as run_folder
from titan_launch.train.run_folder.attempt import AgentProcess, Attempt
from titan_launch.train.run_folder.folder import (
    Load,
    effective_load,
    prepare_run_folder,
    recorded_modes,
    supersede_later_checkpoints,
)
from titan_launch.train.run_folder.records import record_run

ALONE = Attempt()
"""An attempt of a process that no agent restarts."""

CHECKPOINT = {"enable": True, "interval": 2}


def prepare(folder: Path, stack: ExitStack | None = None, attempt: Attempt = ALONE, **sections: dict[str, Any]) -> None:
    """Prepare and record a run folder as a process does. Without `stack` of the caller, release it, as the end of a
    process does."""
    config = JobConfig.model_validate(tiny_job(folder, **sections))
    with ExitStack() as own:
        used = own if stack is None else stack
        prepare_run_folder(config, attempt, used)
        record_run(config, attempt, used)


def save_steps(folder: Path, *steps: int) -> Path:
    """Create folders that count as complete checkpoints."""
    checkpoints = folder / "tiny" / "checkpoints"
    for step in steps:
        (checkpoints / f"step-{step}").mkdir(parents=True)
        (checkpoints / f"step-{step}" / "manifest.json").write_text("{}")
    return checkpoints


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def set_start(folder: Path, started: datetime) -> str:
    """Set the start time of the run in a folder. Return the name that the folder gets when it is moved aside."""
    os.utime(folder / "tiny/lock", (started.timestamp(), started.timestamp()))
    return f"tiny.{started:%Y-%m-%d_%H-%M-%S}"


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refusal(folder: Path, **sections: dict[str, Any]) -> str:
    """Return the error of a start that is refused, and check that the folder is unchanged."""
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


def test_a_folder_that_is_not_a_run_folder_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "thesis.txt").write_text("years of work")
    assert "exists and is not a run folder" in refusal(tmp_path)


def test_a_partly_deleted_run_folder_is_still_a_run_folder(tmp_path: Path) -> None:
    """The folder was deleted while a checkpoint was being written."""
    (tmp_path / "tiny/checkpoints/step-2.tmp").mkdir(parents=True)
    prepare(tmp_path, checkpoint=CHECKPOINT)
    assert names(tmp_path) == ["tiny"]


def test_a_start_that_failed_before_the_run_began_leaves_no_folder_behind(tmp_path: Path) -> None:
    with ExitStack() as stack:
        prepare_run_folder(JobConfig.model_validate(tiny_job(tmp_path)), ALONE, stack)
    too_early = set_start(tmp_path, datetime(2026, 11, 22, 15, 4, 5))
    prepare(tmp_path, optimizer={"lr": 1.0})
    assert names(tmp_path) == ["tiny"]
    prepare(tmp_path)
    assert len(names(tmp_path)) == 2 and too_early not in names(tmp_path)


def test_two_runs_cannot_write_into_one_folder(tmp_path: Path) -> None:
    with ExitStack() as first:
        prepare(tmp_path, first)
        messages = run_ranks(error_of_run, 2, tiny_job(tmp_path))  # locks belong to processes
        assert len(messages) == 2 and all("another run is writing" in message for message in messages)
        assert names(tmp_path) == ["tiny"]
    prepare(tmp_path)


def test_a_restart_waits_for_the_lock_of_a_dead_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    prepare(tmp_path, attempt=Attempt((AGENT,)))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    for attempt, tries in ((Attempt((AGENT,)), 3), (ALONE, 1)):
        refused = [BlockingIOError(), BlockingIOError()]

        def lockf(*_: object, refused: list[BlockingIOError] = refused) -> None:
            if refused:
                raise refused.pop()

        monkeypatch.setattr("fcntl.lockf", lockf)
        if tries == 1:
            with pytest.raises(ConfigError, match="another run is writing"):
                prepare(tmp_path, attempt=attempt)
        else:
            prepare(tmp_path, attempt=attempt, comm={"init_timeout_seconds": 60})
        assert len(refused) == (tries == 1)
    assert caplog.text.count("waiting up to 30 s for the lock of an earlier start") == caplog.text.count("waiting") == 1


def hold(folder: Path) -> int:
    """Prepare a folder and die, while a child, such as a data worker, lives on. Return the child's process id."""
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
        f"job.name: {tmp_path}/tiny holds a run of another experiment; differences from {tmp_path}/tiny/config.json:",
        "    data.noise was 0.1, is 0.0",
        "    optimizer.lr was 0.01, is 0.5",
        "  --checkpoint.accept_changes=true resumes the earlier run nevertheless",
        "  --checkpoint.load=none starts a new run and moves the earlier run's folder away",
        "  --job.name=... uses another folder",
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
        save_steps(tmp_path, 2)  # the result of a finished run
    (tmp_path / "tiny/metrics.jsonl").write_text("reports")
    before = {path.name: path.read_bytes() for path in (tmp_path / "tiny").rglob("*") if path.is_file()}
    aside = set_start(tmp_path, datetime(2026, 11, 22, 15, 4, 5))
    prepare(tmp_path, checkpoint={"enable": enable}, **sections)
    assert names(tmp_path) == ["tiny", aside] and names(tmp_path / "tiny") == ["config.json", "launch.json", "lock"]
    assert {path.name: path.read_bytes() for path in (tmp_path / aside).rglob("*") if path.is_file()} == before


def test_another_model_is_refused_even_with_accept_changes(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2)
    other = {"args": {"n_layers": 1}}
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "accept_changes": True}, model=other)
    assert "another model, which cannot be resumed" in message and "model.args.n_layers was 2, is 1" in message
    assert "accept_changes" not in message


def test_damaged_checkpoints_are_not_moved_aside_without_consent(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    (save_steps(tmp_path, 2) / "step-2/manifest.json").unlink()
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "accept_changes": True}, training={"seed": 1})
    assert "training.seed was 0, is 1" in message and "accept_changes" not in message


def test_a_step_or_a_path_that_does_not_fit_the_folder_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2, 4)
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "load": 3})
    assert message.startswith("checkpoint.load: no such step in ") and "steps: 2, 4" in message
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "load": "other/checkpoints/step-9"})
    assert "checkpoints of its own, up to step 4" in message


def test_a_checkpoint_is_not_loaded_from_a_folder_that_is_moved_aside(tmp_path: Path) -> None:
    prepare(tmp_path)
    save_steps(tmp_path, 2)
    for key, path in (("load", tmp_path / "tiny/checkpoints/step-2"), ("initial_load_path", tmp_path / "tiny")):
        message = refusal(tmp_path, checkpoint={key: str(path)})
        assert message.startswith(f"checkpoint.{key}: is in the folder of an earlier run, {tmp_path}/tiny, which ")


def test_a_damaged_record_of_what_could_be_resumed_is_an_error(tmp_path: Path) -> None:
    prepare(tmp_path, checkpoint=CHECKPOINT)
    save_steps(tmp_path, 2)
    (tmp_path / "tiny" / "config.json").write_text("{")
    assert "config.json is damaged" in refusal(tmp_path, checkpoint=CHECKPOINT)
    prepare(tmp_path)
    assert len(names(tmp_path)) == 2


AGENT = AgentProcess("host", "/tmp/torchelastic_1/none_2", 1, None)


@pytest.mark.parametrize(
    ("first", "second", "is_restart"),
    [
        (Attempt((AGENT,)), Attempt((AgentProcess("new", "/tmp/torchelastic_9/none_2", 1, None), AGENT)), True),
        (Attempt((AGENT,)), Attempt((AgentProcess("host", "/tmp/torchelastic_3/none_4", 1, None),)), False),
        (Attempt(slurm_job="7"), Attempt(slurm_job="7", is_requeued=True), True),
        (Attempt(slurm_job="7"), Attempt(slurm_job="7"), False),
        (Attempt(slurm_job="7"), Attempt(slurm_job="8", is_requeued=True), False),
        (ALONE, ALONE, False),
    ],
)
@pytest.mark.parametrize("saved", [False, True])
def test_a_restart_keeps_its_run_folder_and_ignores_checkpoint_load(
    tmp_path: Path, first: Attempt, second: Attempt, is_restart: bool, saved: bool
) -> None:
    def start(load: Load, attempt: Attempt) -> Load:
        config = JobConfig.model_validate(tiny_job(tmp_path, checkpoint={**CHECKPOINT, "load": load}))
        with ExitStack() as stack:
            prepare_run_folder(config, attempt, stack)
            effective = effective_load(config, attempt)
            assert (recorded_modes(config, attempt) is None) == (effective == "none" or not saved)
            record_run(config, attempt, stack)
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
    assert effective_load(config, Attempt((AGENT,))) == "other/step-9"
    save_steps(tmp_path, 2)
    assert effective_load(config, Attempt((AGENT,))) == "latest"
    assert effective_load(config, ALONE) == "other/step-9"
    # If this step is damaged, an older one is loaded.
    of_step = JobConfig.model_validate(tiny_job(tmp_path, checkpoint={**CHECKPOINT, "load": 2}))
    assert effective_load(of_step, Attempt((AGENT,))) == "latest"


def test_later_checkpoints_are_moved_aside_with_the_reports(tmp_path: Path) -> None:
    prepare(tmp_path)
    checkpoints = save_steps(tmp_path, 2, 4, 6)
    (checkpoints / "latest").symlink_to("step-6")
    (checkpoints / "best").symlink_to("step-4")
    (tmp_path / "tiny" / "metrics.jsonl").write_text("reports")
    for _ in range(2):  # the second call finds nothing to move
        supersede_later_checkpoints(tmp_path / "tiny", 2)
        assert names(checkpoints) == ["latest", "step-2", "superseded-1"]
        assert names(checkpoints / "superseded-1") == ["metrics.jsonl", "step-4", "step-6"]
        assert os.readlink(checkpoints / "latest") == "step-2"


def test_a_launch_between_two_attempts_keeps_its_folder(tmp_path: Path) -> None:
    """The ranks have died, so the lock is free. Their torchrun (here: this process) is about to restart them."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    agent = AgentProcess(socket.gethostname(), "/tmp/torchelastic_1/none_2", os.getpid(), ticks)
    with pytest.raises(UserError), ExitStack() as stack:
        prepare(tmp_path, stack, Attempt((agent,)), checkpoint=CHECKPOINT)
        raise UserError("a rank has failed")
    save_steps(tmp_path, 2)
    message = refusal(tmp_path, checkpoint={**CHECKPOINT, "load": "none"})
    assert f"another launch (process {os.getpid()}) is about to restart its ranks" in message
    prepare(tmp_path, attempt=Attempt((agent,)), checkpoint=CHECKPOINT)  # the launch's own restart succeeds
    prepare(tmp_path, checkpoint=CHECKPOINT)
    assert names(tmp_path) == ["tiny"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a job file and its run, with checkpoints of two steps."""
    folder = tmp_path_factory.mktemp("finished")
    sections = {"training": {"steps": 2}, "metrics": {"enable_tensorboard": True}}
    job = tiny_job(Path("."), checkpoint={"enable": True, "interval": 1}, **sections)
    (folder / "job.json").write_text(json.dumps(job))
    assert train(folder)[0] == 0
    made = {path.name for path in (folder / "tiny").iterdir()}
    assert made <= {*run_folder._FILES, *run_folder._FOLDERS} and len(made) > 7
    return folder


@pytest.fixture
def tampered(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the folder."""
    return Path(shutil.copytree(finished, tmp_path / "copy", symlinks=True))


def train(folder: Path, *overrides: str) -> tuple[int, str]:
    """Run the job of a folder by the command line. Return the exit status and the output."""
    status, printed, reported = run_command(["train", "--config", "job.json", *overrides], folder, timeout=60)
    assert "Traceback" not in printed + reported, reported
    return status, printed + reported


DEEP = b"[" * 100_000
NO_MANIFEST: dict[str, bytes | None] = {
    "nested too deep": DEEP,
    "nested too deep below a key": b'{"manifest": ' + DEEP,
    "null": b"null",
    "list": b"[]",
    "empty": b"",
    "no text": bytes(range(256)),
    "keys of null": b'{"manifest": null, "crc32": null}',
    "missing": None,
}


def replace(path: Path, kind: str) -> None:
    """Put a FIFO, a folder or a link in place of a file or folder, which may be missing."""
    remove(path)
    path.parent.mkdir(exist_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "file":
        path.touch()
    else:
        path.symlink_to(kind)


def test_a_run_resumes_from_the_checkpoint_before_tampered_ones(tampered: Path) -> None:
    """All kinds of damage are present together, each in a checkpoint newer than the intact one."""
    checkpoints = tampered / "tiny/checkpoints"

    def copy() -> Path:
        step = len(list(checkpoints.glob("step-*"))) + 1
        path = Path(shutil.copytree(checkpoints / "step-2", checkpoints / "copy"))
        write_manifest(path, dataclasses.replace(read_manifest(path), step=step))
        return path.rename(checkpoints / f"step-{step}")

    for content in NO_MANIFEST.values():
        (copy() / "manifest.json").write_bytes(content) if content is not None else (copy() / "manifest.json").unlink()
    for kind in ("fifo", "folder"):
        replace(copy() / "manifest.json", kind)
    for name in ("index.json", ".metadata", "__0_0.distcp"):
        replace(copy() / name, "fifo")
    table = json.loads((checkpoints / "step-2/manifest.json").read_bytes())
    for key, value in (("step", "2"), ("step", None), ("files", []), ("versions", 1), ("validation_loss", "x")):
        other = {**table["manifest"], key: value}
        crc32 = f"{zlib.crc32(json.dumps(other, indent=1, sort_keys=True).encode()):08x}"
        (copy() / "manifest.json").write_text(json.dumps({"manifest": other, "crc32": crc32}))
    index = json.loads((checkpoints / "step-2/index.json").read_bytes())
    for content in (None, [], {**index, "tensors": []}, {**index, "tensors": {"progress.step": None}}):
        path = copy()
        (path / "index.json").write_text(json.dumps(content))
        files = {**read_manifest(path).files, "index.json": record_of(path / "index.json")}
        write_manifest(path, dataclasses.replace(read_manifest(path), files=files))
    copies = max(checkpoint_steps(checkpoints))
    status, printed = train(tampered, "--training.steps=3")
    assert status == 0 and printed.count(" is damaged, so it is not loaded: ") == copies - 2
    assert f"resumed from {Path('tiny/checkpoints/step-2')}\n" in printed and checkpoint_steps(checkpoints) == [3, 2, 1]
    assert len(list(checkpoints.glob("step-*.damaged-1"))) == copies - 2


KINDS = [
    *[(name, "fifo") for name in (*run_folder._FILES, "checkpoints", "tb", "logs")],
    *[(name, "folder") for name in run_folder._FILES],
    *[(name, "file") for name in run_folder._FOLDERS],
    ("metrics.jsonl", "../job.json"),
    ("checkpoints", "nowhere"),
]
"""Names in a run folder, and the kinds of objects that replace them."""

CONTENTS = [
    *[("config.json", content, "is damaged (") for content in (b"[]", b"null", b"", b"\xff", DEEP, b'{"training": 1}')],
    ("config.json", b"{}", "holds a run of another model"),
    *[("launch.json", content, "is damaged (") for content in (b"[]", b"null", b"\xff", DEEP, b'{"agents": null}')],
    (
        "launch.json",
        b'{"agents": [{"host": "h", "folder": "f", "pid": "\\u0000", "started": 1}], "slurm_job": null}',
        "is damaged (",
    ),
    *[
        ("metrics.jsonl", b'{"step": 1}\n' + line + b"\n", "metrics.jsonl:2: the line is not a report of a run")
        for line in (
            b'{"step": "2"}',
            b'{"step": null}',
            b'{"step": 2.5',
            b"[]",
            b"",
            b'{"loss": 1}',
            b"{" * 50_000,
            b"\xff",
        )
    ],
]
"""Files of a run folder, other contents, and the text of the error."""


@sampled("contents", CONTENTS, 3)
def test_tampered_folders_are_refused_in_one_sentence(
    contents: tuple[tuple[str, bytes, str], ...],
    tampered: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The refusal has no traceback, does not hang and changes nothing. `check` and `train` refuse alike."""
    folder = tampered / "tiny"
    moved = tampered / "moved"
    monkeypatch.chdir(tampered)
    for name, kind in KINDS:
        if (folder / name).exists():
            (folder / name).rename(moved)
        replace(folder / name, kind)
        status, printed = main(["check", "--config", "job.json"]), capsys.readouterr().err
        if name == "metrics.jsonl":
            assert (status, printed) == train(tampered)
        is_file = name in run_folder._FILES
        reason = f"{Path('tiny', name)} is not a {'regular file' if is_file else 'folder'}; move it away, or choose"
        assert status == 2 and reason in printed and printed.count("error: ") == 1, (name, kind, printed)
        remove(folder / name)
        if moved.exists():
            moved.rename(folder / name)
    for name, content, reason in contents:
        before = (folder / name).read_bytes()
        (folder / name).write_bytes(content)
        status, printed = train(tampered, "--training.steps=3")
        assert status == 2 and str(Path("tiny", name)) in printed and reason in printed, (name, content[:80], printed)
        assert (folder / name).read_bytes() == content
        (folder / name).write_bytes(before)
    for name in ("config.json.tmp", "launch.json.tmp", "units.json.tmp"):
        replace(folder / name, "fifo")
    assert train(tampered, "--training.steps=3")[0] == 0


VANISHING = {
    # Renamed first: a thread may still write into it.
    "deleted": ("thread", "os.rename('tiny', 'gone'), __import__('shutil').rmtree('gone', ignore_errors=True)"),
    "moved": ("disabled", "os.rename('tiny', 'moved')"),
    "replaced": ("thread", "os.rename('tiny', 'moved'), os.mkdir('tiny')"),
}
"""Statements that run after the first checkpoint of a run, and its `async_mode`."""


@pytest.mark.parametrize("kind", VANISHING)
def test_a_folder_that_vanishes_ends_the_run_and_the_same_command_starts_again(tmp_path: Path, kind: str) -> None:
    mode, action = VANISHING[kind]
    is_due = "not os.path.exists('is_done') and os.path.exists('tiny/checkpoints/latest')"
    statement = f"{is_due} and (os.mkdir('is_done'), {action})"
    (tmp_path / "own.py").write_text(model_source(in_forward=statement))
    checkpoint = {"enable": True, "interval": 2, "async_mode": mode}
    job = tiny_job(Path("."), checkpoint=checkpoint, training={"steps": 9}, metrics={"enable_tensorboard": True})
    (tmp_path / "job.json").write_text(json.dumps({**job, "model": {"name": "own:Model"}}))
    status, printed = train(tmp_path)
    error = (
        "error: tiny was deleted or moved while the run wrote to it; to resume, move the folder back and run the same "
    )
    assert status == 1 and error + "command again; otherwise, the same command starts anew\n" in printed
    assert printed.count("error") == 1 and not list(tmp_path.glob("tiny/*"))
    if kind == "moved":
        (tmp_path / "moved").rename(tmp_path / "tiny")
        assert "was deleted or moved" in (tmp_path / "tiny/logs/attempt-1/rank_0.log").read_text()
    status, printed = train(tmp_path)
    assert status == 0 and ("resumed from" in printed) == (kind == "moved")
    assert [report["step"] for report in read_metrics(tmp_path)] == list(range(1, 10))
