"""What no rank decides alone."""

from __future__ import annotations

import torch.distributed as dist

from tests.distributed import run_ranks
from titan_launch.train.health.coordination import StepCoordinator


class Clock:
    """Seconds, as set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Signal:
    """A signal that has arrived, or not."""

    signal = 0


def agree() -> list[tuple[int, bool]]:
    """Rank 0's clock reaches the interval, later rank 1 hears a signal: what each rank is told."""
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


def test_one_rank_knows_and_all_act() -> None:
    expected = [(0, False), (0, True), (0, False), (0, True), (15, False)]
    assert run_ranks(agree, 2) == [expected, expected]
