"""Fault injection with an object store: kills, lost connections and partial objects must lose no checkpoint.

    PYTHONPATH=. python benchmarks/store_faults.py --faults 100 --write docs/verification/reliability.md

The job is that of `fault_injection.py`: 2 ranks on gloo, 6 steps, a checkpoint after each. Here `checkpoint.store` is
a folder of a real server of S3 (moto) on the loopback interface, behind a proxy that can cut connections. A fault is

- a kill during an upload: SIGKILL of one rank or of both when a random number of bytes has been uploaded;
- a lost connection during an upload or a download: the proxy cuts up to six connections, each after a random number of
  bytes;
- a partial object: an object of the newest copy is truncated, changed in a bit, or deleted.

The run folder is then deleted, or kept in half of the kills. After each start, every copy with a manifest must pass its
checksums and have the data of the uninterrupted run, bit for bit. The next start must resume from the newest undamaged
checkpoint of run folder and store, and end with the newest checkpoint in the store. It may print no traceback, and a
start with a lost connection may end with one error. A fault counts as lost if one of these conditions does not hold. A
run counts as mismatched if a loss, a gradient norm or the last checkpoint differs in a bit from those of the
uninterrupted run. The exit status is 1 unless both counts are 0.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import platform
import random
import shutil
import signal
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fault_injection import (
    STEPS,
    Bench,
    Life,
    Reference,
    data_of,
    live,
    newest,
    rank_0_logs,
    read_reports,
    resumed_steps,
    traceback_of,
    uninterrupted,
)
from faults import import_rank_modules
from object_server import Server
from publishing import markdown_table, publish

from titan_launch.checkpoint.manifest import DamagedCheckpointError, check, checkpoint_name
from titan_launch.core.process import exit_process

KILL, UPLOAD, DOWNLOAD, PARTIAL = (
    "a kill during an upload",
    "connections lost during uploads",
    "connections lost during a download",
    "a partial, changed or missing object",
)
KINDS = (KILL, UPLOAD, DOWNLOAD, PARTIAL)
"""Names of the faults, used in turn."""

MOST_CUTS = 6


@cache
def server() -> Server:
    """Return the server of this process, which is started at the first call."""
    return Server()


@dataclass(frozen=True)
class StoreBench(Bench):
    """The folder of one run whose checkpoints are also in a store."""

    lives: list[int] = field(default_factory=list)

    @property
    def prefix(self) -> str:
        """Beginning of the names of the run's objects."""
        return f"{self.folder.name}/run/"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the job file for this run."""
        return (*super().overrides, f'--checkpoint.store="s3://{Server.bucket}/{self.folder.name}"')

    def live(self) -> Life:
        """Start the ranks without a fault of their own, and wait until they have ended."""
        self.lives.append(len(self.lives) + 1)
        return live(self.start(self.lives[-1], None))

    def stored(self) -> list[int]:
        """Return the steps that have a copy with a manifest, in increasing order."""
        names = (name.partition("/") for name in server().names(self.prefix))
        return sorted(int(folder.removeprefix("step-")) for folder, _, file in names if file == "manifest.json")


@dataclass(frozen=True)
class Outcome:
    """A fault, and the results of the checks after it."""

    kind: str
    lost: str | None
    """The violated condition; None if all conditions hold."""

    mismatch: str | None
    """The difference from the uninterrupted run; None without a difference."""

    cuts: int
    """Number of connections that the proxy has cut. A kill cuts one."""


def disturbed(seed: str, kind: str, bench: StoreBench, uploaded: int, reference: Reference) -> Outcome:
    """Run a job with one fault to its end. `uploaded`: bytes that a run without a fault uploads."""
    numbers = random.Random(seed)
    proxy = server().proxy
    cuts_before = proxy.cuts
    if kind == KILL:
        killed: list[int] = []
        while not killed:  # with fewer bytes than drawn, the run ends before the kill
            clear(bench)
            proxy.at_upload(numbers.randrange(uploaded), lambda: killed.append(kill(numbers)))
            lived = bench.live()
            proxy.calm()
        if numbers.random() < 0.5:
            shutil.rmtree(bench.run)
        lost = lived.problem or damage(bench, reference)
        newest_before = max([newest(bench.checkpoints), *bench.stored()])
    elif kind == UPLOAD:
        while proxy.cuts == cuts_before:
            clear(bench)
            cuts = numbers.randint(1, MOST_CUTS)
            proxy.cut(up=numbers.random() < 0.7, after=numbers.randrange(1, uploaded // cuts), times=cuts)
            bench.live()
            proxy.calm()
        lost = traceback_of(bench, bench.lives[-1]) or damage(bench, reference)
        if numbers.random() < 0.5 and bench.stored():
            shutil.rmtree(bench.run)
        newest_before = max([newest(bench.checkpoints), *bench.stored()])
    else:
        bench.live()
        copies = bench.stored()
        shutil.rmtree(bench.run)
        lost = None if STEPS in copies else f"a run without a fault left the copies {copies}"
        if kind == PARTIAL:
            spoil(bench, numbers)
            newest_before = max(copies[:-1], default=0)
        else:
            newest_before = STEPS
            while proxy.cuts == cuts_before:
                shutil.rmtree(bench.run, ignore_errors=True)
                cuts = numbers.randint(1, MOST_CUTS)
                proxy.cut(up=False, after=numbers.randrange(1, uploaded // STEPS // cuts), times=cuts)
                lived = bench.live()
                proxy.calm()
            lost = lost or traceback_of(bench, bench.lives[-1]) or resume_problem(bench, lived, newest_before)
    if not lost:
        lived = bench.live()
        lost = lived.problem or traceback_of(bench, bench.lives[-1])
        lost = lost or (f"the next start ended with {lived.statuses}" if any(lived.statuses) else None)
        lost = lost or resume_problem(bench, lived, newest_before) or damage(bench, reference)
        lost = lost or (None if STEPS in bench.stored() else f"the copies at the end are {bench.stored()}")
    return Outcome(kind, lost, None if lost else mismatch(bench, reference), proxy.cuts - cuts_before)


def clear(bench: StoreBench) -> None:
    """Delete the run folder and the objects of an earlier try."""
    shutil.rmtree(bench.run, ignore_errors=True)
    for name in server().names(bench.prefix):
        server().delete(bench.prefix + name)


def kill(numbers: random.Random) -> int:
    """Kill one rank or all ranks of this process, and return their number."""
    ranks = [child.pid for child in list(multiprocessing.process._children)]  # type: ignore[attr-defined]
    chosen = ranks if numbers.random() < 0.5 else ranks[:1]
    for pid in chosen:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(chosen)


def spoil(bench: StoreBench, numbers: random.Random) -> None:
    """Truncate, change or delete an object of the newest copy."""
    step = f"{bench.prefix}{checkpoint_name(bench.stored()[-1])}/"
    name = step + numbers.choice(server().names(step))
    content = bytearray(server().get(name))
    way = numbers.randrange(3)
    if way == 0:
        server().put(name, bytes(content[: numbers.randrange(len(content))]))
    elif way == 1:
        content[numbers.randrange(len(content))] ^= 1 << numbers.randrange(8)
        server().put(name, bytes(content))
    else:
        server().delete(name)


def damage(bench: StoreBench, reference: Reference) -> str | None:
    """Return the problem of the copies that have a manifest, or None."""
    for step in bench.stored():
        name = checkpoint_name(step)
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary, name)
            folder.mkdir()
            for file in server().names(f"{bench.prefix}{name}/"):
                (folder / file).write_bytes(server().get(f"{bench.prefix}{name}/{file}"))
            try:
                check(folder)
            except DamagedCheckpointError as error:
                return f"the copy of {name}: {error}"
            if data_of(folder) != data_of(reference.checkpoints / name):
                return f"the data of the copy of {name} differ from those of the uninterrupted run"
    return None


def resume_problem(bench: StoreBench, lived: Life, newest_before: int) -> str | None:
    """Return a problem if a start that has read a checkpoint did not resume from the newest one."""
    logs = rank_0_logs(bench.run)
    found = resumed_steps(logs[-1:])
    if not found and (newest_before == 0 or any(lived.statuses)):
        return None
    return None if found[:1] == [newest_before] else f"the run resumed from {found}, and {newest_before} was the newest"


def mismatch(bench: StoreBench, reference: Reference) -> str | None:
    """Return the difference between a finished run and the uninterrupted run, or None. If the run folder was deleted,
    it has only the reports since then."""
    with suppress(FileNotFoundError):  # a run that was complete makes no report
        by_step = {report[0]: report for report in reference.reports}
        wrong = [own for own in read_reports(bench.run) if own != by_step[own[0]]]
        if wrong:
            return f"reports differ: {wrong}"
    last = bench.checkpoints / checkpoint_name(STEPS)
    same = data_of(last) == data_of(reference.checkpoints / last.name)
    return None if same else "the last checkpoint differs"


def in_turn(folder: Path, seed: int, numbers: Sequence[int], reference: Reference) -> list[Outcome]:
    """Run some of the disturbed jobs, one after the other, with a server of this process."""
    try:
        return with_server(folder, seed, numbers, reference)
    finally:
        server().stop()


def with_server(folder: Path, seed: int, numbers: Sequence[int], reference: Reference) -> list[Outcome]:
    """Run the jobs of `in_turn`."""
    os.environ.update(server().environment)
    pattern = StoreBench(folder / f"pattern-{numbers[0]}", "disabled", interval=1)
    before = server().proxy.bytes_up
    pattern.live()
    uploaded = server().proxy.bytes_up - before
    outcomes = []
    for number in numbers:
        bench = StoreBench(folder / f"run-{number}", ("disabled", "thread")[number // len(KINDS) % 2], interval=1)
        outcome = disturbed(f"{seed}/{number}", KINDS[number % len(KINDS)], bench, uploaded, reference)
        if outcome.lost or outcome.mismatch:
            print(f"{bench.folder.name}: {outcome}", flush=True)
        else:
            shutil.rmtree(bench.folder)
        outcomes.append(outcome)
    return outcomes


def campaign(folder: Path, options: argparse.Namespace) -> list[Outcome]:
    """Run the uninterrupted job, then the disturbed ones."""
    import_rank_modules()
    import s3fs  # noqa: F401  the forked ranks inherit it

    gc.freeze()
    kept = Bench(folder / "reference", "disabled", interval=1, keep_latest=0)
    uninterrupted(kept)
    reference = Reference(read_reports(kept.run), kept.checkpoints)
    parts = [range(first, options.faults, options.jobs) for first in range(options.jobs)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as executor:
        futures = [executor.submit(in_turn, folder, options.seed, part, reference) for part in parts]
        return [outcome for future in futures for outcome in future.result()]


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table with one row for each kind of fault, and a row with the sums."""
    rows = [["fault", "faults", "resumed", "lost", "mismatched"]]
    for kind in (*KINDS, None):
        found = [outcome for outcome in outcomes if kind in (None, outcome.kind)]
        lost, wrong = (sum(text is not None for text in texts) for texts in zip(*map(problems, found), strict=True))
        rows.append([kind or "all", *map(str, (len(found), len(found) - lost, lost, wrong))])
    return markdown_table(rows, texts=1)


def problems(outcome: Outcome) -> tuple[Any, Any]:
    """Return the problems of a fault."""
    return outcome.lost, outcome.mismatch


def main() -> int:
    """Run the campaign. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=8, help="number of faults, at least 8 (default: 8)")
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument("--keep", type=Path, help="empty folder for the runs (default: a temporary folder)")
    parser.add_argument("--write", type=Path, help="Markdown file; the table replaces the text between its markers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes = campaign(options.keep or Path(temporary), options)
    lost = sum(outcome.lost is not None for outcome in outcomes)
    mismatched = sum(outcome.mismatch is not None for outcome in outcomes)
    cuts = sum(outcome.cuts for outcome in outcomes if outcome.kind in (UPLOAD, DOWNLOAD))
    summary = (
        f"{len(outcomes)} faults in {len(outcomes)} runs, with {cuts} lost connections, on {os.cpu_count()} cores "
        f"(torch {torch.__version__}, Python {platform.python_version()}, seed {options.seed}): "
        f"**{lost} lost, {mismatched} mismatched**."
    )
    publish(f"{summary}\n\n{table(outcomes)}", "store_faults", options.write)
    return 1 if lost or mismatched else 0


if __name__ == "__main__":
    exit_process(main())
