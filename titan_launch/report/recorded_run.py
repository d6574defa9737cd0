"""A run as its folder records it, also while the run writes to the folder. Nothing here changes the folder."""

from __future__ import annotations

import fcntl
import json
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from titan_launch.checkpoint.manifest import DamagedCheckpointError, checkpoint_name, complete_steps, read_manifest
from titan_launch.core.errors import UserError
from titan_launch.core.files import read_regular
from titan_launch.metrics.sinks.jsonl import METRICS_FILE
from titan_launch.train.run_folder.attempt import Launch, attempt_name, next_attempt, parse_launch
from titan_launch.train.run_folder.folder import LOCK_FILE, checkpoint_folder
from titan_launch.train.run_folder.records import AUDIT_FILE, CONFIG_FILE, LAUNCH_FILE, ROLLED_BACK_FILE, UNITS_FILE

State = Literal["running", "finished", "stopped", "failed"]
"""State of a run. `finished`: the last step is done. `stopped`: a signal ended the run in order. `failed`: an error
ended the run, or the run was killed."""

Report = dict[str, float]
"""Metrics of a step by tag, and the step as `step`."""


@dataclass(frozen=True)
class Start:
    """A start of all ranks."""

    number: int
    step: int
    """Step of the checkpoint from which the ranks started, or 0."""

    began: datetime | None
    """Time of the first log line. None if there is none."""

    ended: datetime | None
    """Time of the last log line."""

    num_logs: int
    """Number of ranks with a log file here."""

    end: str
    """Last message, or the first line of the error that ended the start."""

    is_error: bool
    """True if `end` is the error of a rank."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    num_bytes: int
    validation_loss: float | None


@dataclass(frozen=True)
class RecordedRun:
    """The records of a run."""

    folder: Path
    name: str
    """Text that tells the run from the others of a comparison."""

    config: Mapping[str, Any]
    """The content of `config.json`: the resolved job, as nested tables."""

    reports: tuple[Report, ...]
    """The reports, with strictly increasing steps."""

    state: State

    @property
    def last_step(self) -> int:
        """The last step with a report or a checkpoint, or 0."""
        return max([0, *(int(report["step"]) for report in self.reports[-1:]), *self.checkpoint_steps])

    @property
    def total_steps(self) -> int:
        """`training.steps`."""
        return int(self.config["training"]["steps"])

    @cached_property
    def checkpoint_steps(self) -> list[int]:
        """Steps of complete checkpoints, the newest first."""
        return complete_steps(checkpoint_folder(self.folder))

    @cached_property
    def checkpoints(self) -> list[Saved]:
        """Complete checkpoints with a readable manifest, the newest first."""
        found = []
        for step in self.checkpoint_steps:
            with suppress(DamagedCheckpointError):
                manifest = read_manifest(checkpoint_folder(self.folder) / checkpoint_name(step))
                num_bytes = sum(file.bytes for file in manifest.files.values())
                found.append(Saved(step, num_bytes, manifest.validation_loss))
        return found

    @cached_property
    def starts(self) -> list[Start]:
        """All starts of the run, from their logs."""
        logs = self.folder / "logs"
        folders = ((number, logs / attempt_name(number)) for number in range(1, next_attempt(logs)))
        return [_start(number, folder) for number, folder in folders if folder.is_dir()]

    @cached_property
    def rolled_back(self) -> list[Report]:
        """The reports that rollbacks have undone, in the order in which they were written."""
        return list(_lines(self.folder / ROLLED_BACK_FILE))

    @cached_property
    def audit(self) -> Mapping[str, Any] | None:
        """The content of `precision_audit.json`; None without that file."""
        return _json_or_none(self.folder / AUDIT_FILE)

    @cached_property
    def units(self) -> list[dict[str, Any]]:
        """The content of `units.json`; empty without that file."""
        return _json_or_none(self.folder / UNITS_FILE) or []

    def values(self, tag: str) -> list[tuple[int, float]]:
        """Return (step, value) of all reports with a metric."""
        return [(int(report["step"]), report[tag]) for report in self.reports if tag in report]

    def last(self, tag: str) -> float | None:
        """Return the last value of a metric, or None."""
        return next((report[tag] for report in reversed(self.reports) if tag in report), None)

    @cached_property
    def tags(self) -> list[str]:
        """All metrics of the run, in the order of their first report."""
        return list(dict.fromkeys(tag for report in self.reports for tag in report if tag != "step"))

    @cached_property
    def _slow_steps(self) -> set[int | None]:
        """The step of the first report after each start."""
        steps = [int(report["step"]) for report in self.reports]
        return {next((step for step in steps if step > start.step), None) for start in self.starts}

    def steady(self, tag: str) -> list[float]:
        """Return the values of a metric without those of the first report after each start, which has the slow first
        steps. If there are no others, return all."""
        found = self.values(tag)
        return [value for step, value in found if step not in self._slow_steps] or [value for _, value in found]

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks of the last report with a throughput, or None."""
        for report in reversed(self.reports):
            for tag, value in report.items():
                if tag.endswith("_per_second") and report.get(f"{tag}_per_device"):
                    return round(value / report[f"{tag}_per_device"])
        return None


