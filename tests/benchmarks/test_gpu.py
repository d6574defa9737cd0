"""The benchmark suite for GPUs: it keeps the output of failed cases, completes its table, and reports failures in its
exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu import __main__, gpu_tests, suite
from benchmarks.gpu.cases import Case, all_cases, anchor_cases, smoke_cases
from benchmarks.gpu.processes import Ended, run_process
from benchmarks.gpu.requirements import requirements_problem
from benchmarks.gpu.runs import Result, job_of, overrides, planned_gib, run
from benchmarks.gpu.steps import BRANCHES, branch_step
from benchmarks.gpu.suite import Suite, select
from benchmarks.gpu.waits import counted_waits, report
from benchmarks.last_error import last_error
from tests.distributed import run_ranks
from tests.train.jobs import run_job, tiny_job
from titan_launch.config.loading.load import load_job
from titan_launch.train.step import TrainStep

REPO = Path(__file__).parents[2]
BARE, LAUNCHER = smoke_cases()
LAST = replace(BARE, label="last")

TRACEBACK = """\
Traceback (most recent call last):
  File "loop.py", line 1, in <module>
    step()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
"""


def run_smoke(monkeypatch: pytest.MonkeyPatch, output: Path, launcher: Result | str) -> int:
    """Return the exit status of a smoke run whose case after the bare loop's has this outcome."""
    monkeypatch.setattr(suite, "run", lambda case, *_: Result(0.5, None) if case.is_bare else launcher)
    monkeypatch.setattr(suite, "smoke_cases", lambda: [BARE, LAUNCHER, LAST])
    page = output / "page.md"
    page.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->\n")
    arguments = ["gpu", "--smoke", "--write", str(page), "--output", str(output), "--only", "smoke*"]
    monkeypatch.setattr(sys, "argv", arguments)
    return __main__.main()


def row(case: Case) -> str:
    return f"| {case.shape.name} | {case.shape.seq_len} x {case.shape.batch} | {case.label} |"


def test_a_failed_case_is_named_in_its_row_and_sets_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_smoke(monkeypatch, tmp_path, "OutOfMemoryError: 2 GiB") == 1
    out, err = capsys.readouterr()
    text = (tmp_path / "table.md").read_text()
    assert text in out and (tmp_path / "page.md").read_text() == f"<!-- gpu: begin -->\n{text}<!-- gpu: end -->\n"
    assert f"{row(BARE)} 256 |" in text and row(LAST) in text
    assert f"{row(LAUNCHER)} failed: OutOfMemoryError: 2 GiB | " in text
    assert f"error: no result of {LAUNCHER.name}; see the table for the reasons" in err
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert rows[0]["tokens_per_second"] == 256 and rows[1]["failure"] == "OutOfMemoryError: 2 GiB"

    assert run_smoke(monkeypatch, tmp_path, Result(0.5, None)) == 0
    assert f"{row(LAUNCHER)} 256 |" in capsys.readouterr().out


def test_failed_tests_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    failed = Ended(1, "...\nFAILED tests/a.py::test_b - assert 1 == 2\n1 failed in 3 s\n", 9)
    for ended, text in (
        (failed, "1 failed in 3 s; FAILED tests/a.py::test_b - assert 1 == 2"),
        (Ended(0, "...\n1 passed in 3 s", 9), "1 passed in 3 s"),
        (Ended(None, "tests/a.py ..", 9), "not finished after 9 s; last line: tests/a.py .."),
    ):
        monkeypatch.setattr(gpu_tests, "run_process", lambda *_, ended=ended: ended)
        looked_at = Suite([], True, "cpu", tmp_path, tmp_path)
        looked_at.run(time.monotonic() + 1000)
        assert looked_at.text().endswith(f"\nTests marked gpu: {text}.")
        assert bool(looked_at.failed) == (ended.status != 0)


