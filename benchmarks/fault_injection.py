"""Faults at every place of a run and of its saves, and whether the run goes on as if nothing had happened.

    python benchmarks/fault_injection.py --runs 480 --strikes 260 --write docs/verification/reliability.md

A tiny job (2 ranks on gloo, 6 steps, dropout, shuffled data, a checkpoint every step or every other one, of which the
last 2 are kept) is trained once without disturbance, then again and again with up to three deaths a run. A process dies
by SIGKILL: at a random instant, in a forward pass, half-way through a write of a checkpoint's data, or before the n-th
time that it creates, renames, links or deletes something in the run's folder. It is either rank, or the process that
writes for it. After every death, before the ranks are started again:

- every folder with the final name of a checkpoint passes its checksums, and has the data of the undisturbed run;
- `latest` points to one of them; none is gone that the log calls saved and that is the newest;
- the ranks that start next go on from the newest of them.

Other runs are struck otherwise (benchmarks/tampering.py): `launch` is killed while it starts, the run's folder vanishes
while it runs, or its files, or the data, are changed between two starts. The next start must go on from the newest
checkpoint that is whole, or end with one error and status 2, and go on once the files are as they were. No start may
print a traceback, hang, or leave temporary files after a clean end.

A fault after which that is not so counts as lost. A run whose losses, gradient norms or last checkpoint differ in any
bit from those of the undisturbed run counts as mismatched. A process that is left 5 seconds after its `launch` was
killed is an orphan. The exit status is 1 unless all three are 0.
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
from faults import INSTANT, KILLED, PLACES, Fault, Start, load_what_ranks_need
from publishing import publish
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
"""The modes of the runs; a process that writes takes seconds to start."""

SECONDS_TO_END = 240
"""Ranks that have not ended after so long hang."""

SECONDS_ALONE, SECONDS_AFTER_SIGTERM = 3, 5
"""After a death, the other rank may end by itself for so long; then it gets SIGTERM and SIGKILL, as from torchrun."""

LAUNCH_KILLED, FOLDER_GONE = "launch killed in its first 4 seconds", "the run's folder deleted or moved while it runs"
STRIKES = (LAUNCH_KILLED, FOLDER_GONE, *(tampering.name for tampering in TAMPERINGS))
"""Names of the strikes on runs, which are used in turn."""

JOB = f"""
[job]
name = "run"
device = "cpu"

[model]
name = "faults:Dropping"

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
"""The data: 20 samples of 16 tokens."""


@dataclass(frozen=True)
class Bench:
    """Where one run is made, and how it saves."""

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
        """The run's checkpoints."""
        return self.run / "checkpoints"

    def start(self, life: int, fault: Fault | None) -> Start:
        """What the ranks of a life are started with."""
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
    """From the start of the ranks to the end of the last of them."""

    statuses: tuple[int | None, ...]
    """Exit statuses; negative for signals."""

    seconds: float
    seen: dict[tuple[int, bool], Counter[str]]
    """How often each rank (False), and the process that writes for it (True), came by each place."""

    problem: str | None
    """A rank that hung, a process that outlived its rank, or temporary files after a clean end."""

    @property
    def was_killed(self) -> bool:
        """Whether the fault struck."""
        return any(seen[KILLED] for seen in self.seen.values())


def live(start: Start) -> Life:
    """Start the ranks and wait until all have ended. The rank that a death leaves behind ends by itself."""
    begin = time.monotonic()
    context = multiprocessing.get_context("fork")  # with torch loaded, as it is here
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
        problem = problem or f"temporary files were left: {sorted(path.name for path in start.temporary.iterdir())}"
    return Life(statuses, time.monotonic() - begin, seen, problem)


def ended(processes: Sequence[ForkProcess], seconds: float, is_any_enough: bool = False) -> bool:
    """Whether processes end in time: all, or any of them."""
    deadline = time.monotonic() + seconds
    left = {process.sentinel for process in processes}
    while left and not (is_any_enough and len(left) < len(processes)):
        ready = wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        left -= {sentinel for sentinel in ready if isinstance(sentinel, int)}
    return True


def is_gone(group: int | None, deadline: float) -> bool:
    """Whether no process of a group is left in time; those that are left are killed.

    One that is still loading PyTorch when its rank dies notices that before it does anything else.
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
    """What a process came by, and how often."""
    return Counter(path.read_text().split() if path.exists() else ())


def free_port() -> int:
    """A port of this host that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@dataclass(frozen=True)
