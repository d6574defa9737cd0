"""Records of runs that train now, have failed, were started several times, or went back to a checkpoint."""

from __future__ import annotations

import fcntl
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.test_retention import fill
from tests.distributed import run_command
from tests.report.recorded import add_log, record, reports
from tests.train.jobs import model_source, tiny_job
from titan_launch.core.errors import UserError
from titan_launch.metrics.sinks.jsonl import JsonlSink
from titan_launch.metrics.tags import STEP_PARTS
from titan_launch.report.figures import step_columns, summary
from titan_launch.report.recorded_run import find_runs, load_run


def steps(folder: Path) -> list[int]:
    return list(load_run(folder).reports.steps)


def test_a_run_is_running_while_a_process_holds_its_lock(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", reports())
    assert load_run(folder).state == "finished"
    code = "import fcntl, sys; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX); print('held'); input()"
    command = [sys.executable, "-c", code, str(folder / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        assert load_run(folder).state == "running"
        holder.communicate("\n")
    assert load_run(folder).state == "finished"
    with (folder / "lock").open("r+") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # reading the state has left no lock behind


def test_a_line_that_is_being_written_is_ignored_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", reports())
    path = folder / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 10, "train/lo')
    assert steps(folder) == [1, 2, 4, 6, 8]
    path.write_text('{"step": 1, "train/loss": "nan"}\nnonsense\n')
    with pytest.raises(UserError, match=r"metrics.jsonl:2: not a report of a run"):
        load_run(folder)


def test_steps_that_ran_again_are_counted_once(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {step: {"train/loss": float(step)} for step in (1, 2, 3, 4)})
    with (folder / "metrics.jsonl").open("a") as file:
        for step in (3, 4, 4, 5):
            file.write(json.dumps({"step": step, "train/loss": 10.0 * step, **({"x": 1} if step == 4 else {})}) + "\n")
    assert [*load_run(folder).values("train/loss")] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50)]


def test_a_rollback_is_shown_and_its_reports_do_not_count(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {step: {"train/loss": 1.0, "train/rollbacks": 0.0} for step in (1, 2, 3, 4)})
    sink = JsonlSink(folder / "metrics.jsonl", 4)
    sink.rewind(2)
    sink.write(3, {"train/loss": 3.0, "train/rollbacks": 1.0, "train/skipped_steps": 2.0})
    sink.close()
    run = load_run(folder)
    assert [*run.values("train/loss")] == [(1, 1), (2, 1), (3, 3)]
    assert run.rolled_back == [3, 4]
    assert "Skipped steps: 2. Rollbacks: 1." in summary(run)


def test_a_run_that_ended_early_names_its_best_checkpoint(tmp_path: Path) -> None:
    """It ended early if its last report is of the validation that exhausted the patience."""
    metrics = {step: {"train/loss": 1.0, "validation/without_improvement": step / 2 - 2} for step in (4, 6, 8)}
    cases = {
        "ended": (metrics, 2, ("ended early", 4)),
        "more-patience": (metrics, 3, ("stopped", None)),
        "stopped-later": ({**metrics, 9: {"train/loss": 1.0}}, 2, ("stopped", None)),
    }
    for name, (reported, patience, expected) in cases.items():
        folder = record(tmp_path / name, reported, training={"steps": 20}, validation={"patience": patience})
        (folder / "checkpoints").mkdir()
        fill(folder / "checkpoints", {4: 1.0, 6: math.nan, 8: 1.5})
        run = load_run(folder)
        assert (run.state, run.best_step) == expected


def test_starts_come_from_the_logs(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", reports(), has_ended=False)
    add_log(folder, 1, "INFO titan_launch.train.run: device: cpu", "INFO titan_launch.train.loop: step")
    add_log(folder, 1, "INFO titan_launch.train.run: device: cpu", rank=1)
    resumed = "INFO titan_launch.train.run_folder.resume: resumed from run/checkpoints/step-4"
    add_log(folder, 2, resumed, "ERROR titan_launch: the gradient is not finite; the run stops")
    add_log(folder, 10, resumed.replace("step-4", "step-6"))
    run = load_run(folder)
    assert [(start.number, start.step, start.num_logs, start.is_error) for start in run.starts] == [
        (1, 0, 2, False),
        (2, 4, 1, True),
        (10, 6, 1, False),
    ]
    assert run.starts[1].end == "the gradient is not finite; the run stops"
    assert run.steady("time/step_s") == [0.5, 0.25]  # not those of steps 1, 6 and 8, the first after each start
    assert "the process was killed" in summary(run)[0]


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "there is no such folder; `titan-launch runs` lists the runs in outputs"),
        (".", r"not a run folder \(it has neither lock nor metrics.jsonl\); runs below it: .*/one"),
        ("began", "the run has not begun its first step"),
        ("damaged", "config.json: not the configuration of a run"),
    ],
)
def test_a_folder_without_a_run_is_an_error(tmp_path: Path, folder: str, message: str) -> None:
    record(tmp_path / "one", reports())
    (tmp_path / "began").mkdir()
    (tmp_path / "began" / "lock").touch()
    record(tmp_path / "damaged", reports()).joinpath("config.json").write_text("[]")
    with pytest.raises(UserError, match=message):
        load_run(tmp_path / folder)


def test_runs_are_found_below_a_folder_but_not_inside_of_runs(tmp_path: Path) -> None:
    inside = record(tmp_path / "a" / "run", reports()) / "copy"
    record(inside, {})
    record(tmp_path / "run", {})
    assert find_runs(tmp_path) == [tmp_path / "a" / "run", tmp_path / "run"]


def test_a_real_run_that_fails_and_is_resumed_is_right_in_every_record(tmp_path: Path) -> None:
    """A model of the user raises an error in step 4. The same command, after a correction, resumes at step 3. (The
    FLOPs are counted with a forward before the first step.)"""
    error = 'if os.path.exists("fail") and Model.n > 4: raise ValueError("no more")'
    count = 'Model.n = getattr(Model, "n", 0) + 1; ' + "exec('" + error + "')"
    (tmp_path / "my_model.py").write_text(model_source(in_forward=count))
    job = tiny_job(
        Path("."),
        model={"name": "my_model:build", "blocks": ["embedding"]},
        training={"steps": 6, "local_batch_size": 4},
        checkpoint={"enable": True, "interval": 3},
        debug={"audit_precision": False},
    )
    del job["model"]["args"]
    (tmp_path / "job.json").write_text(json.dumps(job))
    (tmp_path / "fail").touch()
    status, *_ = run_command(["--config", "job.json"], tmp_path)
    run = load_run(tmp_path / "tiny")
    assert (status, run.state, run.last_step) == (1, "failed", 3)
    assert run.starts[0].is_error and "Its last start ended with: " in summary(run)[0]
    (tmp_path / "fail").unlink()
    status, printed, _ = run_command(["--config", "job.json", "--quiet"], tmp_path)
    assert (status, printed) == (0, "")
    run = load_run(tmp_path / "tiny")
    assert (run.state, [(start.step, start.is_error) for start in run.starts]) == ("finished", [(0, True), (3, False)])
    assert list(run.reports.steps) == [1, 2, 3, 4, 5, 6]
    assert [saved.step for saved in run.checkpoints] == [6, 3]
    columns = step_columns(run)
    assert [*columns[0].parts] == [*STEP_PARTS, "other"]
    assert {column.last: column.height for column in columns} == pytest.approx(dict(run.values("time/step_s")))
    assert (tmp_path / "tiny" / "logs" / "attempt-2" / "rank_0.log").read_text().count("done: 6 steps")
