"""Fault injection: runs that are killed or tampered with must end with the numbers of an uninterrupted run.

    python benchmarks/fault_injection.py --runs 480 --disturbances 260 --write docs/verification/reliability.md

A tiny job has 2 ranks on gloo, 6 steps, dropout and shuffled data. It writes a checkpoint every step or every other
step, and keeps the last 2. The job is trained once without disturbance, then many times with up to three deaths a run.
A process dies by SIGKILL: at a random instant, in a forward pass, halfway through a write of a checkpoint's data, or
before the n-th time that it creates, renames, links or deletes something in the run's folder. The process is one of
the two ranks or a writer process. These conditions must hold after every death, before the ranks are started again:

- Every folder with the final name of a checkpoint passes its checksums, and has the data of the uninterrupted run.
- `latest` points to one of these checkpoints. The newest checkpoint that the log calls saved still exists.
- The ranks that start next resume from the newest checkpoint.

Other runs are disturbed in other ways (benchmarks/tampering.py). `launch` is killed while it starts, the run's folder
disappears while the run writes to it, or the run's files or the data are changed between two starts. The next start
must resume from the newest undamaged checkpoint, or end with one error and status 2. After such an error the files are
restored, and the run must resume. No start may print a traceback, hang, or leave temporary files after a clean end.

A fault counts as lost if one of these conditions does not hold after it. A run counts as mismatched if a loss, a
gradient norm or the last checkpoint differs in any bit from that of the uninterrupted run. A process that still exists
5 seconds after its `launch` was killed is an orphan. The exit status is 1 unless all three counts are 0.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import random
import re
import signal
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from faults import INSTANT, KILL_POINTS, KILLED, Fault, Start, import_rank_modules
from publishing import markdown_table, publish
from tampering import TAMPERINGS, kill_launch, undo, vanish

from titan_launch.checkpoint.manifest import (
    DamagedCheckpointError,
    check,
    checkpoint_name,
    checkpoint_steps,
    read_manifest,
)
from titan_launch.core.process import BAD_INPUT, exit_process

RANKS, STEPS, MOST_DEATHS = 2, 6, 3
MODES = ("disabled", "thread", "process")
IN_TURN = ("disabled", "thread", "disabled", "thread", "process")
"""Values of `checkpoint.async_mode`, used in turn. `process` is rarer: a writer process takes seconds to start."""

SECONDS_TO_END = 240
"""Time limit of one start of the ranks, in seconds. Ranks that still run then count as hanging."""

SECONDS_ALONE, SECONDS_AFTER_SIGTERM = 3, 5
"""Seconds that the other rank gets after a death: first to end by itself, then after SIGTERM. SIGKILL follows, as from
torchrun."""

LAUNCH_KILLED, FOLDER_GONE = "launch killed in its first 4 seconds", "the run's folder deleted or moved while it runs"
DISTURBANCES = (LAUNCH_KILLED, FOLDER_GONE, *(tampering.name for tampering in TAMPERINGS))
"""Names of the disturbances other than deaths, used in turn."""

JOB = f"""
[job]
name = "run"
device = "cpu"

[model]
name = "faults:DropoutModel"

[data]
kind = "text"
split = "all"

[training]
seq_len = 16
local_batch_size = 2
global_batch_size = 8
steps = {STEPS}

[precision]
param_dtype = "float32"

[optimizer]
lr = 0.01

[checkpoint]
enable = true

[metrics]
log_freq = 1
enable_tensorboard = false

