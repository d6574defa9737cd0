"""Runs of trainings and commands, one after the other, timed by the clock that all tools share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from benchmarks.last_error import last_error
from benchmarks.speed.contestants import REPO, Contestant, Environments, command, launcher_sections, to_toml
from benchmarks.speed.jobs import Job

Contender = TypeVar("Contender")

TIME_LIMIT_S = 600
WARM_UP_INTERVALS = 1
"""Number of first intervals between steps that are not counted: tools report and observe after step 1."""


@dataclass(frozen=True)
class Run:
    """One training of one contestant."""

    group: str
    contestant: str
    round: int
    job: Job
    stamps: tuple[float, ...]
    """Seconds from launch to the end of every optimizer step."""

    failure: str = ""
    """Number of completed steps and last error of an incomplete run; empty for a complete run."""

    metrics: dict[str, float] = field(default_factory=dict)
    """Last reported value of each metric; for the launcher only."""

    @property
    def steps_s(self) -> list[float]:
        """Seconds of each counted step."""
        times = [later - earlier for earlier, later in zip(self.stamps, self.stamps[1:], strict=False)]
        return times[WARM_UP_INTERVALS:]

    @property
    def step_s(self) -> float:
        """Median seconds of the counted steps."""
        return median(self.steps_s)

    @property
    def first_step_s(self) -> float:
        """Seconds from launch to the end of the first optimizer step."""
        return self.stamps[0]

    def dump(self) -> str:
        """Return the run as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def load(line: str) -> Run:
        """Return the run from the line that `dump` has written."""
        values = json.loads(line)
        return Run(**values | {"job": Job(**values["job"]), "stamps": tuple(values["stamps"])})


@dataclass(frozen=True)
class Entry:
    """A training or a command that runs once per round."""

    group: str
    """Name of the group. Entries of a group are compared, and run next to each other."""

    contestant: Contestant
    job: Job
    rounds: int | None = None
    """Number of first rounds in which the entry runs; None for all rounds."""

    words: tuple[str, ...] = ()
    """Arguments of a command that is timed from start to end instead of a training; empty for a training."""


def rotated(entries: Sequence[Contender], turn: int) -> list[Contender]:
    """Return the entries rotated by `turn`, so that the order differs between rounds."""
    start = turn % len(entries)
    return [*entries[start:], *entries[:start]]


def interleaved(groups: Sequence[Sequence[Entry]], rounds: int) -> Iterator[tuple[int, Entry]]:
    """Yield (round, entry) for every round. Entries of a group are adjacent and rotate: A B C, B C A, ..."""
    for turn in range(rounds):
        for group in groups:
            yield from ((turn, entry) for entry in rotated(group, turn) if turn < (entry.rounds or rounds))


def run(entry: Entry, turn: int, environments: Environments) -> Run:
    """Start the processes of an entry, and wait for their end."""
    with tempfile.TemporaryDirectory() as path:
        if entry.words:
            return _run_command(entry, turn, environments, Path(path))
        return _run_training(entry, turn, environments, Path(path))


def _run_training(entry: Entry, turn: int, environments: Environments, folder: Path) -> Run:
    job, stamps = entry.job, folder / "stamps"
    words = command(entry.contestant, job, environments, folder)
    launched = time.monotonic()
    _, ended = timed_process(words, {"SPEED_STAMPS": str(stamps)})
    times = [float(line) - launched for line in stamps.read_text().split()] if stamps.exists() else []
    # Errors after the last step do not count: a peer may fail to shut gloo down.
    failure = "" if len(times) == job.steps else f"{len(times)} of {job.steps} steps; {ended}"
    return Run(entry.group, entry.contestant.name, turn, job, tuple(times), failure, _metrics(folder))


def _run_command(entry: Entry, turn: int, environments: Environments, folder: Path) -> Run:
    """Run a command. `{job}` in its arguments is replaced by the path of the job file."""
    path = folder / "job.toml"
    path.write_text(to_toml(launcher_sections(entry.job, folder)))
    words = [environments.own, *(word.format(job=path) for word in entry.words)]
    started = time.monotonic()
    status, ended = timed_process(words)
    failure = "" if status == 0 else ended
    return Run(entry.group, entry.contestant.name, turn, entry.job, (time.monotonic() - started,), failure)


def timed_process(words: list[str], variables: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a command with one thread per process. `variables`: environment variables of the clock, if it is used.

    Return the exit status, and a text with the status and the last error or line of output.
    """
    environment = process_environment(variables or {})
    process = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=TIME_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its workers
        output, _ = process.communicate()
    return process.returncode, f"status {process.returncode}: {last_error(output)}"


def process_environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of every tool. `variables`: environment variables of the clock, if it is used."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # installed tools have bytecode, so the launcher gets it too
    paths = [str(REPO), *([str(Path(__file__).parent / "clock")] if variables else [])]
    return environment | {"PYTHONPATH": os.pathsep.join(paths), **variables}


def _metrics(folder: Path) -> dict[str, float]:
    found: dict[str, Any] = {}
    for path in folder.glob("outputs/*/metrics.jsonl"):
        for line in path.read_text().splitlines():
            found |= json.loads(line)
    return {name: float(value) for name, value in found.items()}


def say(result: Run) -> None:
    """Print one line of progress."""
    if result.failure:
        figures = result.failure
    elif result.steps_s:
        figures = f"{1000 * result.step_s:.1f} ms per step, first step after {result.first_step_s:.2f} s"
    else:
        figures = f"{result.first_step_s:.2f} s"
    print(f"{result.group}: {result.contestant}, round {result.round + 1}: {figures}", file=sys.stderr, flush=True)
