"""torchrun inside this process, with other handling of errors and signals.

After a failure, the torchrun command prints a 40-line banner and ends with exit status 1. This module prints only the
error of the worker that failed first, and returns the exit status of that worker.

After a signal, the torchrun command ends within 30 seconds with a traceback and status 1. After SIGUSR1, the command
ends at once and leaves its workers running. This module forwards the signal to the workers, waits until they have saved
a checkpoint, and returns their exit status.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from titan_launch.core.errors import UserError
from titan_launch.core.patches import environment, replaced, without_garbage_collection
from titan_launch.core.process import (
    BAD_INPUT,
    EXITED_DIRECTLY,
    FAILED,
    PRINTS_HIDDEN,
    remove_folders,
    usable_cores,
)
from titan_launch.core.signals import AGENT_PID, RESTART_STATUS, signal_name, signals_handled
from titan_launch.core.terminal import as_message, counted, say, shortened
from titan_launch.launch.options import Processes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_AFTER_SECOND_SIGNAL_S = 5


def launch(processes: Processes, worker_args: Sequence[str], run_folder: Path) -> int:
    """Run the training processes (workers), wait for them, and return an exit status. Raise UserError for invalid
    options.

    After success, the status is 0. If a worker has failed, the status is the exit status of the worker that failed
    first. If workers were killed because they did not end in time, the status is 128 + SIGKILL. If the port of the
    rendezvous is in use, the status is 2. If torchrun itself fails in another way, the status is 1, or 128 + the number
    of a signal.

    `run_folder`: folder to which the workers write their flight records.
    """
    os.environ[AGENT_PID] = str(os.getpid())
    os.environ[PRINTS_HIDDEN] = "1"
    stopping = Stopping(processes.shutdown_timeout_s, tempfile.mkdtemp(prefix="titan-launch-"))
    try:
        with signals_handled(stopping.on_request):
            return _run_torchrun(processes, worker_args, run_folder, stopping)
    finally:
        remove_folders(stopping.rank_folders)


def _run_torchrun(processes: Processes, worker_args: Sequence[str], run_folder: Path, stopping: Stopping) -> int:
    # Without this variable, torchrun would give each of several processes only one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // processes.per_node)))
    if "--standalone" not in processes.torchrun_args:
        # By default, agents would reuse the address of their shared store after the host of this store is gone. With
        # the variable, rank 0 of each start hosts a new store.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with without_garbage_collection():
        # If another host is gone, PyTorch's native code would log twenty lines of addresses. This module itself reports
        # the lost host. The workers do not inherit this log level.
        with environment(TORCH_CPP_LOG_LEVEL=os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")):
            importlib.import_module("torch")
        from torch.distributed import DistError, launcher
        from torch.distributed import run as torchrun
        from torch.distributed.elastic.multiprocessing import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError

        from titan_launch.launch.agent import ElasticAgent

    logging.disable(logging.CRITICAL)  # torchrun's report of a failure would hide the worker's error
    handled = [signal.SIGQUIT, signal.SIGHUP]
    # If this process ignores a signal, as after `nohup`, torchrun must not handle it.
    names = [number.name for number in handled if signal.getsignal(number) is not signal.SIG_IGN]
    signals = f"--signals-to-handle={','.join(names)}"
    log_dir = f"--log-dir={stopping.rank_folders}"  # torchrun would not delete its own temporary folder
    args = torchrun.parse_args([signals, log_dir, *processes.torchrun_args, "-m", "titan_launch", *worker_args])
    report_failure = partial(_report_failure, run_folder=run_folder, stopping=stopping)
    agent = partial(ElasticAgent, stopping=stopping, on_failure=report_failure)
    try:
        with replaced(launcher.api, "LocalElasticAgent", agent):
            torchrun.run(args)
    except ChildFailedError as error:
        return 128 + signal.SIGKILL if stopping.has_killed else report_failure(error.failures)
    except SignalException as error:
        return 128 + error.sigval
    except (RendezvousError, DistError) as error:
        if "EADDRINUSE" not in str(error):
            say(as_message(f"error: {_rendezvous_failure(error)}"), file=sys.stderr)
            return FAILED
        remedy = "choose another port with --master-port or --rdzv-endpoint"
        reason = "the port of the rendezvous is in use on this host, perhaps by another run"
        say(f"error: {reason}; {remedy}", file=sys.stderr)
        return BAD_INPUT
    except (AssertionError, ImportError, OSError, ValueError) as error:
        if stopping.last_start:  # otherwise no rank was started, and the options are wrong
            raise
        raise UserError(f"error: torchrun cannot start with these options: {_first_line(error)}") from None
    return 0


class Stopping:
    """The object that forwards signals to the workers of this host, and kills workers that do not end in time."""

    def __init__(self, timeout_s: int, rank_folders: str):
        self.rank_folders = rank_folders
        """Temporary folder in which torchrun creates a folder for each rank."""

        self.has_killed = False
        """True if workers were killed because they did not end in time."""

        self.last_start = 0.0
        """Time of the last start of workers, in seconds since the epoch; 0 before the first start."""

        self.timeout_s = timeout_s
        """Seconds after a signal until workers that still run are killed."""

        self.signal: int | None = None
        """Number of the last signal that arrived. None: no signal has arrived."""

        self._workers: Sequence[subprocess.Popen[bytes]] = ()
        self._is_starting = False
        self._lock = threading.Lock()  # a signal may arrive while workers are started

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Keep signals from ending this process during the `with` block, which starts workers and calls `started`."""
        with self._lock:
            self._is_starting = True
        try:
            yield
        finally:
            with self._lock:
                self._is_starting = False

    def started(self, workers: Sequence[subprocess.Popen[bytes]]) -> None:
        """Register the processes of a new start of the workers. If a signal has arrived already, forward it to these
        workers."""
        with self._lock:
            self.last_start = time.time()
            self._workers = workers
            if self.signal is not None:
                self._pass_on(self.signal)

    def on_request(self, number: int, is_repeated: bool) -> None:
        """Forward the signal `number` to the workers. If no worker is running or being started, end this process: with
        status 0, or with 128 + `number` if a worker has failed. After the timeout, kill the workers that still run; a
        repeated signal shortens the timeout to at most 5 s. This method is called in a thread other than the main
        thread."""
        with self._lock:
            self.signal = number
            if not (self._is_starting or any(worker.poll() is None for worker in self._workers)):
                os.write(2, f"stopped by {signal_name(number)} while no rank was running on this host\n".encode())
                remove_folders(self.rank_folders)
                has_failed = any(worker.returncode not in (0, RESTART_STATUS) for worker in self._workers)
                os._exit(128 + number if has_failed else 0)
            self._pass_on(number)
        wait_s = min(_AFTER_SECOND_SIGNAL_S, self.timeout_s) if is_repeated else self.timeout_s
        cause = f"a second {signal_name(number)}" if is_repeated else f"{signal_name(number)} (--shutdown-timeout)"
        timer = threading.Timer(wait_s, self._kill, (f"within {wait_s:g} s after {cause}",))
        timer.daemon = True
        timer.start()

    def _pass_on(self, number: int) -> None:
        for worker in self._workers:
            worker.send_signal(number)  # does nothing if the worker has ended

    def _kill(self, deadline: str) -> None:
        slow = [worker for worker in self._workers if worker.poll() is None]
        if not slow:
            return
        self.has_killed = True
        ranks = counted(len(slow), "rank")
        os.write(2, f"error: {ranks} of this host did not end {deadline}, and will be killed with SIGKILL\n".encode())
        for worker in slow:
            os.killpg(worker.pid, signal.SIGKILL)  # torchrun starts each worker in its own process group


