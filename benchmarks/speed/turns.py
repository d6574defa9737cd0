"""Steps of all tools in turns, each tool in its own processes: who is faster, to a percent or two.

    python -m benchmarks.speed.turns [--peers PYTHON] [--rounds N] [--only TEXT ...] [--write FILE.md]

Whole runs that follow each other meet a machine that is now faster, now slower. Here all tools are started, and wait in
the clock's hook after every optimizer step; one after the other is let go for a step. So what is compared is a second
or two apart, and what a tool does between two updates, it does in its own turn.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from statistics import median

from benchmarks.publishing import publish
from benchmarks.speed import training
from benchmarks.speed.contestants import CONTESTANTS, Environments, command
from benchmarks.speed.machine import machine_line
from benchmarks.speed.runs import TIME_LIMIT_S, Entry, process_environment, rotated
from benchmarks.speed.summary import markdown, quartiles

ROUNDS = 20
_WARM_UP = 3
"""Rounds that do not count: tools observe and adjust in their first steps."""

Times = dict[str, list[float]]
"""Seconds of the steps of each contestant, round by round."""


class Waiting:
    """A contestant whose ranks wait for their turn."""

    def __init__(self, entry: Entry, environments: Environments, folder: Path, stack: ExitStack):
        """Start it, and wait until it has made its first step. `stack` ends it."""
        self.name = entry.contestant.name
        self._output = folder / "output"
        names = [[folder / f"{what}-{rank}" for rank in range(entry.job.ranks)] for what in ("done", "go")]
        for name in (*names[0], *names[1]):
            os.mkfifo(name)
        words = command(entry.contestant, entry.job, environments, folder)
        variables = {"SPEED_STAMPS": str(folder / "stamps"), "SPEED_TURNS": str(folder)}
        with self._output.open("w") as output:
            self._process = subprocess.Popen(
                words,
                env=process_environment(variables),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stack.callback(self._end)
        self._ranks: set[int] = set()
        self._done, self._go = ([stack.enter_context(_both_ends(name)) for name in own] for own in names)
        self._wait()

    def step(self) -> float:
        """Let it make a step. Returns the seconds until its last rank is done."""
        started = time.perf_counter()
        for go in self._go:
            go.write(b"1")
        self._wait()
        return time.perf_counter() - started

    def _wait(self) -> None:
        for done in self._done:
            limit = time.monotonic() + TIME_LIMIT_S
            while not select.select([done], [], [], 1)[0]:
                if self._process.poll() is not None or time.monotonic() > limit:
                    raise RuntimeError(f"{self.name} makes no steps: {self._output.read_text()[-2000:]}")
            self._ranks.add(int(done.readline()))

    def _end(self) -> None:
        # Those that wait would do so for ever: torchrun gives its workers sessions of their own.
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _both_ends(fifo: Path) -> FileIO:
    """Opening waits for nobody, then, and nobody finds the other end closed."""
    return FileIO(os.open(fifo, os.O_RDWR), "r+")


def measure(entries: Sequence[Entry], rounds: int, environments: Environments) -> Times:
    """The steps that count."""
    with ExitStack() as stack:
        waiting = []
        for entry in entries:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            waiting.append(Waiting(entry, environments, folder, stack))
        times: Times = {contestant.name: [] for contestant in waiting}
        for turn in range(_WARM_UP + rounds):
            for contestant in rotated(waiting, turn):
                times[contestant.name].append(contestant.step())
    return {name: seconds[_WARM_UP:] for name, seconds in times.items()}


def table(entries: Sequence[Entry], times: Times) -> str:
    """One row per contestant; ratios are to the first one's step of the same round."""
    rows: list[Sequence[str]] = [("tool", "rounds", "step, ms", "tokens/s", "over the first")]
    baseline = times[entries[0].contestant.name]
    for entry in entries:
        own = times[entry.contestant.name]
        ratios = quartiles(seconds / first for seconds, first in zip(own, baseline, strict=True))
        label, typical = CONTESTANTS[entry.contestant.name].label, median(own)
        figures = (f"{1000 * typical:.1f}", f"{entry.job.tokens / typical:,.0f}")
        rows.append((label, str(len(own)), *figures, ratios.cell(".3f")))
    return markdown(rows)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", metavar="PYTHON", help="of the environment with the other tools")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", nargs="+", default=[], metavar="GROUP", help="groups with these words in their names")
    parser.add_argument("--write", type=Path, help="the Markdown file with the table's markers")
    options = parser.parse_args()
    environments = Environments(peers=options.peers)
    parts = [machine_line(environments)]
    # More than there are turns, so that no tool comes to its end.
    for entries in training.groups(2 * (options.rounds + _WARM_UP), list(environments.versions())):
        group = entries[0].group
        if not options.only or any(word in group for word in options.only):
            measured = measure(entries, options.rounds, environments)
            parts.append(f"{training.heading(group)}:\n\n{table(entries, measured)}")
    publish("\n\n".join(parts), "speed-turns", options.write)


if __name__ == "__main__":
    main()
