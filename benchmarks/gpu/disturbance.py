"""A run on several ranks, of which the last rank is killed or stopped.

    python -m benchmarks.gpu.disturbance kill --ranks 8 --config JOB.toml [--section.key=value ...]

`kill` sends SIGKILL when the first checkpoint is complete, and `stop` sends SIGSTOP after the second report. The run
must end with an error that names the rank; otherwise the exit status is 1. The last line quotes the error, and the name
of an unfinished collective if the output has one.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titan_launch.checkpoint.manifest import complete_steps
from titan_launch.commands.parser import Parser, at_least
from titan_launch.config.loading.load import load_job
from titan_launch.core.process import exit_process


@dataclass(frozen=True)
class Disturbance:
    """A signal to one rank."""

    signal: signal.Signals
    is_due: Callable[[Path], bool]
    """Function of the run folder that returns True when the signal is due."""

    naming: str
    """Regular expression of the error, in which `{rank}` stands for the number of the rank."""


def _has_checkpoint(run_folder: Path) -> bool:
    return bool(complete_steps(run_folder / "checkpoints"))


def _has_reports(run_folder: Path) -> bool:
    path = run_folder / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b"\n") >= 2


DISTURBANCES = {
    "kill": Disturbance(signal.SIGKILL, _has_checkpoint, r"rank {rank} was killed by SIGKILL"),
    # NCCL's watchdog aborts the other ranks, and `launch` quotes their flight records; gloo raises an error.
    "stop": Disturbance(signal.SIGSTOP, _has_reports, r"not finished: .*not by rank.*\b{rank}\b|rank {rank} is behind"),
}


_COLLECTIVE = re.compile(r"not finished: (\S+ number \d+ of group \S+):")


def main() -> int:
    """Train, disturb, and judge the output. Return the exit status."""
    parser = Parser(prog="python -m benchmarks.gpu.disturbance")
    parser.add_job("python -m benchmarks.gpu.disturbance kill --ranks 2 --config configs/llama_debug.toml")
    parser.add_argument("kind", choices=DISTURBANCES, help="signal to the last rank")
    parser.add_argument("--ranks", type=at_least(2), default=8, metavar="N", help="number of ranks (default: 8)")
    text = "seconds after which all ranks are killed (default: 300)"
    parser.add_argument("--limit", type=at_least(1), default=300, metavar="S", help=text)
    arguments = parser.parse(sys.argv[1:])
    disturbance, rank = DISTURBANCES[arguments.kind], arguments.ranks - 1
    run_folder = load_job(arguments.config, arguments.overrides).config.job.run_folder
    mark = f"DISTURBED_{uuid.uuid4().hex}=1"
    command = [sys.executable, "-m", "titan_launch", "launch", f"--nproc-per-node={arguments.ranks}"]
    command += ["--shutdown-timeout=10", "--config", arguments.config, *arguments.overrides]
    environment = {**os.environ, mark.partition("=")[0]: "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as launch:
        limit = threading.Timer(arguments.limit, kill_all, [mark])  # a stopped process outlives `launch`
        limit.start()
        sender = Sender(launch, disturbance, run_folder, mark, rank)
        sender.start()
        lines: list[str] = []
        assert launch.stdout is not None
        for line in launch.stdout:
            print(line, end="", flush=True)
            lines.append(line.strip())
    limit.cancel()
    sender.join()
    kill_all(mark)
    return _judge(launch.returncode, lines, sender.has_sent, disturbance, rank)


class Sender(threading.Thread):
    """A thread that sends the signal when it is due."""

    def __init__(self, launch: subprocess.Popen[str], disturbance: Disturbance, run_folder: Path, mark: str, rank: int):
        super().__init__()
        self._launch = launch
        self._disturbance = disturbance
        self._run_folder = run_folder
        self._variables = (mark, f"RANK={rank}")
        self.has_sent = False

    def run(self) -> None:
        """Wait until the signal is due, or the run has ended."""
        while self._launch.poll() is None and not self.has_sent:
            if self._disturbance.is_due(self._run_folder):
                for process in processes_with(*self._variables)[:1]:  # child processes of the rank come later
                    with suppress(ProcessLookupError):
                        os.kill(process, self._disturbance.signal)
                        self.has_sent = True
            time.sleep(0.02)


def processes_with(*variables: str) -> list[int]:
    """Return the processes that have these environment variables (`NAME=value`), the oldest first."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process belongs to another user, or has just ended
            if {*variables} <= {*(process / "environ").read_bytes().decode(errors="replace").split("\0")}:
                found.append(int(process.name))
    return sorted(found)


def kill_all(mark: str) -> None:
    """Kill all processes of the disturbed run."""
    for process in processes_with(mark):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def _judge(status: int, lines: list[str], is_disturbed: bool, disturbance: Disturbance, rank: int) -> int:
    """Print the line of the output that names the rank, or what is wrong. Return the exit status."""
    pattern = re.compile(disturbance.naming.format(rank=rank))
    named = [line for line in lines if pattern.search(line)]
    if not is_disturbed:
        problem = f"the run ended with status {status} before it was disturbed"
    elif status == 0:
        problem = "the run ended with status 0, although it was disturbed"
    elif not named:
        problem = f"the run ended with status {status}, but no line of its output names rank {rank}"
    else:
        found = _COLLECTIVE.search("\n".join(lines))
        collective = "no collective is named" if found is None else f"unfinished collective: {found[1]}"
        name = disturbance.signal.name
        print(f"{name} to rank {rank}; status {status}; {collective}; {named[-1]}", flush=True)
        return 0
    print(f"error: {problem}", flush=True)
    return 1


if __name__ == "__main__":
    exit_process(main())