[debug]
audit_precision = false
"""


TEXT = "".join(chr(ord("a") + index * index % 26) for index in range(16 * 20 + 1))
"""The training data: 20 samples of 16 tokens."""


@dataclass(frozen=True)
class Bench:
    """The folder of one run, and its settings of checkpoints."""

    folder: Path
    mode: str
    interval: int
    keep_latest: int = 2

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    @property
    def checkpoints(self) -> Path:
        """The folder of the run's checkpoints."""
        return self.run / "checkpoints"

    def start(self, life: int, fault: Fault | None) -> Start:
        """Write the files of a life, and return the start of its ranks."""
        notes = self.folder / f"life-{life}"
        notes.mkdir(parents=True)
        job, data = self.folder / "job.toml", self.folder / "data.txt"
        job.write_text(JOB)
        if not data.exists():
            data.write_text(TEXT)
        return Start(job, self.overrides, self.run, notes, free_port(), RANKS, fault)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides of the job file for this run."""
        return (
            f"--job.dump_folder={json.dumps(str(self.folder))}",
            f'--checkpoint.async_mode="{self.mode}"',
            f"--checkpoint.interval={self.interval}",
            f"--checkpoint.keep_latest={self.keep_latest}",
            f"--data.path={json.dumps(str(self.folder / 'data.txt'))}",
        )


@dataclass(frozen=True)
class Life:
    """One start of the ranks, up to the end of the last rank."""

    statuses: tuple[int | None, ...]
    """Exit status of each rank; minus the number of the signal that ended it."""

    seconds: float
    seen: dict[tuple[int, bool], Counter[str]]
    """Number of visits to each point, by rank and process: False is the rank itself, True its writer process."""

    problem: str | None
    """A hang, a process that outlived its rank, or temporary files after a clean end; None without a problem."""

    @property
    def was_killed(self) -> bool:
        """True if the fault killed a process."""
        return any(seen[KILLED] for seen in self.seen.values())


def live(start: Start) -> Life:
    """Start the ranks and wait until all have ended. After a death the other rank gets time to end by itself."""
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")  # the ranks inherit the imported torch
    ranks = [context.Process(target=start.run_rank, args=(rank,)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    problem = None
    if not ended(ranks, SECONDS_TO_END, is_any_enough=True):
        problem = "all ranks hung"
    elif not ended(ranks, SECONDS_ALONE):
        for process in ranks:
            process.terminate()
        ended(ranks, SECONDS_AFTER_SIGTERM)
    for process in ranks:
        process.kill()
        process.join()
    orphans = sum(not is_gone(process.pid, time.monotonic() + SECONDS_TO_END) for process in ranks)
    if orphans:
        problem = problem or f"{orphans} ranks left a process behind"
    seen = {
        (rank, of_writer): read_notes(start.notes_of(rank, of_writer))
        for rank in range(RANKS)
        for of_writer in (False, True)
    }
    statuses = tuple(process.exitcode for process in ranks)
    if not any(statuses) and any(start.temporary.iterdir()):
        problem = problem or f"temporary files remain: {sorted(path.name for path in start.temporary.iterdir())}"
    return Life(statuses, time.monotonic() - begin, seen, problem)


def ended(processes: Sequence[ForkProcess], seconds: float, is_any_enough: bool = False) -> bool:
    """Return True if all processes end in time, or any of them with `is_any_enough`."""
    deadline = time.monotonic() + seconds
    left = {process.sentinel for process in processes}
    while left and not (is_any_enough and len(left) < len(processes)):
        ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        left -= {sentinel for sentinel in ready if isinstance(sentinel, int)}
    return True


def is_gone(group: int | None, deadline: float) -> bool:
    """Return True if all processes of a process group end before `deadline`; kill the others.

    A writer process that still imports PyTorch when its rank dies ends right after the import.
    """
    assert group is not None
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.01)
        os.killpg(group, signal.SIGKILL)
        return False
    return True


def read_notes(path: Path) -> Counter[str]:
    """Return the number of visits to each point by one process."""
    return Counter(path.read_text().split() if path.exists() else ())


def free_port() -> int:
    """Return a free port of this host."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Reference:
    """The results of the uninterrupted run."""

    reports: list[tuple[float, ...]]
    checkpoints: Path
    """Folder with the checkpoints of all steps."""


def uninterrupted(bench: Bench) -> Life:
    """Run the job without a fault. Raise RuntimeError if it fails."""
    start = bench.start(1, None)
    life = live(start)
    if life.problem or any(life.statuses):
        output = "".join(path.read_text() for path in sorted(start.notes.glob("output-*")))
        raise RuntimeError(f"{bench} failed without a fault: {life.statuses}, {life.problem}\n{output}")
    return life


