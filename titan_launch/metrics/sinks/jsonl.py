"""Metrics as lines of JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from pydantic import BaseModel, ValidationError

from titan_launch.core.errors import UserError
from titan_launch.core.files import RecordFile, open_regular
from titan_launch.metrics.sinks.interface import Sink

METRICS_FILE = "metrics.jsonl"
"""Name of the file in the run folder."""

MOST_LINE_BYTES = 32 << 20
"""Largest size of a line in bytes. The line of a report with 500,000 metrics has 30 MiB."""

_MOST_VALUES = 1_000_000
"""Largest number of values in a line. Each value takes up to 500 bytes of memory while the line is parsed."""

_NO_LINE: tuple[int, dict[str, float | str], int] = (-1, {}, 0)


class JsonlSink(Sink):
    """A sink that writes one JSON object per report: `{"step": 10, "train/loss": 5.25, ...}`.

    JSON has no NaN and no infinity, so these are written as the strings "nan", "inf" and "-inf", which `float` accepts.

    A second call of `write` for the same step adds its metrics to the line of the step.
    """

    def __init__(self, path: Path, resume_step: int = 0):
        """Open the file. `resume_step`: step of the checkpoint that the run resumes from; 0 for a new run.

        The lines of later steps, and an incomplete last line, are deleted. Raises UserError if a line is not a report
        or is too long. Lines after the first deleted line are not checked.
        """
        if path.exists():
            os.truncate(path, _length_until(path, resume_step))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = RecordFile(path, "ab")
        self._last = _NO_LINE
        """Step, metrics, and length in bytes of the last line that this object has written."""

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the metrics to the line of `step`. If the run is killed afterwards, the line is not lost."""
        finite = {tag: json_number(value) for tag, value in scalars.items()}
        last_step, before, length = self._last
        if step != last_step:
            before, length = {}, 0
        content = {**before, **finite}
        line = json.dumps({"step": step, **content}, allow_nan=False).encode().ljust(length - 1) + b"\n"
        if length:
            self._file.replace_last(length, line)
        else:
            self._file.append(line)
        self._last = step, content, len(line)

    def rewind(self, step: int) -> None:
        """Move the lines of steps after `step` to the end of `metrics.rolled_back.jsonl`. The run repeats these steps
        with other samples. If the lines cannot be moved, such as on a full disk, delete them and raise OSError."""
        kept = _length_until(self._path, step)
        try:
            with (
                self._path.open("rb") as file,
                closing(RecordFile(self._path.with_suffix(".rolled_back.jsonl"), "ab")) as rolled_back,
            ):
                file.seek(kept)
                rolled_back.append(file.read())
        finally:
            os.truncate(self._path, kept)  # otherwise the steps of the file would decrease
            self._last = _NO_LINE

    def close(self, failed: bool = False) -> None:
        self._file.close()


def json_number(value: float) -> float | str:
    """Return a finite number itself, and other numbers as "nan", "inf" or "-inf", which `float` accepts."""
    return value if math.isfinite(value) else str(float(value))


def _length_until(path: Path, last_step: int) -> int:
    """Return the number of bytes before the first line that is incomplete or belongs to a step after `last_step`.

    Steps never decrease within a file. Raises UserError for a line that is not a report or is too long.
    """
    length = 0
    try:
        for number, line in numbered_lines(path):
            if not line.endswith(b"\n") or _step_of(line, f"{path}:{number}") > last_step:
                break
            length += len(line)
    except ValueError as error:
        raise UserError(str(error)) from None
    return length


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) for each line of a file of reports. Numbers count from 1. Raises OSError if the file cannot
    be read, and ValueError for a line that is too long."""
    with open_regular(path) as file:
        number = 0
        while line := file.readline(MOST_LINE_BYTES + 1):
            number += 1
            if len(line) > MOST_LINE_BYTES:
                reason = f"not a report of a run: a line of more than {MOST_LINE_BYTES >> 20} MiB"
                raise ValueError(f"{path}:{number}: {reason}; delete the line, or move the file away")
            yield number, line


class _Report(BaseModel):
    step: int


def _step_of(line: bytes, location: str) -> int:
    try:
        if line.count(b",") + line.count(b"[") + line.count(b"{") <= _MOST_VALUES:
            return _Report.model_validate_json(line, strict=True).step
        raise UserError(f"{location}: the line has more than {_MOST_VALUES:,} values; delete the line")
    except ValidationError:
        reason = 'is not a report of a run (a JSON object with an integer "step")'
        raise UserError(f"{location}: the line {reason}; correct the line, or move the file away") from None
