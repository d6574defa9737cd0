"""Steps of the first ten minutes on a GPU, and the files with their results."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from benchmarks.gpu import gpu_tests
from benchmarks.gpu.cases import FLOAT8_TENSORWISE, SMOKE, Shape
from benchmarks.gpu.processes import log_name, run_process
from benchmarks.gpu.runs import BASE, device_of, overrides, shape_of_job
from benchmarks.gpu.suite import Suite, select
from benchmarks.last_error import last_line

_SHAPE = Shape("1B, 2 layers", "1B", {"n_layers": 2}, 2048, 2)
_STEPS = 6

_COMPILED = {"compile.enable": True}
_CHECKPOINT = {"checkpoint.enable": True, "checkpoint.interval": 3, "checkpoint.keep_latest": 1}

BRANCHES: Mapping[str, Mapping[str, Any]] = {
    "audit": {"debug.audit_precision": True},
    "profile": {"comm.profile_freq": 3, "comm.count_traffic": True},
    "checkpoints by thread": {**_CHECKPOINT, "checkpoint.async_mode": "thread"},
    "checkpoints by process": {**_CHECKPOINT, "checkpoint.async_mode": "process"},
    "CPU offload": {"training.enable_cpu_offload": True},
    "deterministic": {"debug.deterministic": True},
    "Muon": {"optimizer.name": "Muon"},
    "bf16 optimizer state": {"optimizer.state_dtype": "bfloat16"},
    "fp32": {"precision.param_dtype": "float32"},
    "dataloader workers": {"data.num_workers": 2},
    "compiled, selective activation checkpointing": {**_COMPILED, "activation_checkpoint.mode": "selective"},
    "compiled loss": {**_COMPILED, "compile.components": '["loss"]'},
    "compiled model": {**_COMPILED, "compile.components": '["model"]'},
    "compiled, float8 tensorwise, float8 all-gather": {**_COMPILED, **FLOAT8_TENSORWISE, "float8.all_gather": True},
}
"""Keys of the job file by name of the branch: every branch of the launcher that six steps on one GPU can reach."""

_CUDA_ONLY = {"profile": "CUDA only: it profiles CUDA kernels"}

_KEPT_SUFFIXES = (".log", ".txt", ".json", ".jsonl")
_KEPT_BYTES = 16 * 2**20
"""Limits on the packed files: logs, and all files of the runs except checkpoints."""


@dataclass(frozen=True)
class Step:
    """Commands, run one after the other. The first failure ends the step."""

    name: str
    commands: Sequence[Sequence[str]]
    limit: float = 120
    """Time limit of each command in seconds."""

    is_quoted: bool = False
    """True if the summary contains the whole output."""

    skipped: str = ""
    """Reason for not running the step on this machine."""


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    step: Step
    result: Literal["ok", "failed", "skipped"]
    seconds: float
    detail: str
    output: str = ""


def all_steps(is_smoke: bool, scratch: Path) -> Iterator[list[Step]]:
    """Yield groups of steps in order. The steps of a group run at the same time."""
    yield [Step("facts", [[sys.executable, "-m", "benchmarks.gpu.facts"]], is_quoted=True)]
    yield [Step("small GPU tests", [gpu_tests.command("-k", "not predicted")])]
    waits = [sys.executable, "-m", "benchmarks.gpu.waits", *job_words("waits", {}, is_smoke, scratch)]
    yield [Step("waits", [waits], is_quoted=True)]
    yield [branch_step(name, is_smoke, scratch) for name in BRANCHES]


def branch_step(name: str, is_smoke: bool, scratch: Path) -> Step:
    """Return the step of a branch: six training steps. A run with checkpoints is then resumed for three more."""
    jobs = [dict(BRANCHES[name])]
    if "checkpoint.enable" in BRANCHES[name]:
        jobs.append({**BRANCHES[name], "training.steps": _STEPS + 3})
    words = [job_words(name, job, is_smoke, scratch) for job in jobs]
    commands = [[sys.executable, "-m", "titan_launch", *each] for each in words]
    return Step(name, commands, skipped=_CUDA_ONLY.get(name, "") if is_smoke else "")


def job_words(name: str, options: Mapping[str, Any], is_smoke: bool, scratch: Path) -> list[str]:
    """Return the launcher's arguments for a short run that reports after its first and its last step."""
    folder = scratch / "runs" / Path(log_name(name)).stem
    job = shape_of_job(SMOKE if is_smoke else _SHAPE, device_of(is_smoke), str(folder))
    job |= {"training.steps": _STEPS, "metrics.log_freq": 100}
    job |= {"checkpoint.save_last": options.get("checkpoint.enable", False), **options}
    if is_smoke and "compile.enable" in job:
        job["compile.backend"] = "aot_eager"  # inductor would compile C++ for a minute
    if is_smoke and "float8.enable" in job:
        job["float8.emulate"] = True
    return ["--config", BASE, *overrides(job)]


