"""The reader of run folders. It can read a folder while the run writes to it, and changes nothing there.

The folder may come from a stranger. So each file has a size limit, and the parts of a file that are shown are checked.
"""

from __future__ import annotations

import fcntl
import math
import os
import re
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, overload

from pydantic import AfterValidator, Field, TypeAdapter

from titan_launch.checkpoint.manifest import DamagedCheckpointError, checkpoint_name, complete_steps, read_manifest
from titan_launch.checkpoint.retention import best_steps
from titan_launch.core.errors import UserError
from titan_launch.core.files import MIB, open_regular, read_regular
from titan_launch.core.json_files import MOST_BYTES, JsonError, parse_as, parse_json, reason_of
from titan_launch.core.phantom import is_marked
from titan_launch.core.terminal import one_line
from titan_launch.metrics.sinks.jsonl import METRICS_FILE, numbered_lines
from titan_launch.metrics.tags import WITHOUT_IMPROVEMENT
from titan_launch.plan.proof.certificate import CERTIFICATE, Certificate
from titan_launch.train.run_folder.attempt import Launch, attempt_name, attempt_numbers, parse_launch
from titan_launch.train.run_folder.folder import LOCK_FILE, checkpoint_folder
from titan_launch.train.run_folder.records import (
    AUDIT_FILE,
    CONFIG_FILE,
    LAUNCH_FILE,
    PROOF_FILE,
    ROLLED_BACK_FILE,
    UNITS_FILE,
)

State = Literal["running", "finished", "ended early", "stopped", "failed"]
"""State of a run. `finished`: the last step is done. `ended early`: `validation.patience` ended the run. `stopped`: a
signal ended the run in order. `failed`: an error ended the run, or the run was killed."""

MOST_REPORTS = 2_000_000
"""Largest number of reports in a file."""

MOST_FOLDERS = 200_000
"""Largest number of folders that a search for runs visits."""

MOST_METRICS = 20_000
"""Largest number of different metrics of a run."""

LARGEST, SMALLEST = 1e150, 1e-150
"""Numbers of larger magnitude count as infinite, and numbers of smaller magnitude as 0. So sums, differences and
quotients of two numbers between these limits are finite."""

_MOST_STEPS = 10**15
_LONGEST_NAME = 500
_MOST_STARTS = 200
"""Largest number of starts of a run that are shown. Earlier starts are omitted."""

_LOG_HEAD, _LOG_TAIL = MIB // 4, MIB // 16
"""Largest numbers of bytes that are read at the beginning and at the end of the log of the first rank. Of the logs of
the other ranks, only the end is read."""

_MOST_ERROR_BYTES = 128 * MIB
"""Largest number of bytes that are read from the logs of all ranks but the first, over all starts. The logs of the
newest start are read first."""

_MOST_RECORD_BYTES = 64 * MIB
"""Largest size of `units.json`, `precision_audit.json` and `proof.json`. `precision_audit.json` has about 1 kB for each
module."""

_LONGEST_MESSAGE = 1000


def _plain_name(text: str) -> str:
    if not text or len(text) > _LONGEST_NAME or one_line(text) != text:
        raise ValueError(f"must have 1 to {_LONGEST_NAME} characters, without line ends and control characters")
    return text


_Count = Annotated[int, Field(ge=0, lt=_MOST_STEPS)]
_Name = Annotated[str, AfterValidator(_plain_name)]


@dataclass(frozen=True)
class _Job:
    name: _Name


@dataclass(frozen=True)
class _Training:
    steps: _Count
    seq_len: Annotated[int, Field(ge=1, lt=_MOST_STEPS)] | None = None


@dataclass(frozen=True)
class _Model:
    name: _Name = "a model"
    flavor: _Name | None = None


@dataclass(frozen=True)
class _Validation:
    patience: _Count | None = None


@dataclass(frozen=True)
class _Config:
    """The parts of `config.json` that must have a certain form."""

    job: _Job
    training: _Training
    model: _Model = field(default_factory=_Model)
    validation: _Validation = field(default_factory=_Validation)


_CONFIG = TypeAdapter(_Config)


@dataclass(frozen=True)
class RecordedUnit:
    """A row of `units.json`, the table of FSDP2 units."""

    name: str
    parameters: Annotated[int, Field(ge=0, lt=2**62)]
    storage_dtype: str
    compute_dtype: str
    reduce_dtype: str
    output_dtype: str | None
    reason: str


