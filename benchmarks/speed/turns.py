"""Comparison of all tools to one or two percent: each tool has its own processes, and the tools take turns by step.

    python -m benchmarks.speed.turns [--peers PYTHON] [--rounds N] [--only TEXT ...] [--write FILE.md]

The speed of a machine varies between whole runs that follow each other. Here all tools are started, and each waits in
the clock's hook after every optimizer step. One tool after the other is released for one step. So compared steps are a
second or two apart, and all work of a tool between two updates is in its own turn.
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

from benchmarks.publishing import markdown_table, publish
from benchmarks.speed import training
from benchmarks.speed.contestants import CONTESTANTS, Environments, command
from benchmarks.speed.machine import machine_line
from benchmarks.speed.runs import TIME_LIMIT_S, Entry, process_environment, rotated
from benchmarks.speed.summary import quartiles

ROUNDS = 20
_WARM_UP = 3
"""Number of first rounds that are not counted: tools observe and adjust in their first steps."""

Times = dict[str, list[float]]
"""Seconds of each counted step, by contestant."""


class Waiting:
    """A contestant whose ranks wait for their turn."""

    def __init__(self, entry: Entry, environments: Environments, folder: Path, stack: ExitStack):
        """Start the contestant, and wait until its first step is done. `stack` ends its processes."""
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
        """Let the contestant run one step. Return the seconds until its last rank has finished."""
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
                    raise RuntimeError(f"{self.name} did not finish a step: {self._output.read_text()[-2000:]}")
            self._ranks.add(int(done.readline()))

    def _end(self) -> None:
        # Waiting ranks would wait forever: torchrun starts each of its workers in a session of its own.
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _both_ends(fifo: Path) -> FileIO:
    """Open both ends of a FIFO. So opening does not block, and no reader or writer finds the other end closed."""
    return FileIO(os.open(fifo, os.O_RDWR), "r+")


def measure(entries: Sequence[Entry], rounds: int, environments: Environments) -> Times:
    """Run the entries in turns. Return the seconds of the counted steps."""
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
    """Return a Markdown table with one row per contestant. Ratios are to the first one's step in the same round."""
    rows: list[Sequence[str]] = [("tool", "rounds", "step, ms", "tokens/s", "over baseline")]
    baseline = times[entries[0].contestant.name]
    for entry in entries:
        own = times[entry.contestant.name]
        ratios = quartiles(seconds / first for seconds, first in zip(own, baseline, strict=True))
        label, typical = CONTESTANTS[entry.contestant.name].label, median(own)
        figures = (f"{1000 * typical:.1f}", f"{entry.job.tokens / typical:,.0f}")
        rows.append((label, str(len(own)), *figures, ratios.cell(".3f")))
    return markdown_table(rows)


def main() -> None:
    """Run all groups, and publish their tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--peers", metavar="PYTHON", help="Python of the environment with the other tools")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="GROUP", help="run groups with these words in their names only"
    )
    parser.add_argument("--write", type=Path, help="Markdown file; the tables replace the text between its markers")
    options = parser.parse_args()
    environments = Environments(peers=options.peers)
    parts = [machine_line(environments)]
    # More steps than turns, so that no tool ends early.
    for entries in training.groups(2 * (options.rounds + _WARM_UP), list(environments.versions())):
        group = entries[0].group
        if not options.only or any(word in group for word in options.only):
            measured = measure(entries, options.rounds, environments)
            parts.append(f"{training.heading(group)}:\n\n{table(entries, measured)}")
    publish("\n\n".join(parts), "speed-turns", options.write)


if __name__ == "__main__":
    main()
