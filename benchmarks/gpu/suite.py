"""Runner of the cases and of the tests marked `gpu` within a time budget. The table is written after each of them."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import gpu_tests
from benchmarks.gpu.cases import Case, all_cases, smoke_cases
from benchmarks.gpu.processes import log_name, slowness
from benchmarks.gpu.runs import Device, Result, planned_gib, run
from benchmarks.gpu.table import header, row, table

_LIMIT = 4
"""Time limit of a case, as a multiple of its expected duration."""


def select(is_smoke: bool, only: Iterable[str] = ()) -> tuple[list[Case], bool]:
    """Return the cases whose names match one of the globs, and True if the tests match. Without a glob, all match."""

    def is_selected(name: str) -> bool:
        return not globs or any(fnmatchcase(name, glob) for glob in globs)

    globs = tuple(only)
    cases = smoke_cases() if is_smoke else all_cases()
    return [case for case in cases if is_selected(case.name)], is_selected(gpu_tests.NAME)


class Suite:
    """A runner of cases and tests, which writes the files with their results.

    The folder `output` contains `table.md` and `results.json`. They are written after every case, so an interrupted
    run loses one case at most. The folder `logs` contains the whole output of every process.
    """

    def __init__(
        self,
        cases: list[Case],
        with_tests: bool,
        device: Device,
        output: Path,
        logs: Path,
        has_values: bool = True,
        on_change: Callable[[str], None] = lambda text: None,
    ):
        """`has_values`: False on a device that computes nothing, whose times are left out. `on_change` is called with
        the table after every case."""
        self._cases = cases
        self._with_tests = with_tests
        self._device = device
        self._output = output
        self._logs = logs
        self._has_values = has_values
        self._on_change = on_change
        # The commit in the header is the one before `on_change`, which may write to the docs.
        self._header = header(device == "cpu")
        self._planned = {case.name: planned_gib(case, device) for case in cases if not case.is_bare}
        self._outcomes: list[tuple[Case, Result | str]] = []
        self._not_run = {case.name: "no time left" for case in cases}
        self._tests = "not run" if with_tests else ""
        self.failed: list[str] = []
        """Names of the failed cases, and of the tests if one failed."""

    def run(self, deadline: float) -> None:
        """Run the cases in order, then the tests, until `deadline` (of `time.monotonic`)."""
        reserved = gpu_tests.expected_seconds() if self._with_tests else 0.0
        for case in self._cases:
            left = deadline - time.monotonic() - reserved
            if reason := self._misfit(case):
                self._not_run[case.name] = reason
            elif left > case.expected_s:
                self._measure(case, min(left, _LIMIT * case.expected_s * slowness(self._has_values)))
            self._write()
        if self._with_tests:
            self._test(deadline - time.monotonic())
            self._write()

    def text(self) -> str:
        """Return the table as Markdown, with the cases that did not run and the result of the tests below it."""
        lines = [self._header, "", *table(self._rows())]
        if self._not_run:
            lines.append(f"\nNot run: {'; '.join(f'{name} ({reason})' for name, reason in self._not_run.items())}.")
        if self._tests:
            lines.append(f"\nTests marked gpu: {self._tests}.")
        return "\n".join(lines)

    def _misfit(self, case: Case) -> str:
        """Return an error if the device has too little memory for a case."""
        if self._device == "cpu":
            return ""
        planned = self._planned.get(case.name, 0.0)
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        return f"planned: {planned:.1f} GiB; the device has {total:.1f} GiB" if planned > total else ""

    def _measure(self, case: Case, limit: float) -> None:
        del self._not_run[case.name]
        outcome = run(case, self._device, limit, self._logs)
        self._outcomes.append((case, outcome))
        if isinstance(outcome, str):
            self.failed.append(case.name)
        print(f"{case.name}: {outcome}", file=sys.stderr, flush=True)

    def _test(self, limit: float) -> None:
        if limit <= 0:
            return
        ended = gpu_tests.run_tests(limit, self._logs / log_name(gpu_tests.NAME), self._has_values)
        self._tests = gpu_tests.summary(ended)
        if ended.failure:
            self.failed.append(gpu_tests.NAME)

    def _rows(self) -> list[dict[str, Any]]:
        return [
            row(case, outcome, self._bare(case), self._planned.get(case.name), self._has_values)
            for case, outcome in self._outcomes
        ]

    def _bare(self, case: Case) -> Result | None:
        """Return the result of the bare loop that does the same work as the case."""
        results = [result for bare, result in self._outcomes if case.does_the_same_as(bare)]
        return results[0] if results and isinstance(results[0], Result) else None

    def _write(self) -> None:
        self._output.mkdir(parents=True, exist_ok=True)
        (self._output / "table.md").write_text(f"{self.text()}\n")
        results = {"header": self._header, "rows": self._rows(), "not_run": self._not_run}
        (self._output / "results.json").write_text(json.dumps({**results, "tests": self._tests}, indent=2) + "\n")
        self._on_change(self.text())
