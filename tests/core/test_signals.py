"""Signals that ask a process to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from titan_launch.core.signals import (
    AGENT_PID,
    RESTART_SIGNAL,
    STOP_SIGNALS,
    is_orphan,
    signals_blocked,
    signals_handled,
)

REPO = Path(__file__).parents[2]

STUCK = """
import ctypes, os
from titan_launch.core.signals import signals_handled

def on_request(number, is_repeated):
    os.write(1, f"{number} {is_repeated}\\n".encode())
    if is_repeated:
        os._exit(128 + number)

with signals_handled(on_request, same_request_s=0):
    os.write(1, b"ready\\n")
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # for ever, outside of the interpreter, as in a collective that hangs
"""


def test_a_rank_ends_at_once_if_its_agent_has_ended_before(tmp_path: Path) -> None:
    code = "from titan_launch.core.signals import stop_with_agent; stop_with_agent(); print('goes on')"
    child = subprocess.Popen(["true"])
    child.wait()

    def started_by(agent: int, *script: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, AGENT_PID: str(agent)}
        command = [*script, sys.executable, "-c", code]
        return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True)

    assert started_by(child.pid).returncode == 128 + signal.SIGTERM
    script = tmp_path / "обучение"  # one process is between the agent and the rank; the kernel cuts its name
    script.write_text('#!/bin/bash\n"$@"; exit $?\n')
    script.chmod(0o755)
    assert started_by(os.getpid()).stdout == started_by(os.getpid(), str(script)).stdout == "goes on\n"


def test_a_system_without_proc_asks_for_the_agent_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("titan_launch.core.signals.process_fields", lambda pid: None)
    for agent, is_gone in ((child.pid, True), (os.getpid(), False)):
        monkeypatch.setenv(AGENT_PID, str(agent))
        assert is_orphan() == is_gone

    def forbidden(pid: int, number: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert not is_orphan(), "the agent may run as another user"


def start(code: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPO, stdout=subprocess.PIPE, text=True)


def test_a_process_inside_native_code_stops_at_a_signal() -> None:
    with start(STUCK) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.stdout.readline() == f"{int(signal.SIGUSR1)} False\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == f"{int(signal.SIGTERM)} True\n"
        assert process.wait(30) == 128 + signal.SIGTERM


def test_two_immediate_signals_are_one_request() -> None:
    requests: list[tuple[int, bool]] = []
    is_third = threading.Event()

    def on_request(number: int, is_repeated: bool) -> None:
        requests.append((number, is_repeated))
        is_third.set()

    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with signals_handled(on_request, same_request_s=3600):
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert is_third.wait(30)
    assert requests == [(signal.SIGTERM, False)]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_a_signal_before_the_handlers_are_installed_is_delivered_later() -> None:
    code = """
import os, signal, sys, threading
os.write(1, b"started\\n")
sys.stdin.readline()
heard_it = threading.Event()
from titan_launch.core.signals import signals_handled
with signals_handled(lambda number, is_repeated: (os.write(1, f"{number}\\n".encode()), heard_it.set())):
    heard_it.wait(30)
"""
    with signals_blocked():
        process = subprocess.Popen(
            [sys.executable, "-c", code], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
    with process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    assert process.returncode == 0
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {*STOP_SIGNALS, RESTART_SIGNAL}