def load_run(folder: Path) -> RecordedRun:
    """Read a run folder. Raises UserError if it is none, or if a file is damaged."""
    if not _is_run(folder):
        raise UserError(_no_run(folder))
    path = folder / CONFIG_FILE
    try:
        config = json.loads(read_regular(path))
        training = config["training"]["steps"]
        name = str(config["job"]["name"])
    except FileNotFoundError:
        reason = f"the run ended before its first step (there is no {CONFIG_FILE}); read {folder / 'logs'}"
        raise UserError(f"error: {folder}: {reason}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"error: {path}: not the configuration of a run ({_clause(error)})") from None
    if not isinstance(training, int):
        raise UserError(f"error: {path}: not the configuration of a run (training.steps = {training})")
    reports = tuple(_merged(_lines(folder / METRICS_FILE)))
    return RecordedRun(folder, name, config, reports, _state(folder, training, reports))


def find_runs(folder: Path, depth: int = 3) -> list[Path]:
    """Return the run folders at or below a folder, at most `depth` levels below, sorted by path."""
    if _is_run(folder):
        return [folder]
    if not depth:
        return []
    try:
        below = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.is_symlink())
    except OSError:
        return []
    return [run for entry in below for run in find_runs(entry, depth - 1)]


def _is_run(folder: Path) -> bool:
    return (folder / LOCK_FILE).is_file() or (folder / METRICS_FILE).is_file()


def _no_run(folder: Path) -> str:
    if not folder.is_dir():
        return f"error: {folder}: there is no such folder; `titan-launch runs` lists the runs in outputs"
    below = [str(run) for run in find_runs(folder)]
    hint = f"; runs below it: {', '.join(below[:5])}{' ...' * (len(below) > 5)}" if below else ""
    return f"error: {folder}: not a run folder (it has neither {LOCK_FILE} nor {METRICS_FILE}){hint}"


def _clause(error: Exception) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _lines(path: Path) -> Iterator[Report]:
    """Yield the reports of a file. A last line that is not complete is still being written, or was truncated by a
    kill, and is dropped. Raises UserError for any other line that is no report."""
    try:
        content = read_regular(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"error: {path}: {error.strerror}") from None
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            return
        try:
            report = {str(tag): float(value) for tag, value in json.loads(line).items()}
            report["step"] = int(report["step"])
        except (ValueError, KeyError, TypeError, AttributeError):
            reason = 'not a report of a run (a JSON object with an integer "step" and numbers)'
            raise UserError(f"error: {path}:{number}: {reason}; correct the line, or delete it") from None
        yield report


def _merged(lines: Iterator[Report]) -> list[Report]:
    """Return one report for each step. A run that starts again at an earlier step replaces the later ones."""
    merged: list[Report] = []
    for report in lines:
        while merged and merged[-1]["step"] > report["step"]:
            merged.pop()
        if merged and merged[-1]["step"] == report["step"]:
            merged[-1] |= report
        else:
            merged.append(report)
    return merged


def _state(folder: Path, total_steps: int, reports: tuple[Report, ...]) -> State:
    launch = _launch(folder)
    if _is_locked(folder / LOCK_FILE) or (launch is not None and launch.agent_alive_here() is not None):
        return "running"
    if launch is None or not launch.has_ended:
        return "failed"
    reported = max((report["step"] for report in reports[-1:]), default=0)
    saved = max(complete_steps(checkpoint_folder(folder)), default=0)
    return "finished" if max(reported, saved) >= total_steps else "stopped"


def _launch(folder: Path) -> Launch | None:
    try:
        return parse_launch(read_regular(folder / LAUNCH_FILE))
    except (OSError, ValidationError):
        return None


_FLOCK, _TYPE = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi4x", 0)
"""Layout of `struct flock`, and the index of `l_type`. `l_whence` follows `l_type`."""


def _is_locked(path: Path) -> bool:
    """Return True if another process holds the lock of a run folder. (To try to lock the file would disturb a run that
    starts now.)"""
    fields = [0] * 5
    fields[_TYPE] = fcntl.F_WRLCK
    try:
        with path.open("rb") as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *fields))
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[_TYPE] != fcntl.F_UNLCK)


def _json_or_none(path: Path) -> Any:
    try:
        return json.loads(read_regular(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(f"error: {path} is damaged ({_clause(error)}); delete it") from None


_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ([A-Z]+) titan_launch[\w.]*: (.*)")
_RESUMED = re.compile(r"resumed from .*step-(\d+)")


def _start(number: int, folder: Path) -> Start:
    logs = sorted(folder.glob("rank_*.log"), key=lambda path: (len(path.name), path.name))
    lines: list[tuple[str, str, str]] = []
    errors: list[tuple[str, str, str]] = []
    for index, path in enumerate(logs):
        with suppress(OSError):
            found = _LOG_LINE.findall(read_regular(path).decode(errors="replace"))
            lines = lines if index else found
            errors += [line for line in found if line[1] == "ERROR"]
    resumed = [int(match[1]) for _, _, text in lines if (match := _RESUMED.match(text))]
    times = [datetime.fromisoformat(time) for time, _, _ in (*lines[:1], *lines[-1:])]
    last = min(errors)[2] if errors else lines[-1][2] if lines else ""
    return Start(
        number=number,
        step=resumed[0] if resumed else 0,
        began=times[0] if times else None,
        ended=times[-1] if times else None,
        num_logs=len(logs),
        end=last,
        is_error=bool(errors),
    )