def read_reports(run: Path) -> list[tuple[float, ...]]:
    """Return the step, loss, gradient norm and number of samples of every report."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        tuple(line[tag] for tag in ("step", "train/loss", "train/grad_norm", "train/samples_seen")) for line in lines
    ]


def draw(numbers: random.Random, uninterrupted: Life) -> Fault:
    """Return a random fault. Every point of the uninterrupted run can be drawn."""
    point = numbers.choice(list(KILL_POINTS))
    if point == INSTANT:
        return Fault(point, numbers.randrange(RANKS), seconds=numbers.uniform(0.0, uninterrupted.seconds))
    rank, in_writer = numbers.choice([process for process, seen in uninterrupted.seen.items() if seen[point]])
    number = numbers.randint(1, uninterrupted.seen[rank, in_writer][point])
    return Fault(point, rank, number, in_writer=in_writer, spares_rank=in_writer and numbers.random() < 0.5)


@dataclass(frozen=True)
class Death:
    """A fault that killed a process, and the result of the checks after it."""

    mode: str
    fault: Fault
    lost: str | None
    """The violated condition; None if all conditions hold."""


@dataclass(frozen=True)
class Outcome:
    """The deaths of a run, and the result of its comparison with the uninterrupted run."""

    deaths: tuple[Death, ...]
    mismatch: str | None
    """The difference from the uninterrupted run; None if the results are equal."""


def disturbed(seed: str, bench: Bench, pattern: Life, reference: Reference) -> Outcome:
    """Run a job with up to `MOST_DEATHS` deaths to its end."""
    numbers = random.Random(seed)
    deaths: list[Death] = []
    planned = numbers.randint(1, MOST_DEATHS)
    # The last life has no fault. One more life is needed if only the writer process of the last save died.
    for life in range(1, planned + 3):
        fault = draw(numbers, pattern) if life <= planned else None
        before, logs_before = newest(bench.checkpoints), len(rank_0_logs(bench.run))
        lived = live(bench.start(life, fault))
        lost = lived.problem or damage(bench, reference) or resume_problem(rank_0_logs(bench.run)[logs_before:], before)
        if fault is not None and lived.was_killed:
            deaths.append(Death(bench.mode, fault, lost))
        elif lost:
            return Outcome(tuple(deaths), lost)
        if not any(lived.statuses):
            return Outcome(tuple(deaths), mismatch(bench, reference))
        if not lived.was_killed:
            break
    return Outcome(tuple(deaths), f"a life without a fault ended with {lived.statuses}")


def damage(bench: Bench, reference: Reference) -> str | None:
    """Return the problem with the checkpoints on disk, or None."""
    for step in checkpoint_steps(bench.checkpoints):
        checkpoint = bench.checkpoints / checkpoint_name(step)
        try:
            check(checkpoint)
        except DamagedCheckpointError as error:
            return f"{checkpoint.name}: {error}"
        if data_of(checkpoint) != data_of(reference.checkpoints / checkpoint.name):
            return f"the data of {checkpoint.name} differ from those of the uninterrupted run"
    latest = bench.checkpoints / "latest"
    if latest.is_symlink() and not latest.exists():
        return f"latest points to {os.readlink(latest)}, which does not exist"
    saved = [int(step) for log in rank_0_logs(bench.run) for step in re.findall(r" saved \S*/step-(\d+) ", log)]
    if max(saved, default=0) > newest(bench.checkpoints):
        return f"step {max(saved)} was saved and no longer exists"
    aside = [path for path in bench.folder.glob("run.*") if checkpoint_steps(path / "checkpoints")]
    return f"{aside[0].name} was moved aside with checkpoints, and the run did not resume from them" if aside else None


def data_of(checkpoint: Path) -> dict[str, Any]:
    """Return size and checksum of every file with tensor data. (The index depends on the layout, and is excluded.)"""
    return {name: file for name, file in read_manifest(checkpoint).files.items() if name.endswith(".distcp")}


def rank_0_logs(run: Path) -> list[str]:
    """Return rank 0's log of every attempt, the oldest first."""
    logs = {int(path.parent.name.partition("-")[2]): path for path in run.glob("logs/attempt-*/rank_0.log")}
    return [logs[attempt].read_text() for attempt in sorted(logs)]


def newest(checkpoints: Path) -> int:
    """Return the step of the newest checkpoint; 0 without checkpoints."""
    return max(checkpoint_steps(checkpoints), default=0)


def resume_problem(logs_of_life: Sequence[str], newest_before: int) -> str | None:
    """Return a problem if a life did not resume from the newest step before it. Return None if it did, or if it ended
    before it logged anything."""
    found = resumed_steps(logs_of_life)
    if not found or found[0] == newest_before:
        return None
    return f"the run resumed from step {found[0]}, and the newest checkpoint was step {newest_before}"


def resumed_steps(logs_of_life: Sequence[str]) -> list[int]:
    """Return the steps from which the run resumed, read from the logs."""
    found = re.findall(r" resumed from \S*/step-(\d+)$", "".join(logs_of_life), flags=re.MULTILINE)
    return [int(step) for step in found]


