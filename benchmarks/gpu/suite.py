"""The cases, then the tests marked gpu, in the time there is; the table is written after each of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.gpu.cases import Case, all_cases, smoke_cases
from benchmarks.gpu.processes import REPO, run_process
from benchmarks.gpu.runs import Result, run
from benchmarks.gpu.table import header, table
from benchmarks.publishing import put_between_markers

_TESTS_SECONDS = 90
"""What is kept for the tests marked gpu."""

_CASE_SECONDS = 120
"""A case that takes longer hangs."""

_LEAST_SECONDS = 20
"""No case is done in less."""


def run_suite(is_smoke: bool, path: Path | None, deadline: float) -> list[str]:
    """Run what there is time for until `deadline` (of `time.monotonic`), and print the table; it is also put into the
    Markdown file `path`, after every case. However this ends, what was measured until then is printed.

    Returns the names of the cases that were begun and have no result, and of the tests if they fail.
    """
    cases, device = (list(smoke_cases()), "cpu") if is_smoke else (list(all_cases()), "cuda")
    top = header(is_smoke)  # before the first write makes the commit a dirty one
    outcomes: list[tuple[Case, Result | str]] = []
    tests, have_passed = ("" if is_smoke else "Tests marked gpu: not run."), True

    def text() -> str:
        return "\n".join([top, "", *body(cases, outcomes), *(["", tests] if tests else [])])

    def left() -> float:
        return deadline - time.monotonic()

    def write() -> None:
        if path is not None:
            put_between_markers(text(), "gpu", path)

    try:
        for case in cases:
            limit = min(left() - (0 if is_smoke else _TESTS_SECONDS), _CASE_SECONDS)
            if limit < _LEAST_SECONDS:
                break
            outcomes.append((case, run(case, device, limit)))
            print(f"{case.name}: {outcomes[-1][1]}", file=sys.stderr, flush=True)
            write()
        if not is_smoke:
            tests, have_passed = run_tests(left)
            write()
    finally:
        print(text(), flush=True)
    failed = [case.name for case, result in outcomes if not isinstance(result, Result)]
    return failed if have_passed else [*failed, "the tests marked gpu"]


def body(cases: list[Case], outcomes: list[tuple[Case, Result | str]]) -> list[str]:
    """The table, a paragraph about each case that has no row, and one with the names of those that were not begun."""
    lines = [*table([(case, result) for case, result in outcomes if isinstance(result, Result)])]
    for case, result in outcomes:
        if not isinstance(result, Result):
            lines += ["", f"{case.name}: {result}."]
    if rest := cases[len(outcomes) :]:
        lines += ["", f"Not run: {'; '.join(case.name for case in rest)}."]
    return lines


def run_tests(left: Callable[[], float]) -> tuple[str, bool]:
    """The tests that need a GPU, in the time that is left: their last line, and whether they have passed. Only their
    files are collected: importing all tests takes longer than running these."""
    files = [str(file) for file in sorted(Path(REPO, "tests").rglob("test_*.py")) if "mark.gpu" in file.read_text()]
    done = run_process([sys.executable, "-m", "pytest", "-m", "gpu", *files], left())
    if done is None:
        return "Tests marked gpu: not done in the time that was left; run `pytest -m gpu`.", False
    return f"Tests marked gpu: {(done.output.strip().splitlines() or ['no output'])[-1]}.", done.status == 0
