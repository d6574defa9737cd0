"""Decisions that all ranks take together."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from tests.distributed import run_ranks
from titan_launch.core.signals import RESTART_SIGNAL, SAME_REQUEST_S
from titan_launch.train.health.coordination import StepCoordinator


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Signal:
    """A signal that a test sets."""

    signal = 0


def agree() -> list[tuple[int, bool]]:
    """Let rank 0's clock reach the interval, and later rank 1 receive a signal. Return the decisions of each step."""
    clock, request = Clock(), Signal()
    control = StepCoordinator(request, interval_minutes=2, clock=clock)  # type: ignore[arg-type]
    seen = []
    for seconds in (100, 130, 240, 260):
        clock.now = seconds if dist.get_rank() == 0 else 0
        control.agree()
        seen.append((control.stop_signal, control.save_is_due))
        if control.save_is_due:
            control.saved()
    for own, other in ((0, signal.SIGTERM), (RESTART_SIGNAL, signal.SIGINT)):
        request.signal = own if dist.get_rank() == 0 else other
        control.agree()
        seen.append((control.stop_signal, control.save_is_due))
    return seen


def test_all_ranks_act_on_the_clock_or_signal_of_one() -> None:
    expected = [(0, False), (0, True), (0, False), (0, True), (15, False), (2, False)]
    assert run_ranks(agree, 2) == [expected, expected]


RANK = """
import logging, sys, threading
from titan_launch.train.health.coordination import StopRequest

logging.basicConfig(stream=sys.stdout, format="%(message)s", level="INFO")
stop = StopRequest()
if sys.argv[1] == "built":
    stop.mark_run_built()
with stop.listening():
    print("ready", flush=True)
    threading.Event().wait()
"""


def test_the_sentences_about_a_first_and_a_second_signal_are_true() -> None:
    """Signals within two seconds of the first change nothing, and a later one ends the rank at once. Two ranks get
    them at the same time, before and after the run is built."""
    root, pipe = Path(__file__).parents[3], subprocess.PIPE
    ends = {"built": "after this step", "starting": "when it is built, before its next step"}
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                subprocess.Popen([sys.executable, "-c", RANK, state], cwd=root, stdout=pipe, stderr=pipe, text=True)
            )
            for state in ends
        ]
        sentences = []
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
            rank.send_signal(signal.SIGTERM)
            sentences.append(rank.stdout.readline())
        while any(rank.poll() is None for rank in ranks):
            for rank in ranks:
                rank.send_signal(signal.SIGINT)  # nothing, once the rank has ended
            time.sleep(0.1)
        outputs = [(rank.returncode, *rank.communicate()) for rank in ranks]
    after = "a second signal, 2 s later or more, ends it at once"
    assert sentences == [f"SIGTERM: the run ends {end}; {after}\n" for end in ends.values()]
    error = "error: a second signal (SIGINT) ended the run at once; steps after the last complete checkpoint are lost\n"
    assert outputs == [(128 + signal.SIGINT, "", error)] * 2


HANDLED = """
from titan_launch.train.health.coordination import StopRequest

def reported(self, number, is_repeated, handle=StopRequest._on_signal):
    handle(self, number, is_repeated)
    print("handled", flush=True)

StopRequest._on_signal = reported
"""


def test_a_stop_and_a_restart_for_a_new_host_are_two_requests() -> None:
    """Neither signal ends the rank at once. In both orders, which two ranks get at the same time, the run stops and
    does not restart."""
    code = HANDLED + RANK.replace("threading.Event().wait()", "input(); print(stop.signal)")
    root, pipe = Path(__file__).parents[3], subprocess.PIPE
    command = [sys.executable, "-c", code, "built"]
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(subprocess.Popen(command, cwd=root, stdin=pipe, stdout=pipe, text=True))
            for _ in range(2)
        ]
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        for numbers in ((RESTART_SIGNAL, signal.SIGTERM), (signal.SIGTERM, RESTART_SIGNAL)):
            for rank, number in zip(ranks, numbers, strict=True):
                assert rank.stdout is not None
                rank.send_signal(number)
                while rank.stdout.readline() not in ("handled\n", ""):
                    pass
            time.sleep(SAME_REQUEST_S + 0.1)
        for rank in ranks:
            output, _ = rank.communicate("\n")
            assert (rank.returncode, output.split()[-1:]) == (0, [str(int(signal.SIGTERM))])