def test_a_case_starts_only_if_its_estimated_time_is_left(tmp_path: Path) -> None:
    looked_at = Suite([BARE], False, "cpu", tmp_path, tmp_path)
    looked_at.run(time.monotonic() + BARE.expected_s - 1)
    assert f"Not run: {BARE.name} (no time left)." in (tmp_path / "table.md").read_text()


def test_a_case_that_the_device_has_no_memory_for_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=79 * 2**30))
    monkeypatch.setattr(suite, "run", lambda case, *_: Result(1.0 if case.is_bare else 1.1, 40.0))
    looked_at = Suite(list(all_cases())[:6], False, "cuda", tmp_path, tmp_path)
    looked_at.run(time.monotonic() + 1000)
    text = looked_at.text()
    assert "bf16 storage (planned: 88.7 GiB; the device has 79.0 GiB)" in text and text.count("; the device has") == 2
    assert text.count("| 1.100 | 40.00 | ") == 2  # the launcher's steps over the bare loop's, compiled and eager


def test_globs_select_cases_and_tests() -> None:
    first = [case.label for case in select(False)[0][:4]]
    assert first == ["bare loop, compiled", "compiled", "bare loop, eager", "eager"]
    assert select(False, ["8B, *"]) == (list(anchor_cases()), False)
    assert select(False, ["tests*"]) == ([], True)