class Reference:
    """The undisturbed run."""

    reports: list[tuple[float, ...]]
    checkpoints: Path
    """All of them."""


def undisturbed(bench: Bench) -> Life:
    """Run the job without a fault. Raises RuntimeError when even that fails."""
    start = bench.start(1, None)
    life = live(start)
    if life.problem or any(life.statuses):
        output = "".join(path.read_text() for path in sorted(start.notes.glob("output-*")))
        raise RuntimeError(f"{bench} failed undisturbed: {life.statuses}, {life.problem}\n{output}")
    return life


def read_reports(run: Path) -> list[tuple[float, ...]]:
    """Step, loss, gradient norm and samples of every report."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [
        tuple(line[tag] for tag in ("step", "train/loss", "train/grad_norm", "train/samples_seen")) for line in lines
    ]


def draw(numbers: random.Random, undisturbed: Life) -> Fault:
    """A fault that strikes, unless the run comes to its end before."""
    place = numbers.choice(list(PLACES))
    if place == INSTANT:
        return Fault(place, numbers.randrange(RANKS), seconds=numbers.uniform(0.0, undisturbed.seconds))
    rank, in_writer = numbers.choice([process for process, seen in undisturbed.seen.items() if seen[place]])
    number = numbers.randint(1, undisturbed.seen[rank, in_writer][place])
    return Fault(place, rank, number, in_writer=in_writer, spares_rank=in_writer and numbers.random() < 0.5)


@dataclass(frozen=True)
class Death:
    """A fault that struck, and what was found after it."""

    mode: str
    fault: Fault
    lost: str | None
    """The expectation that was not met, or None."""


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    deaths: tuple[Death, ...]
    mismatch: str | None
    """What is wrong with its results."""


def disturbed(seed: str, bench: Bench, pattern: Life, reference: Reference) -> Outcome:
    """One run to its end."""
    numbers = random.Random(seed)
    deaths: list[Death] = []
    planned = numbers.randint(1, MOST_DEATHS)
    for life in range(1, planned + 3):  # the last is left alone; one more where only the writer of the last save died
        fault = draw(numbers, pattern) if life <= planned else None
        before, logs_before = newest(bench.checkpoints), len(main_logs(bench.run))
        lived = live(bench.start(life, fault))
        lost = (
            lived.problem or damage(bench, reference) or resumed_otherwise(main_logs(bench.run)[logs_before:], before)
        )
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
    """What is wrong with the checkpoints on disk."""
    for step in checkpoint_steps(bench.checkpoints):
        checkpoint = bench.checkpoints / checkpoint_name(step)
        try:
            check(checkpoint)
        except DamagedCheckpointError as error:
            return f"{checkpoint.name}: {error}"
        if data_of(checkpoint) != data_of(reference.checkpoints / checkpoint.name):
            return f"{checkpoint.name} has other data than the undisturbed run's"
    latest = bench.checkpoints / "latest"
    if latest.is_symlink() and not latest.exists():
        return f"latest points to {os.readlink(latest)}, which is not there"
    saved = [int(step) for log in main_logs(bench.run) for step in re.findall(r" saved \S*/step-(\d+) ", log)]
    if max(saved, default=0) > newest(bench.checkpoints):
        return f"step {max(saved)} was saved and is gone"
    aside = [path for path in bench.folder.glob("run.*") if checkpoint_steps(path / "checkpoints")]
    return f"{aside[0].name} has checkpoints that were not resumed from" if aside else None


def data_of(checkpoint: Path) -> dict[str, Any]:
    """Size and checksum of every file with data. (The index beside them also says where it was written.)"""
    return {name: file for name, file in read_manifest(checkpoint).files.items() if name.endswith(".distcp")}


def main_logs(run: Path) -> list[str]:
    """Return the log of rank 0 for every attempt, the oldest first."""
    logs = {int(path.parent.name.partition("-")[2]): path for path in run.glob("logs/attempt-*/rank_0.log")}
    return [logs[attempt].read_text() for attempt in sorted(logs)]


def newest(checkpoints: Path) -> int:
    """The step of the newest checkpoint; 0 where there is none."""
    return max(checkpoint_steps(checkpoints), default=0)


def resumed_otherwise(logs_of_life: Sequence[str], newest_before: int) -> str | None:
    """Whether a life went on from another step than the newest that there was before it. (One that ended before it had
    a log has not gone on from any.)"""
    found = resumed_steps(logs_of_life)
    if not found or found[0] == newest_before:
        return None
    return f"the run was resumed from step {found[0]}, and there was step {newest_before}"


def resumed_steps(logs_of_life: Sequence[str]) -> list[int]:
    """The steps from which the ranks say that they have resumed."""
    found = re.findall(r" resumed from \S*/step-(\d+)$", "".join(logs_of_life), flags=re.MULTILINE)
    return [int(step) for step in found]


def mismatch(bench: Bench, reference: Reference) -> str | None:
    """What a run that came to its end has otherwise than the undisturbed one."""
    if newest(bench.checkpoints) != STEPS:
        return f"its last checkpoint is of step {newest(bench.checkpoints)}"
    wrong = [own for own, other in zip(read_reports(bench.run), reference.reports, strict=True) if own != other]
    return f"reports differ: {wrong}" if wrong else None


@dataclass(frozen=True)
class Strike:
    """Something else than a death that happened to a run, and what was found after it."""

    name: str
    lost: str | None
    """The expectation that was not met, or None."""

    orphans: int = 0
    """Processes that were left 5 seconds after their launch was killed."""


def struck(seed: str, name: str, bench: Bench, pattern: Life, reference: Reference) -> Strike:
    """One run to which something happens, to its end."""
    numbers = random.Random(seed)
    if name == LAUNCH_KILLED:
        (bench.folder / "life-1").mkdir(parents=True)
        bench.start(2, None)  # writes the job file
        paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
        arguments = ["--config", str(bench.folder / "job.toml"), *bench.overrides]
        left = kill_launch(arguments, numbers, seed.replace("/", "-"), {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
        return Strike(name, went_on(bench, 3, reference), len(left))
    if name == FOLDER_GONE:
        vanishing = threading.Thread(target=vanish, args=(bench.folder, numbers, pattern.seconds))
        vanishing.start()
        lived = live(bench.start(1, None))
        vanishing.join()
        return Strike(name, lived.problem or traceback_of(bench, 1) or went_on(bench, 2, reference))
    tampering = next(tampering for tampering in TAMPERINGS if tampering.name == name)
    per_step = pattern.seen[0, False]["step"] // STEPS
    death = Fault("step", numbers.randrange(RANKS), number=per_step * 4 + numbers.randint(1, per_step * 2))
    lived = live(bench.start(1, death))
    steps = sorted(checkpoint_steps(bench.checkpoints))
    tampering.change(bench.folder, numbers)
    logs_before = len(main_logs(bench.run))
    lived = live(bench.start(2, None))
    lost = lived.problem or traceback_of(bench, 2)
    if not lost and BAD_INPUT in lived.statuses and tampering.may_be_refused:
        undo(bench.folder)
        lost = went_on(bench, 3, reference)
    elif not lost:
        possible = steps[-2:] if tampering.loses_newest else steps[-1:]
        found = resumed_steps(main_logs(bench.run)[logs_before:])
        is_right = not any(lived.statuses) and found and found[0] in possible
        lost = (
            mismatch(bench, reference) if is_right else f"ended with {lived.statuses}, resumed from {found} of {steps}"
        )
    return Strike(name, lost)


def went_on(bench: Bench, life: int, reference: Reference) -> str | None:
    """Start the ranks once more, leave them alone, and return what is wrong, or None."""
    lived = live(bench.start(life, None))
    if any(lived.statuses) or lived.problem:
        return lived.problem or f"the next start ended with {lived.statuses}"
    return traceback_of(bench, life) or mismatch(bench, reference)


def traceback_of(bench: Bench, life: int) -> str | None:
    """Return a sentence if a rank printed a traceback in a life."""
    outputs = (path.read_text() for path in (bench.folder / f"life-{life}").glob("output-*"))
    return "a traceback was printed" if any("Traceback" in output for output in outputs) else None


def table(outcomes: Iterable[Outcome]) -> str:
    """One row for every place, and the sum of them."""
    deaths = [death for outcome in outcomes for death in outcome.deaths]
    columns = [
        "killed",
        *(f"`{mode}`" for mode in MODES),
        "rank 0",
        "rank 1",
        "only its writer",
        "kills",
        "resumed",
        "lost",
    ]
    rows = [columns, ["---"] + ["---:"] * (len(columns) - 1)]
    for place, name in [*PLACES.items(), (None, "all")]:
        of_place = [death for death in deaths if place in (None, death.fault.place)]
        rows.append([name, *map(str, counts(of_place))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def counts(deaths: Sequence[Death]) -> list[int]:
    """The numbers of a row."""
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
    """Run the campaign. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=30, help="how many runs are disturbed")
    parser.add_argument("--strikes", type=int, default=0, help="how many runs something else happens to")
    parser.add_argument("--jobs", type=int, default=2, help="how many of them at a time")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=IN_TURN, help="checkpoint.async_mode, in turn")
    parser.add_argument("--keep", type=Path, help="an empty folder for the runs, which are deleted otherwise")
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        outcomes, strikes = campaign(options.keep or Path(temporary), options)
    lost = sum(death.lost is not None for outcome in outcomes for death in outcome.deaths)
    lost += sum(strike.lost is not None for strike in strikes)
    mismatched = sum(outcome.mismatch is not None for outcome in outcomes)
    orphans = sum(strike.orphans for strike in strikes)
    deaths = sum(len(outcome.deaths) for outcome in outcomes)
    summary = (
        f"{deaths + len(strikes):,} faults in {len(outcomes) + len(strikes)} runs, {deaths} of them kills of ranks, on "
        f"{os.cpu_count()} cores (torch {torch.__version__}, Python {platform.python_version()}, seed {options.seed}): "
        f"**{lost} lost, {mismatched} mismatched, {orphans} orphans**."
    )
    text = "\n\n".join([summary, table(outcomes), *([table_of_strikes(strikes)] if strikes else [])])
    publish(text, "fault_injection", options.write)
    return 1 if lost or mismatched or orphans else 0


