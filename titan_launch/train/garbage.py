"""Python's garbage collector, run when the training loop says so."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def scheduled_garbage_collection(every_steps: int) -> Iterator[Callable[[int], None]]:
    """Switch automatic collection off and yield a function of the step that collects on every `every_steps`-th.

    Left to itself each rank collects at another moment, and every pause holds up all ranks at the next collective.
    What start-up has made is frozen, so that the collections have little to look at.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield lambda step: _collect_young(step, every_steps)
    finally:
        gc.enable()
        gc.unfreeze()


def _collect_young(step: int, every_steps: int) -> None:
    if step % every_steps == 0:
        gc.collect(1)
