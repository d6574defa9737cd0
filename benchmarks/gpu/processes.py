"""Processes that end in time, with all that they have started."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
_KILL_SECONDS = 10
"""A process that is killed inside a driver's call may take a while to go."""


@dataclass(frozen=True)
class Ended:
    """A process that came to its end."""

    status: int
    output: str
    errors: str


def run_process(command: Sequence[str], limit: float) -> Ended | None:
    """Run a command in the repository's root. None where it was not done after `limit` seconds.

    It leads a process group, which is killed when it ends, is late, or this process is interrupted. Its output goes
    into files: a pipe would be waited for as long as any process holds it.
    """
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        process = subprocess.Popen(
            command, cwd=REPO, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_SECONDS)
        output.seek(0)
        errors.seek(0)
        return Ended(status, output.read(), errors.read())