@dataclass(frozen=True)
class AuditedUnit:
    """An FSDP2 unit in `precision_audit.json`."""

    name: str
    as_planned: bool


@dataclass(frozen=True)
class RecordedAudit:
    """The content of `precision_audit.json`."""

    differences: list[str]
    units: list[AuditedUnit]


_T = TypeVar("_T")


@dataclass(frozen=True)
class Start:
    """A start of all ranks. A run that was resumed has several starts."""

    number: int
    step: int
    """Step of the checkpoint from which the ranks started, or 0."""

    began: datetime | None
    """Time of the first line in the log of the first rank. None without a log line."""

    ended: datetime | None
    """Time of the last line in the log of the first rank. None without a log line."""

    num_logs: int
    """Number of ranks whose log of this start is in the run folder."""

    end: str
    """The first line of the earliest error of a rank. Without errors: the last message of the first rank, or "" without
    a log line."""

    is_error: bool
    """True if `end` is the error of a rank."""


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint."""

    step: int
    num_bytes: int
    validation_loss: float | None


Report = tuple[int, dict[str, float]]
"""A step, and its metrics by tag."""


@dataclass(frozen=True)
class Reports:
    """The reports of a run. Their numbers are in arrays, because a long run has tens of millions of numbers."""

    steps: Sequence[int]
    """The steps with a report, strictly increasing."""

    columns: Mapping[str, tuple[Sequence[int], Sequence[float]]]
    """Steps and values of each metric. The metrics are in the order in which they were first reported."""


class Series(Sequence[tuple[int, float]]):
    """The pairs (step, value) of a metric. A pair is created only when it is read, because a pair takes seven times the
    memory of its two numbers."""

    def __init__(self, steps: Sequence[int], values: Sequence[float]):
        self._steps, self._values = steps, values

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> tuple[int, float]: ...
    @overload
    def __getitem__(self, index: slice) -> Series: ...
    def __getitem__(self, index: int | slice) -> tuple[int, float] | Series:
        if isinstance(index, slice):
            return Series(self._steps[index], self._values[index])
        return self._steps[index], self._values[index]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self._steps, self._values, strict=True)


@dataclass(frozen=True)
class RecordedRun:
    """The content of a run folder. Most files are read only when a property needs them."""

    folder: Path
    name: str
    """`job.name`."""

    config: Mapping[str, Any]
    """The content of `config.json`: the resolved job, as nested tables."""

    reports: Reports
    state: State

    @property
    def last_step(self) -> int:
        """The last step with a report or a checkpoint, or 0."""
        return max([0, *self.reports.steps[-1:], *self.checkpoint_steps])

    @property
    def total_steps(self) -> int:
        return int(self.config["training"]["steps"])

    @property
    def seq_len(self) -> int | None:
        """`training.seq_len`, the number of tokens of a sample; None if `config.json` lacks it."""
        return self.config["training"].get("seq_len")

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
    def best_step(self) -> int | None:
        """Step of the best checkpoint, which is the result, if `validation.patience` ended the run. None for other
        runs, and if no checkpoint with a validation loss is left."""
        if self.state != "ended early":
            return None
        return next(iter(best_steps({saved.step: saved.validation_loss for saved in self.checkpoints})), None)

    @cached_property
    def starts(self) -> list[Start]:
        """The starts of the run, read from its logs: at most the last 200, the oldest first."""
        logs = self.folder / "logs"
        reader = _Logs(_MOST_ERROR_BYTES)
        folders = ((number, logs / attempt_name(number)) for number in self._attempts[: -_MOST_STARTS - 1 : -1])
        return [reader.start(number, folder) for number, folder in folders if os.path.isdir(folder)][::-1]

    @property
    def first_step(self) -> int:
        """Step of the checkpoint, perhaps of another run, from which the ranks started that wrote the first report.
        0 if these ranks started without a checkpoint, if their logs are gone, or if `starts` omits their start."""
        first = next(iter(self.reports.steps), 0)
        return max((start.step for start in self.starts if start.step < first), default=0)

    @property
    def num_starts(self) -> int:
        return len(self._attempts)

    @cached_property
    def _attempts(self) -> list[int]:
        return attempt_numbers(self.folder / "logs")

    @cached_property
    def rolled_back(self) -> list[int]:
        """The steps of the reports that rollbacks have undone, in the order in which the reports were written."""
        return [step for step, _ in _lines(self.folder / ROLLED_BACK_FILE)]

    @cached_property
    def audit(self) -> RecordedAudit | None:
        """The content of `precision_audit.json`; None without that file. Raises UserError if the file is damaged."""
        return _record(self.folder / AUDIT_FILE, TypeAdapter(RecordedAudit))

    @cached_property
    def proof(self) -> Certificate | None:
        """The content of `proof.json`; None without that file. Raises UserError if the file is damaged."""
        return _record(self.folder / PROOF_FILE, CERTIFICATE)

    @cached_property
    def units(self) -> list[RecordedUnit]:
        """The content of `units.json`; empty without that file. Raises UserError if the file is damaged."""
        return _record(self.folder / UNITS_FILE, TypeAdapter(list[RecordedUnit])) or []

    def values(self, tag: str) -> Series:
        """Return (step, value) of all reports with a metric."""
        return Series(*self.reports.columns.get(tag, ((), ())))

    def last(self, tag: str) -> float | None:
        """Return the last value of a metric, or None."""
        return self.reports.columns[tag][1][-1] if tag in self.reports.columns else None

    @property
    def tags(self) -> list[str]:
        return list(self.reports.columns)

    @cached_property
    def _slow_steps(self) -> set[int | None]:
        """The steps of the first report after each start. The set contains None if a start has no report."""
        steps = self.reports.steps
        later = (bisect_right(steps, start.step) for start in self.starts)
        return {steps[index] if index < len(steps) else None for index in later}

    def steady(self, tag: str) -> list[float]:
        """Return the values of a metric without the first report after each start, because this report includes the
        slow first steps. If there are no other reports, return all values."""
        found = self.values(tag)
        return [value for step, value in found if step not in self._slow_steps] or [value for _, value in found]

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks: the last reported throughput, divided by the throughput per device. None if unknown."""
        for tag in self.tags:
            if tag.endswith("_per_second") and (of_device := self.values(f"{tag}_per_device")):
                step, value = self.values(tag)[-1]
                ratio = value / of_device[-1][1] if of_device[-1][0] == step and of_device[-1][1] else math.nan
                if 1 <= ratio < _MOST_STEPS:
                    return round(ratio)
        return None