def _report_failure(failures: Mapping[int, ProcessFailure], run_folder: Path, stopping: Stopping) -> int:
    """Return the exit status of the rank that failed first. If that rank printed no error, print one for it.

    If a signal killed a rank, that rank counts as the first, and the status is 128 + the number of the signal.
    Otherwise, a rank that called `os._exit` (EXITED_DIRECTLY) counts as the first. In these two cases, the other ranks
    failed later, in their next collective. Ranks that SIGTERM killed do not count, because torchrun sends SIGTERM to
    the other ranks after a failure.
    """
    exit_codes = {rank: failure.exitcode for rank, failure in failures.items()}
    killed = {rank: -code for rank, code in exit_codes.items() if code < 0 and -code != signal.SIGTERM}
    left = [rank for rank, failure in failures.items() if failure.message == EXITED_DIRECTLY]
    if left and not killed:
        status = exit_codes[left[0]]
        say(f"error: rank {left[0]} ended with status {status}: {EXITED_DIRECTLY}", file=sys.stderr)
        return status or FAILED
    if not killed:
        status = next((code for code in exit_codes.values() if code > 0), 0)
        if not status:
            say(f"error: rank {min(exit_codes)} was ended by SIGTERM", file=sys.stderr)
        return status or 128 + signal.SIGTERM
    rank, number = next(iter(killed.items()))
    hint = ""
    if number == signal.SIGKILL:
        hint = "; the usual cause is that the host ran out of memory"
    elif number == signal.SIGABRT:
        hint = _abort_cause(run_folder, stopping.last_start)
    say(as_message(f"error: rank {rank} was killed by {signal_name(number)}{hint}"), file=sys.stderr)
    return 128 + number


def _abort_cause(run_folder: Path, since: float) -> str:
    """Return a text that explains a SIGABRT and lists the unfinished collectives in the flight records. The aborted
    rank itself reports no error, because a native abort runs no Python code.

    `since`: start time of the workers, in seconds since the epoch. Older records are ignored.
    """
    from titan_launch.train.health.flight_recorder import unfinished_collectives

    unfinished = list(unfinished_collectives(run_folder, since))
    if any(collective.startswith("nccl") for collective in unfinished):  # `nccl:` or, from torch 2.15 on, `nccl2:`
        cause = (
            ": NCCL's watchdog thread aborts the process when CUDA fails, or when a collective takes longer than "
            "comm.timeout_seconds (comm.init_timeout_seconds until the end of the first step); PyTorch's lines above "
            "name the cause"
        )
    else:
        cause = ": native code aborted the process; the lines above may name the cause"
    records = f"; see the flight records and stacks in {run_folder}" if unfinished else ""
    return "\n".join([cause, *(f"not finished: {collective}" for collective in unfinished)]) + records


def _rendezvous_failure(error: Exception) -> str:
    """Return the reason why this host did not join the other hosts."""
    reasons = {
        "RendezvousClosedError": "the run has ended on another host, so this host cannot join; to continue the run, "
        "start all hosts again",
        "RendezvousTimeoutError": "fewer hosts than --nnodes joined before the timeout; start the missing hosts, or "
        "set --rdzv-conf join_timeout=SECONDS",
        "DistNetworkError": f"host 0 cannot be reached; check --master-addr, --master-port and the firewall: "
        f"{_first_line(error)}",
        "RendezvousConnectionError": "the host of the rendezvous (--rdzv-endpoint) is gone or cannot be reached; "
        "check its name, its port and the firewall",
    }
    return reasons.get(type(error).__name__, f"the rendezvous of the hosts failed: {_first_line(error)}")


def _first_line(error: Exception) -> str:
    return shortened(str(error).partition("\n")[0] or type(error).__name__, 500)
