"""Effect of compilation: a start without it, a first start, and a second start that finds the cached kernels."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.publishing import markdown_table
from benchmarks.speed.contestants import CONTESTANTS, LAUNCHER
from benchmarks.speed.jobs import Job
from benchmarks.speed.runs import Entry, Run

ROUNDS = 1
"""Number of rounds. A second round would find the kernels of the first."""

_STEPS = 12
_STARTS = ("not compiled", "compiled, first start", "compiled, second start")


def groups() -> list[list[Entry]]:
    """Return the starts in the order in which they must run, with one folder of kernels."""
    folder = tempfile.mkdtemp(prefix="speed-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    compiled: dict[str, Any] = {"compile": {"enable": True, "components": ["model", "loss"], "cache_folder": folder}}
    audit: dict[str, Any] = {"debug": {"audit_precision": False}}  # an audited first step is not compiled
    launcher, job = CONTESTANTS[LAUNCHER], Job(steps=_STEPS)
    options = (audit, audit | compiled, audit | compiled)
    starts = zip(_STARTS, options, strict=True)
    return [[Entry("compile", replace(launcher, name=name, options=own), job) for name, own in starts]]


def tables(runs: Sequence[Run]) -> str:
    """Return a Markdown table with one row for each start."""
    rows: list[Sequence[str]] = [("start", "launch to first step, s", "step, ms")]
    for name in _STARTS:
        rows += [
            (name, f"{run.first_step_s:.2f}", f"{1000 * run.step_s:.0f}")
            for run in runs
            if run.contestant == name and not run.failure
        ]
    return markdown_table(rows)
