"""Steps of a script for a borrowed GPU: commands with a time limit, their results, and one table of all."""

from __future__ import annotations

import os
import re
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from benchmarks.gpu.comparisons import CheckError, Tolerance, agreement, measured_memory, recompilations
from benchmarks.gpu.comparisons import tokens_per_second as speed
from benchmarks.gpu.processes import log_name, run_process, slowness
from benchmarks.last_error import last_line

_KEPT_SUFFIXES = (".log", ".txt", ".json", ".jsonl")
_KEPT_BYTES = 16 * 2**20
"""Limits on the packed files: logs, and all files of the runs except checkpoints."""

Detail = Callable[[Sequence[str], bool], str]
"""A function of the outputs of a step's commands, and of True if the device computes values. It returns the last column
of the step's row, or raises CheckError if the result is not the expected one."""


def last_output_line(outputs: Sequence[str], has_values: bool) -> str:
    """Return the last line of the output. It has no number that a device without values makes up."""
    return last_line(outputs[-1])


def last_report(outputs: Sequence[str], has_values: bool) -> str:
    """Return the last report of a training."""
    if not has_values:
        return "ran"
    lines = re.findall(r"^step .*", outputs[-1], re.MULTILINE)
    return lines[-1] if lines else last_line(outputs[-1])


def agreement_of(one: Path, other: Path, tolerance: Tolerance) -> Detail:
    """Return a detail that compares the reports of two runs, and counts recompilations if they were logged."""

    def compare(outputs: Sequence[str], has_values: bool) -> str:
        text = agreement(one, other, tolerance) if has_values else "ran; values not compared"
        count = recompilations(outputs)
        return f"{text}; recompilations: {count}" if count else text

    return compare


def memory_of(run_folder: Path) -> Detail:
    """Return a detail with predicted and measured memory, which needs no values, and the speed, which does."""

    def describe(outputs: Sequence[str], has_values: bool) -> str:
        return "; ".join([measured_memory(run_folder), *([speed(run_folder)] if has_values else [])])

    return describe


@dataclass(frozen=True)
class Step:
    """Commands, run one after the other. The first failure ends the step."""

    name: str
    commands: Sequence[Sequence[str]]
    limit: float = 120
    """Time limit of each command in seconds."""

    detail: Detail = last_report
    is_quoted: bool = False
    """True if the summary contains the whole output."""

    skipped: str = ""
    """Reason for not running the step on this machine."""


def select_steps(groups: Iterable[Sequence[Step]], only: Sequence[str]) -> list[list[Step]]:
    """Return the groups with the steps whose names match one of the globs. Without a glob, all match."""
    return [[step for step in steps if not only or any(fnmatchcase(step.name, g) for g in only)] for steps in groups]


@dataclass(frozen=True)
class Outcome:
    """The result of a step."""

    step: Step
    result: Literal["pass", "fail", "skipped"]
    seconds: float | None
    """None on a device without values, whose times mean nothing."""

    detail: str
    output: str = ""


class StepRunner:
    """A runner of steps, which writes the results after each of them.

    The folder `output` gets `summary.md` and `logs.tar.gz`, because few files can be copied from a borrowed machine.
    Everything else is in a temporary folder, `scratch`.
    """

    def __init__(self, output: Path, has_values: bool, deadline: float):
        """`has_values`: False on a device that computes nothing. `deadline`: of `time.monotonic`."""
        self._output = output
        self._has_values = has_values
        self._deadline = deadline
        self._folder = TemporaryDirectory()
        self.scratch = Path(self._folder.name)
        self._outcomes: list[Outcome] = []
        self.appendix: Callable[[], str] = lambda: ""
        """Text below the table of the steps."""

    def __enter__(self) -> StepRunner:
        self._output.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        self.write()
        self._pack(self.scratch)  # not earlier, because a run creates and deletes files while it trains
        print(f"{self.summary()}\n\noutput: {self._output.resolve()}", flush=True)
        self._folder.cleanup()

    @property
    def logs(self) -> Path:
        """The folder with the output of every command."""
        return self.scratch / "logs"

    @property
    def has_failed(self) -> bool:
        """Return True if a step has failed."""
        return any(outcome.result == "fail" for outcome in self._outcomes)

    def run(self, steps: Sequence[Step]) -> None:
        """Run up to four steps at the same time, and keep their outcomes in the order of completion."""
        pool = ThreadPoolExecutor(max(2, min(4, len(os.sched_getaffinity(0)) // 4)))
        try:
            for future in as_completed([pool.submit(self._run_step, step) for step in steps]):
                outcome = future.result()
                self._outcomes.append(outcome)
                print(f"{outcome.step.name}: {outcome.result}: {outcome.detail}", file=sys.stderr, flush=True)
                self.write()
        finally:
            pool.shutdown(cancel_futures=True)

    def summary(self) -> str:
        """Return all results as Markdown."""
        lines = ["| step | result | seconds | detail |", "|---|---|---|---|"]
        for outcome in self._outcomes:
            seconds = "" if outcome.seconds is None else f"{outcome.seconds:.0f}"
            detail = outcome.detail.replace("|", "\\|")
            lines.append(f"| {outcome.step.name} | {outcome.result} | {seconds} | {detail} |")
        for outcome in self._outcomes:
            if outcome.step.is_quoted and outcome.output:
                lines += ["", f"## {outcome.step.name}", "", "```text", outcome.output.rstrip(), "```"]
        if not self._has_values:
            lines += ["", "The device computes no values: losses were not compared, and times are left out."]
        appendix = self.appendix()
        return "\n".join([*lines, *(["", appendix] if appendix else [])])

    def write(self) -> None:
        """Write the results so far."""
        (self._output / "summary.md").write_text(f"{self.summary()}\n")
        self._pack(self.logs)

    def _run_step(self, step: Step) -> Outcome:
        if step.skipped:
            return Outcome(step, "skipped", None, step.skipped)
        began = time.monotonic()

        def outcome(result: Literal["pass", "fail", "skipped"], detail: str) -> Outcome:
            seconds = time.monotonic() - began if self._has_values else None
            return Outcome(step, result, seconds, detail, "".join(outputs[-1:]))

        outputs: list[str] = []
        limit = step.limit * slowness(self._has_values)
        for number, command in enumerate(step.commands, 1):
            left = self._deadline - time.monotonic()
            if left <= 0:
                return outcome("skipped", "no time left")
            ended = run_process(command, min(limit, left), self.logs / f"{number}_{log_name(step.name)}")
            outputs.append(ended.output)
            if ended.failure:
                return outcome("fail", ended.failure)
        try:
            return outcome("pass", step.detail(outputs, self._has_values))
        except CheckError as error:
            return outcome("fail", str(error))

    def _pack(self, folder: Path) -> None:
        with tarfile.open(self._output / "logs.tar.gz", "w:gz") as archive:
            for path in sorted(folder.rglob("*")):
                if path.suffix in _KEPT_SUFFIXES and path.is_file() and path.stat().st_size < _KEPT_BYTES:
                    archive.add(path, path.relative_to(self.scratch))
