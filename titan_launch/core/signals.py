"""Handling of the signals that ask a process to end, even while its main thread is blocked."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask a run to stop. Schedulers send SIGTERM or (Slurm) SIGUSR1; Ctrl-C sends SIGINT."""

RESTART_SIGNAL = signal.SIGUSR2
"""Signal with which `titan_launch.launch.agent` asks ranks to save and end, because a new host joined."""

RESTART_STATUS = 75
"""Exit status of the ranks after RESTART_SIGNAL (EX_TEMPFAIL of sysexits.h). With status 0 the agents would end the
run."""

AGENT_PID = "TITAN_LAUNCH_AGENT_PID"
"""Environment variable with the process id of the agent: `launch` or torchrun, which starts and monitors the ranks of
this host. `launch` sets the variable; below torchrun, `stop_with_agent` sets it. A rank ends when its agent ends."""

SAME_REQUEST_S = 2.0
"""Seconds after the first signal during which further signals count as the same request. A scheduler signals all
processes of a job, so a rank gets the signal twice: from the scheduler and from torchrun."""


@contextmanager
def signals_handled(
    on_request: Callable[[int, bool], None],
    numbers: Collection[int] = STOP_SIGNALS,
    same_request_s: float = SAME_REQUEST_S,
) -> Iterator[None]:
    """Call `on_request(number, is_repeated)` for signals that ask this process to end, until the end of the block.

    `numbers`: the signals. RESTART_SIGNAL is one request, and all other signals together are another. `is_repeated` is
    False for the first signal of a request, and True for each signal that arrives at least `same_request_s` seconds
    after the first. Earlier repetitions are ignored. Enter the block in the main thread.

    A thread makes the calls. Python runs a signal handler only when the main thread returns to the interpreter, which
    never happens during a collective that hangs. A handler also must not log, since the interrupted code may hold the
    lock of a logger. Signals that are blocked since `signals_blocked` are unblocked. Ignored signals stay ignored.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def listen() -> None:
        firsts: dict[bool, float] = {}  # time of the first signal of each request
        while received := os.read(reading, 1):
            number = received[0]
            if number not in numbers:  # belongs to another handler
                continue
            now = time.monotonic()
            request = number == RESTART_SIGNAL
            if request not in firsts:
                firsts[request] = now
                on_request(number, False)
            elif now - firsts[request] >= same_request_s:
                on_request(number, True)
        os.close(reading)

    listener = threading.Thread(target=listen, name="stop-signals", daemon=True)
    listener.start()
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    # Python requires a handler, which does nothing: the thread reads the number of the signal from the wakeup pipe.
    handlers_before = {number: signal.signal(number, lambda number, frame: None) for number in handled}
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup_before)
        os.close(writing)  # ends the thread
        listener.join()


@contextmanager
def signals_blocked() -> Iterator[None]:
    """Block STOP_SIGNALS and RESTART_SIGNAL in this thread until the end of the block (`pthread_sigmask`).

    Processes that are started inside the block inherit the mask, until they enter `signals_handled` or call
    `ignore_stop_signals`. Without the mask, a signal could kill a process before the process has handlers.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, RESTART_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Ignore STOP_SIGNALS and RESTART_SIGNAL in this helper process, which its parent ends.

    Schedulers, terminals and torchrun signal a whole process group, so helper processes get the signals too.
    """
    for number in (*STOP_SIGNALS, RESTART_SIGNAL):
        signal.signal(number, signal.SIG_IGN)  # also drops a signal that is pending since `signals_blocked`


_CONNECT_TIMEOUT_S = 10.0


def stop_with_agent() -> None:
    """Make the kernel send SIGTERM to this process when its parent, usually the agent, ends (on Linux). If the agent
    has already ended, end this process now.

    Call this function before slow imports. Without an agent, this function does nothing.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ.setdefault(AGENT_PID, str(os.getppid()))
    if AGENT_PID not in os.environ:
        return
    stop_with_parent()
    if is_orphan() or store_is_gone():  # torchrun may have ended before os.getppid() above
        os._exit(128 + signal.SIGTERM)


def agent_keeps_store() -> bool:
    """Return True if the agent of host 0 hosts the rendezvous store, and not rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_is_gone() -> bool:
    """Return True if the agent of host 0 hosts the store and refuses connections: this agent has ended."""
    if not agent_keeps_store():
        return False
    import socket  # `check` does not need it

    try:
        socket.create_connection(
            (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _CONNECT_TIMEOUT_S
        ).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):  # the TCPStore will retry, and report the error
        return False
    return False


def is_orphan() -> bool:
    """Return True if this process's agent has ended; False without an agent. The agent is the parent process, or an
    earlier ancestor if a script started this process."""
    agent = os.environ.get(AGENT_PID)
    pid = os.getppid()
    if agent is not None and str(pid) != agent and sys.platform != "linux":  # there is no /proc
        try:
            os.kill(int(agent), 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # the agent runs, as another user
            return False
        return False
    while agent is not None and str(pid) != agent:
        fields = process_fields(pid)
        if fields is None or pid <= 1:
            return True
        pid = int(fields[1])
    return False


def process_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the process name: state, parent, ...; None if there is no such file."""
    try:
        # The kernel cuts the name after 15 bytes, perhaps within a character.
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()  # the name may contain spaces
    except OSError:
        return None


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Make the kernel send the signal `number` to this process when its parent ends (on Linux; elsewhere, do nothing).
    If the parent ended before this call, no signal is sent."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(number), 0, 0, 0)


def signal_name(number: int) -> str:
    """Return the name of a signal, such as `SIGTERM` for 15."""
    return signal.Signals(number).name
