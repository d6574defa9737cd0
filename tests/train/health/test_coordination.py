"""Decisions that all ranks take together."""

from __future__ import annotations

import torch.distributed as dist

from tests.distributed import run_ranks
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
    request.signal = 15 * dist.get_rank()
    control.agree()
    return [*seen, (control.stop_signal, control.save_is_due)]


def test_all_ranks_act_on_the_clock_or_signal_of_one() -> None:
    expected = [(0, False), (0, True), (0, False), (0, True), (15, False)]
    assert run_ranks(agree, 2) == [expected, expected]