class FirstLook:
    """A runner of the steps and then of the table's cases, which writes the results after each of them.

    The folder `output` has four files, because few can be copied from a borrowed machine: `summary.md`, `logs.tar.gz`,
    and the suite's `table.md` and `results.json`. Everything else is in a temporary folder, `scratch`.
    """

    def __init__(self, output: Path, is_smoke: bool, deadline: float):
        self._output = output
        self._deadline = deadline
        self._folder = TemporaryDirectory()
        self.scratch = Path(self._folder.name)
        self._outcomes: list[Outcome] = []
        cases, _ = select(is_smoke)
        self._suite = Suite(cases, False, device_of(is_smoke), output, self._logs, lambda _: self._write())

    def __enter__(self) -> FirstLook:
        self._output.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._write()
        self._pack(self.scratch)  # not earlier, because a run creates and deletes files while it trains
        print(f"{self.summary()}\n\noutput: {self._output.resolve()}", flush=True)
        self._folder.cleanup()

    @property
    def _logs(self) -> Path:
        return self.scratch / "logs"

    @property
    def has_failed(self) -> bool:
        """Return True if a step or a case has failed."""
        return bool(self._suite.failed) or any(outcome.result == "failed" for outcome in self._outcomes)

    def run(self, steps: Sequence[Step]) -> None:
        """Run up to four steps at the same time, and keep their outcomes in the order of completion."""
        pool = ThreadPoolExecutor(max(2, min(4, len(os.sched_getaffinity(0)) // 4)))
        try:
            for future in as_completed([pool.submit(self._run_step, step) for step in steps]):
                outcome = future.result()
                self._outcomes.append(outcome)
                print(f"{outcome.step.name}: {outcome.result}: {outcome.detail}", file=sys.stderr, flush=True)
                self._write()
        finally:
            pool.shutdown(cancel_futures=True)

    def measure(self) -> None:
        """Run the cases of the table in the time that is left."""
        self._suite.run(self._deadline)

    def summary(self) -> str:
        """Return all results as Markdown."""
        lines = ["| step | result | seconds | last line |", "|---|---|---|---|"]
        for outcome in self._outcomes:
            detail = outcome.detail.replace("|", "\\|")
            lines.append(f"| {outcome.step.name} | {outcome.result} | {outcome.seconds:.0f} | {detail} |")
        for outcome in self._outcomes:
            if outcome.step.is_quoted and outcome.output:
                lines += ["", f"## {outcome.step.name}", "", "```text", outcome.output.rstrip(), "```"]
        return "\n".join([*lines, "", "## table", "", self._suite.text()])

    def _run_step(self, step: Step) -> Outcome:
        if step.skipped:
            return Outcome(step, "skipped", 0, step.skipped)
        began = time.monotonic()
        for number, command in enumerate(step.commands, 1):
            left = self._deadline - time.monotonic()
            if left <= 0:
                return Outcome(step, "skipped", 0, "no time left")
            ended = run_process(command, min(step.limit, left), self._logs / f"{number}_{log_name(step.name)}")
            seconds = time.monotonic() - began
            if ended.failure:
                return Outcome(step, "failed", seconds, ended.failure, ended.output)
        lines = [] if step.is_quoted else re.findall(r"^step .*", ended.output, re.MULTILINE)
        return Outcome(step, "ok", seconds, lines[-1] if lines else last_line(ended.output), ended.output)

    def _write(self) -> None:
        (self._output / "summary.md").write_text(f"{self.summary()}\n")
        self._pack(self._logs)

    def _pack(self, folder: Path) -> None:
        with tarfile.open(self._output / "logs.tar.gz", "w:gz") as archive:
            for path in sorted(folder.rglob("*")):
                if path.suffix in _KEPT_SUFFIXES and path.is_file() and path.stat().st_size < _KEPT_BYTES:
                    archive.add(path, path.relative_to(self.scratch))
