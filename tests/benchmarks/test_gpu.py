"""The benchmark suite for GPUs: it keeps the output of failed cases, completes its table, and reports failures in its
exit status."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import __main__, eight, eight_gpus, first_look, gpu_tests, one_gpu, suite
from benchmarks.gpu.cases import Case, all_cases, anchor_cases, smoke_cases
from benchmarks.gpu.comparisons import EXACT, ROUNDING, CheckError, agreement, measured_memory
from benchmarks.gpu.disturbance import DISTURBANCES
from benchmarks.gpu.jobs import BRANCHES, WAITS, Setting
from benchmarks.gpu.processes import Ended, run_process
from benchmarks.gpu.requirements import device_problem, requirements_problem
from benchmarks.gpu.runs import Result, job_of, overrides, planned_gib, read_reports, run
from benchmarks.gpu.steps import Step, StepRunner, agreement_of, last_output_line
from benchmarks.gpu.suite import Suite, select
from benchmarks.gpu.table import row as table_row
from benchmarks.gpu.table import table
from benchmarks.gpu.waits import counted_waits, report
from benchmarks.last_error import last_error
from tests.distributed import run_ranks
from tests.sampling import rest_is_slow, sampled
from tests.train.jobs import run_job, tiny_job
from titan_launch.config.loading.load import load_job
from titan_launch.plan.layout import plan_layout
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


@pytest.mark.slow
def test_a_case_that_the_device_has_no_memory_for_does_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=79 * 2**30))
    monkeypatch.setattr(suite, "run", lambda case, *_: Result(1.0 if case.is_bare else 1.1, 40.0))
    looked_at = Suite(list(all_cases())[:6], False, "cuda", tmp_path, tmp_path)
    looked_at.run(time.monotonic() + 1000)
    text = looked_at.text()
    assert "bf16 storage (planned: 88.7 GiB; the device has 79.0 GiB)" in text and text.count("; the device has") == 2
    assert all(planned_gib(case, "cuda") < 79 for case in anchor_cases() if case.shape.args)  # the one with 8 layers
    assert text.count("| 1.100 |  | 40.00 | ") == 2  # the launcher's steps over the bare loop's, compiled and eager


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


@pytest.mark.slow
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


TRAINED = [case for case in all_cases() if not case.is_bare]


@sampled("planned", TRAINED, 14)
def test_the_jobs_of_all_cases_are_valid_and_planned(planned: tuple[Case, ...]) -> None:
    """Check and plan the jobs for a GPU, which a CPU cannot run."""
    for case in TRAINED:
        load_job("benchmarks/gpu/base.toml", overrides(job_of(case, "cuda", "outputs")))
    for case in planned:
        assert 10 < planned_gib(case, "cuda") < 139.7, case.name


@pytest.mark.parametrize(("steps", "ranks"), rest_is_slow([(eight_gpus, 8), (eight_gpus, 4), (one_gpu, 1)]))
def test_the_jobs_of_all_steps_are_valid(steps: Any, ranks: int, tmp_path: Path) -> None:
    """Check the jobs for GPUs, and how ranks and batches divide."""
    setting = Setting(False, tmp_path, ranks=ranks)
    setting.write_data()
    numbers = []
    for step in (step for group in steps.groups(setting) for step in group):
        for command in step.commands:
            if "--config" in command:
                words = command[command.index("--config") + 1 :]
                config = load_job(words[0], words[1:]).config
                found = re.search(r"--(nproc-per-node|ranks)=(\d+)", " ".join(command))
                numbers.append(1 if found is None else int(found[2]))
                plan_layout(config.parallelism, config.training, world_size=numbers[-1])
                assert config.job.device == "cuda" and (ranks == 1 or config.comm.timeout_seconds == 120)
    assert max(numbers) == ranks and len(numbers) > 15


def test_every_wait_is_of_a_branch() -> None:
    assert BRANCHES.keys() >= {*WAITS}


def test_the_anchor_case_has_the_settings_of_the_published_run() -> None:
    bf16, *_ = anchor_cases()
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
    for name in ("benchmarks/gpu.sh", "scripts/gpu_first_look.sh", "scripts/gpu_eight.sh"):
        refused = script(name, "--smoke", "--wheels", str(tmp_path))
        assert refused.returncode == 2 and f"scripts/gpu_wheels.sh {tmp_path}" in refused.stderr


def write_reports(folder: Path, losses: Sequence[float], **others: float) -> Path:
    folder.mkdir()
    reports = [
        {"step": step, "train/loss": loss, "train/grad_norm": 1.0, **others} for step, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(report)}\n" for report in reports))
    return folder


def test_two_runs_agree_if_all_their_losses_do(tmp_path: Path) -> None:
    one = write_reports(tmp_path / "one", [5.0, 4.0])
    assert agreement(one, one, EXACT) == (
        "relative: losses differ by up to 0, gradient norms differ by up to 0; steps 1 to 2"
    )
    close = write_reports(tmp_path / "close", [5.001, 4.0])
    assert agreement(one, close, ROUNDING).startswith("relative: losses differ by up to 0.0002, ")
    for name, losses, error in (
        ("far", [5.1, 4.0], "losses differ by up to 0.02, .*; allowed: 0.002 and 0.02"),
        ("nan", [math.nan, 4.0], "losses differ by up to nan, "),
        ("short", [5.0], "steps \\[1, 2\\] and of steps \\[1\\]"),
    ):
        with pytest.raises(CheckError, match=error):
            agreement(one, write_reports(tmp_path / name, losses), ROUNDING)
    with pytest.raises(CheckError, match=r"differ by up to 0\.0002, .*; allowed: 0 and 0"):
        agreement(one, close, EXACT)
    with pytest.raises(CheckError, match=r"no reports: .*metrics\.jsonl"):
        agreement(one, tmp_path / "absent", EXACT)


def test_memory_is_predicted_beside_measured(tmp_path: Path) -> None:
    memory = {"memory/predicted_active_gib": 48.13, "memory/max_active_gib": 48.2}
    with_memory = write_reports(tmp_path / "with", [5.0], **memory)
    assert measured_memory(with_memory) == "active memory: predicted 48.13 GiB, measured 48.20 GiB; ratio 0.999"
    assert measured_memory(write_reports(tmp_path / "without", [5.0])) == "no measured memory"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def run_steps(output: Path, has_values: bool, *steps: Step) -> list[str]:
    """Return the rows of the table, without numbers of seconds."""
    with StepRunner(output, has_values, time.monotonic() + 100) as runner:
        for step in steps:
            runner.run([step])
    assert runner.has_failed == any(" | fail | " in row for row in runner.summary().splitlines())
    rows = [line for line in (output / "summary.md").read_text().splitlines() if line.startswith("| ")][1:]
    return [re.sub(r"\| \d+ \|", "| seconds |", row) for row in rows]


def test_a_failed_comparison_is_a_row_and_the_next_step_runs(tmp_path: Path) -> None:
    one, far = (write_reports(tmp_path / name, losses) for name, losses in (("one", [5.0]), ("far", [6.0])))
    print_twice = [python("print('Recompiling function f in g'); print('last')")] * 2
    compared = Step("pair", print_twice, detail=agreement_of(one, far, ROUNDING))
    ended = Step("ended", [python("raise SystemExit(3)"), python("print('never')")], detail=last_output_line)
    slow = Step("slow", [python("import time; time.sleep(60)")], limit=0.5)
    skipped = Step("none", [], skipped="no such GPU")
    steps = (compared, ended, slow, skipped, Step("quoted", [python("print('a|b')")], detail=last_output_line))
    rows = run_steps(tmp_path / "values", True, *steps)
    assert rows == [
        "| pair | fail | seconds | relative: losses differ by up to 0.17, gradient norms differ by up to 0; "
        "steps 1 to 1; allowed: 0.002 and 0.02 |",
        "| ended | fail | seconds | no output |",
        "| slow | fail | seconds | not finished after 0 s; last line: no output |",
        "| none | skipped |  | no such GPU |",
        "| quoted | pass | seconds | a\\|b |",
    ]
    rows = run_steps(tmp_path / "without", False, compared, ended)
    assert rows == [
        "| pair | pass |  | ran; values not compared; recompilations: 2 |",
        "| ended | fail |  | no output |",
    ]


def test_an_error_of_a_disturbed_run_names_the_rank() -> None:
    of_nccl = (
        "not finished: nccl:all_reduce number 40 of group default_pg: started by ranks 0, 1, not by ranks 2, 3 (last"
    )
    of_gloo = "rank 3 is behind: it is in step 12 (loading data)"
    pattern = DISTURBANCES["stop"].naming
    for line, rank, is_named in ((of_nccl, 3, True), (of_nccl, 4, False), (of_gloo, 3, True), (of_gloo, 2, False)):
        assert bool(re.search(pattern.format(rank=rank), line)) == is_named


def test_the_ratio_to_a_bare_loop_with_another_attention_kernel_names_both(tmp_path: Path) -> None:
    reports = tmp_path / "metrics.jsonl"
    reports.write_text("".join(f'{{"step": {step}, "time/step_s": 1.1}}\n' for step in (1, 8, 16)))
    output = "attention: cudnn is not used: cuDNN 9.10.2 is older\nattention (bfloat16): flash\n"
    case = next(case for case in all_cases() if case.label == "compiled")
    launcher = read_reports(case, reports, output)
    assert launcher == Result(1.1, None, "flash")
    for attention, cell in (("cudnn", "1.100 (flash over cudnn)"), ("flash", "1.100")):
        found = table_row(case, launcher, Result(1.0, 40.0, attention), 50.0)
        assert f"| {cell} | flash |" in [*table([found])][-1]
    without_values = [*table([table_row(case, launcher, Result(1.0, 40.0, "cudnn"), 50.0, has_values=False)])][-1]
    assert without_values == f"{row(case)}  |  |  | flash |  | 50.00 |  |"


def test_globs_that_match_no_step_are_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((first_look, "pair: gemma3: without and with checkpointing per op"), (eight, "TP 2")):
        monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--output", str(tmp_path / "no"), "--only", "nothing"])
        assert module.main() == 2
        error = capsys.readouterr().err
        assert error.startswith("error: --only nothing matches nothing; the names are:\n") and f"\n{name}\n" in error
    assert not (tmp_path / "no").exists()


def test_too_few_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert device_problem(False, 8) == "--ranks 8: this host has 4 CUDA devices; set --ranks"
    assert device_problem(False, 4) == device_problem(True, 8) == ""


def results(table: str) -> dict[str, str]:
    """Return the result of each step."""
    rows = [line.removeprefix("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {name: result for name, result, *_ in rows}


@pytest.mark.slow
def test_steps_for_eight_gpus_run_on_two_cpu_ranks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    only = ("--only", "1 rank", "--only", "2 ranks, immediate", "--only", "CP 2")
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--output", str(tmp_path), *only])
    status, printed = eight.main(), capsys.readouterr().out
    assert status == 0, printed
    assert {path.name for path in tmp_path.iterdir()} == {"summary.md", "logs.tar.gz"}
    assert results(printed) == {"step": "result", "1 rank": "pass", "2 ranks, immediate": "pass", "CP 2": "skipped"}
    assert "| relative: losses differ by up to " in printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_all_steps_for_eight_gpus_run_on_two_cpu_ranks(tmp_path: Path) -> None:
    done = script("scripts/gpu_eight.sh", "--smoke", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert {*results(done.stdout).values()} == {"result", "pass", "skipped"}
    assert "SIGKILL to rank 1; " in done.stdout or "rank killed, run resumed | pass" in done.stdout
    assert "SIGSTOP to rank 1; " in done.stdout and "rank 1 is behind" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_steps_without_values_compare_none(tmp_path: Path) -> None:
    only = ("--only", "pair: experts*", "--only", "generation*", "--only", "waits: plain", "--only", "smoke*")
    done = script("scripts/gpu_first_look.sh", "--smoke", "--without-values", "--output", str(tmp_path), *only)
    assert done.returncode == 0, done.stdout
    assert "| pass |  | ran; values not compared |" in done.stdout and "tokens without cuDNN" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_first_look_runs_every_branch_on_a_cpu(tmp_path: Path) -> None:
    """The first look starts about seventy processes and takes minutes."""
    done = script("scripts/gpu_first_look.sh", "--smoke", "--output", str(tmp_path))
    assert done.returncode == 0, done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {"summary.md", "table.md", "results.json", "logs.tar.gz"}
    found = results(done.stdout)
    steps = [step for group in one_gpu.groups(Setting(True, tmp_path)) for step in group]
    assert {step.name: found[step.name] for step in steps} == {
        step.name: "skipped" if step.skipped else "pass" for step in steps
    }
    assert "no CUDA device: PyTorch reports no waits" in done.stdout


class Interrupting(io.StringIO):
    """Messages of a process, which gets SIGTERM after the first one."""

    def write(self, text: str) -> int:
        is_first = not self.tell()
        written = super().write(text)
        if is_first:
            os.kill(os.getpid(), signal.SIGTERM)
        return written


def interrupted_first_look(output: Path) -> tuple[object, str, str]:
    """Return the exit status of a first look that is interrupted after its first step, its output and its messages."""
    dist.destroy_process_group()  # the summary plans a job
    printed, said = io.StringIO(), Interrupting()
    with (
        mock.patch.object(sys, "argv", ["gpu", "--smoke", "--output", str(output)]),
        redirect_stdout(printed),
        redirect_stderr(said),
        pytest.raises(SystemExit) as ended,
    ):
        first_look.main()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return ended.value.code, printed.getvalue(), said.getvalue()


@pytest.mark.slow
def test_an_interrupted_first_look_leaves_its_summary(tmp_path: Path) -> None:
    ((status, out, said),) = run_ranks(interrupted_first_look, 1, tmp_path)
    assert status == 128 + signal.SIGTERM and said.startswith("facts: pass") and said.count("\n") <= 2
    assert "| facts | pass |" in (tmp_path / "summary.md").read_text() and f"output: {tmp_path}" in out
