"""Processes with a time limit, and log files with their whole output."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.last_error import last_error, last_line

REPO = Path(__file__).parents[2]

_KILL_SECONDS = 10
"""A process that is killed inside a driver call may take a while to end."""

_SLOWNESS = 10


def slowness(has_values: bool) -> int:
    """Return the factor of all time limits. It is above 1 on a device that computes nothing, where the processes of all
    GPUs share a few CPU cores."""
    return 1 if has_values else _SLOWNESS


_running: set[subprocess.Popen[Any]] = set()
_is_stopping = threading.Event()


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    status: int | None
    """Exit status; minus the signal number if a signal ended the process; None if the time limit did."""

    output: str
    """Standard output and standard error of the process and its children."""

    limit: float
    """Time limit in seconds."""

    @property
    def failure(self) -> str:
        """The reason for a failure; empty for exit status 0."""
        if self.status == 0:
            return ""
        if self.status is None:
            return f"not finished after {self.limit:.0f} s; last line: {last_line(self.output)}"
        signal_prefix = f"ended by {signal.Signals(-self.status).name}: " if self.status < 0 else ""
        return f"{signal_prefix}{last_error(self.output)}"


def run_process(command: Sequence[str], limit: float, log: Path) -> Ended:
    """Run a command in the repository root for at most `limit` seconds, and write its output to `log`.

    The process leads a process group. The group is killed when the process ends, exceeds the limit, or is interrupted.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", errors="replace") as file:
        file.write(f"$ {shlex.join(command)}\n")
        file.flush()
        process = subprocess.Popen(
            command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        _running.add(process)
        if _is_stopping.is_set():  # the handler has not seen this process
            _kill(process)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
            _running.discard(process)
    return Ended(status, log.read_text(errors="replace").partition("\n")[2], limit)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Kill all processes of `run_process` on SIGTERM or SIGINT, then raise SystemExit."""

    def end(number: int, _: object) -> None:
        _is_stopping.set()
        for process in list(_running):
            _kill(process)
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def log_name(name: str) -> str:
    """Return a file name for the log of a case or step."""
    return f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.log"


def _kill(process: subprocess.Popen[Any]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
