"""Signals that ask a process to end: heard at once, whatever the process is doing."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Schedulers send SIGTERM or (Slurm) SIGUSR1, Ctrl-C is SIGINT."""

RESTART_SIGNAL = signal.SIGUSR2
"""The signal by which `titan_launch.launch.agent` asks ranks to save and end, because a new host joined."""

RESTART_STATUS = 75
"""How ranks end then (the EX_TEMPFAIL of sysexits.h), on every host: 0 would tell their agents that the run is over."""

AGENT_PID = "TITAN_LAUNCH_AGENT_PID"
"""Environment variable: id of the agent, without which this process must not go on. The agent of a rank is the process
that starts the ranks of this host and watches them: `launch`, which sets the variable, or torchrun, which does not."""

SAME_REQUEST_S = 2.0
"""Signals that follow the first within this many seconds are the same request: a scheduler signals all processes of a
job, so a rank hears it from there and from torchrun; `timeout` signals its child and then the child's group."""


@contextmanager
def signals_handled(
    on_request: Callable[[int, bool], None],
    numbers: Collection[int] = STOP_SIGNALS,
    same_request_s: float = SAME_REQUEST_S,
) -> Iterator[None]:
    """Until the end of the block, call `on_request(number, is_repeated)` when one of the signals `numbers` asks this
    process to end: once for the first, with False, and with True for each that comes later than `same_request_s` after.

    It is called from a thread. Python runs a handler only when the main thread comes back to the interpreter, which it
    does not while it waits in a collective that never ends; and a handler may not log, since it may have interrupted
    the holder of a lock. The thread may do both. Signals that were blocked, as `signals_blocked` leaves them, are let in; one
    that the process was started to ignore stays ignored. To be entered in the main thread.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    listener = threading.Thread(
        target=_listen, args=(reading, on_request, numbers, same_request_s), name="stop-signals", daemon=True
    )
    listener.start()
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    handled = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    handlers_before = {number: signal.signal(number, _ignore) for number in handled}
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
    """Processes started within the block do not get these signals before they enter `signals_handled`: until then a signal waits,
    instead of killing a process that is about to install its handlers."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, RESTART_SIGNAL))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_stop_signals() -> None:
    """Have this process ignore what asks a rank to end: schedulers, terminals and torchrun signal a whole process
    group, and the process that started this one ends it when it has no more use for it."""
    for number in (*STOP_SIGNALS, RESTART_SIGNAL):
        signal.signal(number, signal.SIG_IGN)


_CONNECT_TIMEOUT_S = 10.0


def stop_with_agent() -> None:
    """Have this process be sent SIGTERM when its agent ends, and end it here if the agent has ended before.

    Call this function before anything slow is imported. It does nothing in a process that has no agent.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        os.environ.setdefault(AGENT_PID, str(os.getppid()))
    if AGENT_PID not in os.environ:
        return
    stop_with_parent()
    if is_orphan() or store_is_gone():  # torchrun may end before this process could learn its pid
        os._exit(128 + signal.SIGTERM)


def agent_keeps_store() -> bool:
    """Return whether this rank's agent keeps the store through which the ranks find each other."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def store_is_gone() -> bool:
    """Return whether the agent keeps the store and nothing listens there any more: the agent has ended."""
    if not agent_keeps_store():
        return False
    import socket  # which a `check` does without

    try:
        socket.create_connection(
            (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), _CONNECT_TIMEOUT_S
        ).close()
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):  # the TCPStore tries again, and will tell
        return False
    return False


def is_orphan() -> bool:
    """Return whether this process's agent has ended. The agent is the parent, or an ancestor if a script lies between.
    Always False in a process that has no agent."""
    agent = os.environ.get(AGENT_PID)
    pid = os.getppid()
    while agent is not None and str(pid) != agent:
        fields = process_fields(pid)
        if fields is None or pid <= 1:
            return True
        pid = int(fields[1])
    return False


def process_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat after the name: state, parent, and so on. None if there is no such file."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()  # the name itself may hold blanks
    except OSError:
        return None


def stop_with_parent(number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when its parent ends, however that ends (Linux; nothing elsewhere).
    A parent that ended before is not noticed."""
    if sys.platform != "linux":
        return
    import ctypes

    set_parent_death_signal = 1  # PR_SET_PDEATHSIG
    ctypes.CDLL(None).prctl(set_parent_death_signal, int(number), 0, 0, 0)


def signal_name(number: int) -> str:
    """`SIGTERM` for 15."""
    return signal.Signals(number).name


def _ignore(number: int, frame: object) -> None:
    """What Python calls itself; the number has gone to the thread before."""


def _listen(
    reading: int, on_request: Callable[[int, bool], None], numbers: Collection[int], same_request_s: float
) -> None:
    first_at: float | None = None
    while received := os.read(reading, 1):
        number = received[0]
        if number not in numbers:  # another handler's
            continue
        now = time.monotonic()
        if first_at is None:
            first_at = now
            on_request(number, False)
        elif now - first_at >= same_request_s:
            on_request(number, True)
    os.close(reading)