def mismatch(bench: Bench, reference: Reference) -> str | None:
    """Return the difference between a finished run and the uninterrupted run, or None."""
    if newest(bench.checkpoints) != STEPS:
        return f"its last checkpoint is of step {newest(bench.checkpoints)}"
    wrong = [own for own, other in zip(read_reports(bench.run), reference.reports, strict=True) if own != other]
    return f"reports differ: {wrong}" if wrong else None


@dataclass(frozen=True)
class Disturbance:
    """A disturbance other than a death, and the result of the checks after it."""

    name: str
    lost: str | None
    """The violated condition; None if all conditions hold."""

    orphans: int = 0
    """Number of processes that still existed 5 seconds after their `launch` was killed."""


def run_with_disturbance(seed: str, name: str, bench: Bench, pattern: Life, reference: Reference) -> Disturbance:
    """Run a job with one disturbance other than a death, to its end."""
    numbers = random.Random(seed)
    if name == LAUNCH_KILLED:
        (bench.folder / "life-1").mkdir(parents=True)
        bench.start(2, None)  # writes the job file
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
        arguments = ["--config", str(bench.folder / "job.toml"), *bench.overrides]
        left = kill_launch(arguments, numbers, seed.replace("/", "-"), {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
        return Disturbance(name, restarted(bench, 3, reference), len(left))
    if name == FOLDER_GONE:
        vanishing = threading.Thread(target=vanish, args=(bench.folder, numbers, pattern.seconds))
        vanishing.start()
        lived = live(bench.start(1, None))
        vanishing.join()
        return Disturbance(name, lived.problem or traceback_of(bench, 1) or restarted(bench, 2, reference))
    tampering = next(tampering for tampering in TAMPERINGS if tampering.name == name)
    per_step = pattern.seen[0, False]["step"] // STEPS
    death = Fault("step", numbers.randrange(RANKS), number=per_step * 4 + numbers.randint(1, per_step * 2))
    lived = live(bench.start(1, death))
    steps = sorted(checkpoint_steps(bench.checkpoints))
    tampering.change(bench.folder, numbers)
    logs_before = len(rank_0_logs(bench.run))
    lived = live(bench.start(2, None))
    lost = lived.problem or traceback_of(bench, 2)
    if not lost and BAD_INPUT in lived.statuses and tampering.may_be_refused:
        undo(bench.folder)
        lost = restarted(bench, 3, reference)
    elif not lost:
        possible = steps[-2:] if tampering.loses_newest else steps[-1:]
        found = resumed_steps(rank_0_logs(bench.run)[logs_before:])
        is_right = not any(lived.statuses) and found and found[0] in possible
        lost = (
            mismatch(bench, reference) if is_right else f"ended with {lived.statuses}, resumed from {found} of {steps}"
        )
    return Disturbance(name, lost)


def restarted(bench: Bench, life: int, reference: Reference) -> str | None:
    """Start the ranks without a fault. Return the problem with this start or its results, or None."""
    lived = live(bench.start(life, None))
    if any(lived.statuses) or lived.problem:
        return lived.problem or f"the next start ended with {lived.statuses}"
    return traceback_of(bench, life) or mismatch(bench, reference)


def traceback_of(bench: Bench, life: int) -> str | None:
    """Return a sentence if a rank printed a traceback in a life."""
    outputs = (path.read_text() for path in (bench.folder / f"life-{life}").glob("output-*"))
    return "a traceback was printed" if any("Traceback" in output for output in outputs) else None


def table(outcomes: Iterable[Outcome]) -> str:
    """Return a Markdown table with one row for each point, and a row with the sums."""
    deaths = [death for outcome in outcomes for death in outcome.deaths]
    columns = [
        "kill point",
        *(f"`{mode}`" for mode in MODES),
        "rank 0",
        "rank 1",
        "writer only",
        "kills",
        "resumed",
        "lost",
    ]
    rows = [columns]
    for point, name in [*KILL_POINTS.items(), (None, "all")]:
        of_point = [death for death in deaths if point in (None, death.fault.point)]
        rows.append([name, *map(str, counts(of_point))])
    return markdown_table(rows, texts=1)


def counts(deaths: Sequence[Death]) -> list[int]:
    """Return the numbers of a table row."""
    spared = [death for death in deaths if death.fault.spares_rank]
    killed = [death for death in deaths if not death.fault.spares_rank]
    lost = sum(death.lost is not None for death in deaths)
    return [
        *(sum(death.mode == mode for death in deaths) for mode in MODES),
        *(sum(death.fault.rank == rank for death in killed) for rank in range(RANKS)),
        len(spared),
        len(deaths),
        len(deaths) - lost,
        lost,
    ]


def main() -> int:
    """Run the campaign. Return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=30, help="number of runs with deaths (default: 30)")
    parser.add_argument(
        "--disturbances", type=int, default=0, help="number of runs with other disturbances (default: 0)"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of runs at the same time (default: 2)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults (default: 0)")
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=IN_TURN, help="values of checkpoint.async_mode, used in turn"
    )
    parser.add_argument("--keep", type=Path, help="empty folder for the runs (default: a temporary folder)")
    parser.add_argument("--write", type=Path, help="Markdown file; the tables replace the text between its markers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes, others = campaign(options.keep or Path(temporary), options)
    lost = sum(death.lost is not None for outcome in outcomes for death in outcome.deaths)
    lost += sum(other.lost is not None for other in others)
    mismatched = sum(outcome.mismatch is not None for outcome in outcomes)
    orphans = sum(other.orphans for other in others)
    deaths = sum(len(outcome.deaths) for outcome in outcomes)
    summary = (
        f"{deaths + len(others):,} faults in {len(outcomes) + len(others)} runs, {deaths} of them kills of ranks "
        f"or checkpoint writers, on {os.cpu_count()} cores (torch {torch.__version__}, Python "
        f"{platform.python_version()}, seed {options.seed}): **{lost} lost, {mismatched} mismatched, {orphans} "
        "orphans**."
    )
    text = "\n\n".join([summary, table(outcomes), *([table_of_disturbances(others)] if others else [])])
    publish(text, "fault_injection", options.write)
    return 1 if lost or mismatched or orphans else 0


def campaign(folder: Path, options: argparse.Namespace) -> tuple[list[Outcome], list[Disturbance]]:
    """Run the uninterrupted jobs, then the disturbed ones. Modes and intervals are used in turn."""
    import_rank_modules()
    gc.freeze()  # the garbage collectors of the forked ranks skip the objects of this process
    kept = Bench(folder / "reference", "disabled", interval=1, keep_latest=0)
    uninterrupted(kept)
    reference = Reference(read_reports(kept.run), kept.checkpoints)
    modes = options.modes
    benches = [
        Bench(folder / f"run-{index}", modes[index % len(modes)], 1 + index // len(modes) % 2)
        for index in range(options.runs)
    ]
    ways = {(bench.mode, bench.interval) for bench in benches} | ({("disabled", 1)} if options.disturbances else set())
    patterns = {(mode, i): uninterrupted(Bench(folder / f"{mode}-{i}", mode, i)) for mode, i in sorted(ways)}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as executor:
        kills_in_flight = [
            executor.submit(disturbed, f"{options.seed}/{n}", bench, patterns[bench.mode, bench.interval], reference)
            for n, bench in enumerate(benches)
        ]
        disturbances_in_flight = [
            executor.submit(
                run_with_disturbance,
                f"{options.seed}/strike/{n}",
                DISTURBANCES[n % len(DISTURBANCES)],
                Bench(folder / f"disturbance-{n}", "disabled", interval=1, keep_latest=3),
                patterns["disabled", 1],
                reference,
            )
            for n in range(options.disturbances)
        ]
        for future, bench in zip(kills_in_flight, benches, strict=True):
            for text in problems(future.result()):
                print(f"{bench}: {text}", flush=True)
        for n, other in enumerate(disturbances_in_flight):
            if other.result().lost or other.result().orphans:
                print(f"disturbance {n}: {other.result()}", flush=True)
    return [future.result() for future in kills_in_flight], [other.result() for other in disturbances_in_flight]


def table_of_disturbances(others: Sequence[Disturbance]) -> str:
    """Return a Markdown table with one row for each disturbance other than a death."""
    rows = [["other disturbance", "faults", "as expected", "lost", "orphans"]]
    for name in DISTURBANCES:
        found = [other for other in others if other.name == name]
        lost = sum(other.lost is not None for other in found)
        orphans = sum(other.orphans for other in found)
        rows.append([name, *map(str, (len(found), len(found) - lost, lost, orphans))])
    return markdown_table(rows, texts=1)


def problems(outcome: Outcome) -> Iterator[str]:
    """Yield the problems of a run."""
    yield from (str(death) for death in outcome.deaths if death.lost)
    if outcome.mismatch:
        yield f"{outcome.mismatch}, after {outcome.deaths}"


if __name__ == "__main__":
    exit_process(main())