@pytest.mark.parametrize(
    ("output", "error"),
    [
        (TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"),
        (f"{TRACEBACK}error: the run failed on rank 0; see the traceback above", TRACEBACK.splitlines()[-1]),
        (f"{TRACEBACK}[rank0]:[W1] destroy_process_group() was not called\n", TRACEBACK.splitlines()[-1]),
        ("".join(f"[rank3]: {line}\n" for line in TRACEBACK.splitlines()), TRACEBACK.splitlines()[-1]),
        (f"{TRACEBACK}{TRACEBACK.replace('torch.OutOfMemoryError', 'ChildFailedError')}", TRACEBACK.splitlines()[-1]),
        (
            f"{TRACEBACK}{TRACEBACK.replace('torch.OutOfMemoryError', 'torch.ChildFailedError')}{'=' * 60}\nFAILED\n",
            TRACEBACK.splitlines()[-1],
        ),
        (f"{TRACEBACK}During handling:\nTraceback (most recent call last):\n  File\nValueError: b", "ValueError: b"),
        (
            "Traceback (most recent call last):\n  File\nBackendError: raised:\nKeyError: 1",
            "BackendError: raised: KeyError: 1",
        ),
        ("device: cuda\nerror: comm.profile_freq = 3: needs a GPU\n", "error: comm.profile_freq = 3: needs a GPU"),
        ("", "no output"),
    ],
)
def test_the_last_exception_is_found(output: str, error: str) -> None:
    assert last_error(output) == error


def test_all_output_of_a_process_that_is_killed_is_kept(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "a.log"
    script = "echo out; echo err >&2; sleep 60 & echo $!; wait"
    ended = run_process(["bash", "-c", script], 1.0, log)
    out, err, child = ended.output.splitlines()
    assert (out, err) == ("out", "err") and log.read_text().splitlines()[1:] == [out, err, child]
    assert ended.failure == f"not finished after 1 s; last line: {child}"
    with pytest.raises(ProcessLookupError):
        for _ in range(50):  # the zombie exists until its parent reaps it
            os.kill(int(child), 0)
            time.sleep(0.1)
    assert run_process(["bash", "-c", "kill -SEGV $$"], 9, log).failure == "ended by SIGSEGV: no output"


def test_a_case_that_fails_quotes_its_exception_and_keeps_its_output(tmp_path: Path) -> None:
    wrong = replace(BARE, shape=replace(BARE.shape, flavor="2B"), label="wrong")
    reason = run(wrong, "cpu", 60, tmp_path)
    (log,) = tmp_path.iterdir()
    text = log.read_text()
    assert isinstance(reason, str) and reason in text and "2B" in reason
    assert text.startswith("$ ") and "Traceback (most recent call last):" in text


def test_tests_run_in_parallel_where_memory_allows() -> None:
    assert [gpu_tests.num_workers(free, 16) for free in (0, 31, 79, 139.7, 500)] == [1, 1, 2, 4, 8]
    words = gpu_tests.command()
    assert "tests/train/test_cuda.py" in words and words[words.index("--numprocesses") + 1] == "1"


def test_the_jobs_of_all_cases_and_branches_are_valid_and_planned() -> None:
    """Check and plan the jobs for a GPU, which a CPU cannot run."""
    for case in all_cases():
        if not case.is_bare:
            load_job("benchmarks/gpu/base.toml", overrides(job_of(case, "cuda", "outputs")))
            assert 10 < planned_gib(case, "cuda") < 139.7, case.name
    for name in BRANCHES:
        for command in branch_step(name, False, Path("outputs")).commands:
            assert command[3:5] == ["--config", "benchmarks/gpu/base.toml"]
            load_job(command[4], command[5:])


def test_the_anchor_case_has_the_settings_of_the_published_run() -> None:
    bf16, _ = anchor_cases()
    job = load_job("benchmarks/gpu/base.toml", overrides(job_of(bf16, "cuda", "outputs"))).config
    assert bf16.tokens_per_step == 32_768 and job.compile.enable and job.activation_checkpoint.mode == "full"
    assert (job.precision.storage_dtype, job.precision.param_dtype) == ("bfloat16", "bfloat16")
    assert bf16.published is not None and bf16.published.tokens_per_second == 10_471


def _waits(job: dict[str, Any]) -> str:
    """Train twice while an operation waits: in every step, and in a part of the program outside the training loop."""

    def step(*args: Any, **options: Any) -> Any:
        warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        return original(*args, **options)

    original = TrainStep.__call__
    with counted_waits() as waits, mock.patch.object(TrainStep, "__call__", step):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        run_job(job)
    return report(waits)


def test_host_waits_are_counted_by_phase_and_line(tmp_path: Path) -> None:
    job = tiny_job(tmp_path, debug={"audit_precision": False})
    in_step, outside, totals = run_ranks(_waits, 1, job)[0].splitlines()
    assert totals == "waits within steps: 4; all waits: 5"
    assert in_step.startswith(f"    4 x train_one_step: {__file__}:") and ", from train/loop.py:" in in_step
    assert outside.startswith(f"    1 x start or end: {__file__}:")


def test_a_missing_requirement_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert requirements_problem() == ""
    monkeypatch.setattr("benchmarks.gpu.requirements._PACKAGES", ("torch", "no_such_package"))
    problem = requirements_problem()
    assert "lacks no_such_package; run" in problem and "--wheels DIR" in problem


def script(*words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run(words, capture_output=True, text=True, cwd=REPO, env=environment)


def test_a_folder_without_wheels_is_refused(tmp_path: Path) -> None:
    refused = script("benchmarks/gpu.sh", "--smoke", "--wheels", str(tmp_path))
    assert refused.returncode == 2 and f"scripts/gpu_wheels.sh {tmp_path}" in refused.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_look_runs_every_branch_on_a_cpu(tmp_path: Path) -> None:
    """The first look starts about twenty processes and takes minutes."""
    pytest.importorskip("torchao")
    done = script("scripts/gpu_first_look.sh", "--smoke", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"summary.md", "table.md", "results.json", "logs.tar.gz"}
    results = [line.split(" | ")[:2] for line in done.stdout.splitlines() if line.startswith("| ")]
    by_name = {name.removeprefix("| "): result for name, result in results}
    assert all(by_name[name] == "ok" for name in BRANCHES if name != "profile")
    assert (by_name["waits"], by_name["profile"]) == ("ok", "skipped")
    assert "no CUDA device: PyTorch reports no waits" in done.stdout


def test_an_interrupted_first_look_leaves_its_summary(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu.first_look", "--smoke", "--output", str(tmp_path)]
    process = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None and process.stderr.readline().startswith("facts: ok")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert "| facts | ok |" in (tmp_path / "summary.md").read_text() and f"output: {tmp_path}" in out
