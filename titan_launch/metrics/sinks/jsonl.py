"""Metrics as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from titan_launch.core.errors import UserError
from titan_launch.core.files import open_regular
from titan_launch.metrics.sinks.base import Sink

METRICS_FILE = "metrics.jsonl"
"""Name of the file in the run folder."""


class JsonlSink(Sink):
    """One object per report: `{"step": 10, "train/loss": 5.25, ...}`.

    JSON has no numbers that are not finite, so these are the strings "nan", "inf" and "-inf": nothing is lost, every
    parser reads the file, and `float(value)` gives back any value.

    A resumed run drops the lines of steps that are computed again, and a last line that a kill has cut short. A run
    that goes back to a checkpoint moves them to the end of `metrics.rolled_back.jsonl`: these steps had other samples.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        """`resume_step`: the step of the checkpoint that the run goes on from; 0 for a fresh start. Raises UserError
        where a line of the file is no report."""
        if path.exists():
            os.truncate(path, _length_until(path, resume_step))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8")  # line by line

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """One line, on disk when this returns: a run that is killed loses nothing."""
        finite = {tag: json_number(value) for tag, value in scalars.items()}
        self._file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")

    def rewind(self, step: int) -> None:
        """Move the lines of later steps to the file of those that were rolled back."""
        kept = _length_until(self._path, step)
        with self._path.open("rb") as file, self._path.with_suffix(".rolled_back.jsonl").open("ab") as rolled_back:
            file.seek(kept)
            rolled_back.write(file.read())
        os.truncate(self._path, kept)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def json_number(value: float) -> float | str:
    """A number as JSON has it: itself, or "nan", "inf" and "-inf", which `float` reads."""
    return value if math.isfinite(value) else str(float(value))


def _length_until(path: Path, last_step: int) -> int:
    """Bytes of the lines before the first that is of a later step, or torn. Steps never go back within a file."""
    length = 0
    with open_regular(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n") or _step_of(line, f"{path}:{number}") > last_step:
                break
            length += len(line)
    return length


@dataclass(frozen=True)
class _Report:
    step: int


_REPORT = TypeAdapter(_Report)


def _step_of(line: bytes, location: str) -> int:
    try:
        return _REPORT.validate_json(line, strict=True).step
    except ValidationError:
        reason = 'is no report of a run (a JSON object with a whole number as "step")'
        raise UserError(f"{location}: the line {reason}; correct the line, or move the file away") from None
