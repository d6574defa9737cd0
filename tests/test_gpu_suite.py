"""The benchmark for GPUs: whatever fails, the table is whole, and the exit status says so."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu import __main__, suite
from benchmarks.gpu.cases import Case
from benchmarks.gpu.processes import Ended
from benchmarks.gpu.runs import Result


def run_smoke(monkeypatch: pytest.MonkeyPatch, page: Path, launcher: Result | str) -> int:
    """Its exit status, where the case after the bare loop's has this result."""
    monkeypatch.setattr(suite, "run", lambda case, *_: Result(0.5, None) if case.is_bare else launcher)
    monkeypatch.setattr(suite, "smoke_cases", lambda: [*CASES, CASES[0]])
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["gpu", "--smoke", "--write", str(page)])
    page.write_text("<!-- gpu: begin -->\n<!-- gpu: end -->\n")
    return __main__.main()


CASES = list(suite.smoke_cases())
BARE, LAUNCHER = CASES[0], CASES[1]


def row(case: Case) -> str:
    return f"| {case.shape.name} | {case.shape.seq_len} x {case.shape.batch} | {case.label} |"


def test_a_case_that_fails_costs_its_row_and_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    assert run_smoke(monkeypatch, page, "failed: out of memory") == 1
    out, err = capsys.readouterr()
    assert page.read_text() == f"<!-- gpu: begin -->\n{out}<!-- gpu: end -->\n"
    assert out.count(row(BARE)) == 2 and row(LAUNCHER) not in out  # the case after it is measured too
    assert f"\n{LAUNCHER.name}: failed: out of memory.\n" in out
    assert err.splitlines()[-1] == f"error: no result of {LAUNCHER.name}; the reasons are below the table"

    assert run_smoke(monkeypatch, page, Result(0.5, None)) == 0
    assert row(LAUNCHER) in capsys.readouterr().out


def test_tests_that_fail_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(suite, "run", lambda *_: Result(0.5, None))
    monkeypatch.setattr(suite, "all_cases", lambda: CASES)
    for ended, last, failed in (
        (Ended(1, "...\n1 failed", ""), "1 failed", ["the tests marked gpu"]),
        (Ended(0, "...\n1 passed", ""), "1 passed", []),
        (None, "not done in the time that was left; run `pytest -m gpu`", ["the tests marked gpu"]),
    ):
        monkeypatch.setattr(suite, "run_process", lambda *_, ended=ended: ended)
        assert suite.run_suite(False, None, time.monotonic() + 1000) == failed
        assert capsys.readouterr().out.endswith(f"Tests marked gpu: {last}.\n")
