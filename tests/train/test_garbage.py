"""Python's garbage collector runs when the loop says so."""

from __future__ import annotations

import gc

from titan_launch.train.loop import scheduled_garbage_collection


class Cycle:
    """Garbage that only the collector can free."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Cycle.alive += 1

    def __del__(self) -> None:
        Cycle.alive -= 1


def test_it_collects_on_schedule_and_at_no_other_time() -> None:
    with scheduled_garbage_collection(every_steps=3) as collect:
        assert not gc.isenabled()
        for step in (1, 2):
            Cycle()
            collect(step)
        assert Cycle.alive == 2
        collect(3)
        assert Cycle.alive == 0
    assert gc.isenabled()