def campaign(folder: Path, options: argparse.Namespace) -> tuple[list[Outcome], list[Strike]]:
    """The undisturbed runs, then the others, with modes and intervals in turn."""
    load_what_ranks_need()
    gc.freeze()  # ranks are forked, and need not look at what is loaded here
    kept = Bench(folder / "reference", "disabled", interval=1, keep_latest=0)
    undisturbed(kept)
    reference = Reference(read_reports(kept.run), kept.checkpoints)
    modes = options.modes
    benches = [
        Bench(folder / f"run-{index}", modes[index % len(modes)], 1 + index // len(modes) % 2)
        for index in range(options.runs)
    ]
    ways = {(bench.mode, bench.interval) for bench in benches} | ({("disabled", 1)} if options.strikes else set())
    patterns = {(mode, i): undisturbed(Bench(folder / f"{mode}-{i}", mode, i)) for mode, i in sorted(ways)}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("fork")) as executor:
        disturbing = [
            executor.submit(disturbed, f"{options.seed}/{n}", bench, patterns[bench.mode, bench.interval], reference)
            for n, bench in enumerate(benches)
        ]
        striking = [
            executor.submit(
                struck,
                f"{options.seed}/strike/{n}",
                STRIKES[n % len(STRIKES)],
                Bench(folder / f"strike-{n}", "disabled", interval=1, keep_latest=3),
                patterns["disabled", 1],
                reference,
            )
            for n in range(options.strikes)
        ]
        for future, bench in zip(disturbing, benches, strict=True):
            for text in problems(future.result()):
                print(f"{bench}: {text}", flush=True)
        for n, strike in enumerate(striking):
            if strike.result().lost or strike.result().orphans:
                print(f"strike {n}: {strike.result()}", flush=True)
    return [future.result() for future in disturbing], [strike.result() for strike in striking]


def table_of_strikes(strikes: Sequence[Strike]) -> str:
    """One row for everything else that happened."""
    rows = [["what else happened", "faults", "as it should be", "lost", "orphans"], ["---"] + ["---:"] * 4]
    for name in STRIKES:
        found = [strike for strike in strikes if strike.name == name]
        lost = sum(strike.lost is not None for strike in found)
        orphans = sum(strike.orphans for strike in found)
        rows.append([name, *map(str, (len(found), len(found) - lost, lost, orphans))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def problems(outcome: Outcome) -> Iterator[str]:
    """What went wrong in a run."""
    yield from (str(death) for death in outcome.deaths if death.lost)
    if outcome.mismatch:
        yield f"{outcome.mismatch}, after {outcome.deaths}"


if __name__ == "__main__":
    exit_process(main())