def load_run(folder: Path) -> RecordedRun:
    """Read a run folder. Raises UserError if the folder is not a run folder, or if a file is damaged. Also raises
    UserError if the run had a phantom GPU, or has not begun its first step."""
    if not _is_run(folder):
        raise UserError(_no_run(folder))
    if is_marked(folder):
        raise UserError(f"error: {folder}: the run had a phantom GPU, and its reports have no values")
    path = folder / CONFIG_FILE
    try:
        content = read_regular(path, MOST_BYTES)
        known, config = parse_as(_CONFIG, content), parse_json(content)
    except FileNotFoundError:
        reason = f"the run has not begun its first step (no {CONFIG_FILE}); if it has ended, read {folder / 'logs'}"
        raise UserError(f"error: {folder}: {reason}") from None
    except (OSError, JsonError) as error:
        raise UserError(f"error: {path}: not the configuration of a run ({reason_of(error)})") from None
    reports = _merged(_lines(folder / METRICS_FILE))
    return RecordedRun(folder, known.job.name, config, reports, _state(folder, known, reports))


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders at or below a folder, at most three levels below, sorted by path. Folders inside of a run
    folder and links to folders are not searched. Raises UserError for more than MOST_FOLDERS folders."""
    found: list[Path] = []
    level, number = [folder], 1
    for _ in range(4):
        found += [entry for entry in level if _is_run(entry)]
        runs = set(found)
        level = [below for entry in level if entry not in runs for below in _folders_in(entry)]
        number += len(level)
        if number > MOST_FOLDERS:
            raise UserError(f"error: {folder}: more than {MOST_FOLDERS:,} folders; name a folder with fewer")
    return sorted(found)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _is_run(folder: Path) -> bool:
    return os.path.isfile(folder / LOCK_FILE) or os.path.isfile(folder / METRICS_FILE)


def _no_run(folder: Path) -> str:
    if not os.path.isdir(folder):
        return f"error: {folder}: there is no such folder; `titan-launch runs` lists the runs in outputs"
    below = [one_line(str(run)) for run in find_runs(folder)]
    hint = f"; runs below it: {', '.join(below[:5])}{' ...' * (len(below) > 5)}" if below else ""
    return f"error: {folder}: not a run folder (it has neither {LOCK_FILE} nor {METRICS_FILE}){hint}"


def _lines(path: Path) -> Iterator[Report]:
    """Yield the reports of a file; none if the file does not exist. An incomplete last line is omitted, because the run
    is still writing it, or was killed. Raises UserError if any other line is not a report, for more than MOST_REPORTS
    lines, and if the file cannot be read."""
    tags: dict[str, str] = {}
    try:
        for number, line in numbered_lines(path):
            if not line.endswith(b"\n"):
                return
            if number > MOST_REPORTS:
                raise UserError(f"error: {path}: more than {MOST_REPORTS:,} reports; move older lines to another file")
            try:
                yield _report(line, tags)
            except (JsonError, ValueError) as error:
                reason = f'not a report of a run (a JSON object with an integer "step" and numbers): {error}'
                raise UserError(f"error: {path}:{number}: {reason}; correct the line, or delete it") from None
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"error: {path}: {reason_of(error)}") from None
    except ValueError as error:
        raise UserError(f"error: {error}") from None


def _report(line: bytes, tags: dict[str, str]) -> Report:
    """Parse a line, and return its report. Raises ValueError if the line is not a report. `tags`: the names of metrics
    in earlier lines, to which new names are added. Reports share these strings, to save memory."""
    table = parse_json(line)
    if not isinstance(table, dict):
        raise ValueError("not an object")
    step = table.pop("step", None)
    if type(step) is not int or not 0 <= step < _MOST_STEPS:
        raise ValueError(f'"step" must be a whole number from 0 to {_MOST_STEPS - 1:,}')
    report: dict[str, float] = {}
    for tag, value in table.items():
        if tag not in tags:
            if len(tags) == MOST_METRICS:
                raise ValueError(f"more than {MOST_METRICS:,} different metrics")
            try:
                tags[tag] = _plain_name(tag)
            except ValueError as error:
                raise ValueError(f"the name of a metric {error}") from None
        report[tags[tag]] = value if type(value) is float and SMALLEST < abs(value) < LARGEST else _number(tag, value)
    return step, report


def _number(tag: str, value: Any) -> float:
    if type(value) in (int, float):
        size = abs(value)
        return 0.0 if size <= SMALLEST else float(value) if size < LARGEST else math.copysign(math.inf, value)
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f'"{tag}" must be a number, "nan", "inf" or "-inf"')


def _merged(lines: Iterator[Report]) -> Reports:
    """Return one report for each step. After a resume at an earlier step, the new reports replace the old reports of
    later steps. Several lines of a step become one report, with the last value of each metric."""
    steps = array("q")  # the steps of all reports, including replaced ones
    kept: list[int] = []  # indices of the reports that are not replaced
    columns: dict[str, tuple[array[int], array[float]]] = {}  # indices of reports, and values, by tag
    has_repeated = False
    for step, report in lines:
        while kept and steps[kept[-1]] > step:
            kept.pop()
            has_repeated = True
        if kept and steps[kept[-1]] == step:
            has_repeated = True
        else:
            kept.append(len(steps))
            steps.append(step)
        for tag, value in report.items():
            column = columns.get(tag) or columns.setdefault(tag, (array("I"), array("d")))
            column[0].append(kept[-1])
            column[1].append(value)
    if has_repeated:
        columns = _without_replaced(columns, {*kept})
    of_all = array("q", map(steps.__getitem__, kept))
    found = {
        tag: (of_all if len(indices) == len(of_all) else array("q", map(steps.__getitem__, indices)), values)
        for tag, (indices, values) in columns.items()
    }
    return Reports(of_all, found)


def _without_replaced(
    columns: Mapping[str, tuple[array[int], array[float]]], kept: set[int]
) -> dict[str, tuple[array[int], array[float]]]:
    """Return the columns with the reports in `kept` only. If a report has several values of a metric, the last one
    remains."""
    found = {}
    for tag, column in columns.items():
        last = {index: value for index, value in zip(*column, strict=True) if index in kept}
        if last:
            found[tag] = array("I", last), array("d", last.values())
    return found


def _state(folder: Path, config: _Config, reports: Reports) -> State:
    launch: Launch | None = None
    with suppress(OSError, JsonError):
        launch = parse_launch(read_regular(folder / LAUNCH_FILE, MOST_BYTES))
    if _is_locked(folder / LOCK_FILE) or (launch is not None and launch.agent_alive_here() is not None):
        return "running"
    if launch is None or not launch.has_ended:
        return "failed"
    reported = max(reports.steps[-1:], default=0)
    saved = max(complete_steps(checkpoint_folder(folder)), default=0)
    at, number = reports.columns.get(WITHOUT_IMPROVEMENT, ((), ()))
    if config.validation.patience and reported in at[-1:] and number[-1] >= config.validation.patience:
        return "ended early"
    return "finished" if max(reported, saved) >= config.training.steps else "stopped"


_FLOCK, _TYPE = ("qqihh", 3) if sys.platform == "darwin" else ("hhqqi4x", 0)
"""Layout of `struct flock` for the module `struct`, and the index of its field `l_type`. The field `l_whence` follows
`l_type`."""


def _is_locked(path: Path) -> bool:
    """Return True if another process holds the lock of a run folder. This function asks for the lock's holder, because
    an attempt to lock the file would disturb a run that starts now."""
    fields = [0] * 5
    fields[_TYPE] = fcntl.F_WRLCK
    try:
        with open_regular(path) as file:
            answer = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(_FLOCK, *fields))
    except OSError:
        return False
    return bool(struct.unpack(_FLOCK, answer)[_TYPE] != fcntl.F_UNLCK)


def _record(path: Path, adapter: TypeAdapter[_T]) -> _T | None:
    try:
        return parse_as(adapter, read_regular(path, _MOST_RECORD_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, JsonError) as error:
        raise UserError(f"error: {path} is damaged ({reason_of(error)}); delete it") from None


_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ([A-Z]+) titan_launch[\w.]*: (.*)", re.ASCII)
_RESUMED = re.compile(r"resumed from .*step-(\d{1,15})\b", re.ASCII)


@dataclass
class _Logs:
    """A reader of logs. `bytes_left`: bytes that it may still read from the logs of all ranks but the first."""

    bytes_left: int

    def start(self, number: int, folder: Path) -> Start:
        logs = sorted(folder.glob("rank_*.log"), key=lambda path: (len(path.name), path.name))
        lines = self._lines(logs[0], _LOG_HEAD) if logs else []
        errors = [line for line in lines if line[1] == "ERROR"]
        for path in logs[1:]:
            errors += [line for line in self._lines(path, 0) if line[1] == "ERROR"][:1]
        resumed = [int(match[1]) for _, _, text in lines if (match := _RESUMED.match(text))]
        times = [time for text, _, _ in (*lines[:1], *lines[-1:]) if (time := _time(text)) is not None]
        last = min(errors)[2] if errors else lines[-1][2] if lines else ""
        return Start(
            number=number,
            step=resumed[0] if resumed else 0,
            began=times[0] if times else None,
            ended=times[-1] if times else None,
            num_logs=len(logs),
            end=one_line(last[:_LONGEST_MESSAGE]),
            is_error=bool(errors),
        )

    def _lines(self, path: Path, head: int) -> list[tuple[str, str, str]]:
        """Return the time, level and text of the lines in the first `head` bytes and at the end of a log. If `head` is
        0, the log is read only for its errors, and the bytes count against `bytes_left`."""
        if not head and self.bytes_left <= 0:
            return []
        try:
            with open_regular(path) as file:
                content = file.read(head)
                if os.fstat(file.fileno()).st_size > head + _LOG_TAIL:
                    file.seek(-_LOG_TAIL, os.SEEK_END)
                    content += b"\n"
                content += file.read(_LOG_TAIL)
        except OSError:
            return []
        if not head:
            self.bytes_left -= len(content)
            if b"ERROR" not in content:
                return []
        return _LOG_LINE.findall(content.decode(errors="replace"))


def _time(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text)
    except ValueError:  # such as month 13
        return None
