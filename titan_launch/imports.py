"""Importing much at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Around imports of PyTorch and what needs it, which make a million objects that stay: looking through them again
    and again for garbage takes a tenth to a quarter of the time. What is there at the end is never looked through."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if was_enabled:
            gc.enable()
