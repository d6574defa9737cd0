"""Signals that ask a run to end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

from titan_launch.process import is_announced
from titan_launch.signals import RESTART_SIGNAL, STOP_SIGNALS, heard, signal_name, stop_with_parent

_log = logging.getLogger(__name__)


class StopRequest:
    """A signal that has arrived on this rank."""

    def __init__(self) -> None:
        self.signal = 0
        """The number of the signal, or 0."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take signals until the end of the block: the first asks the run to end after its step, and a later one ends
        this process at once, with 128 + its number.

        A rank whose torchrun is gone is asked as if by SIGTERM, instead of being left running without it.
        """
        with heard(self._arrived, (*STOP_SIGNALS, RESTART_SIGNAL)):
            if "TORCHELASTIC_RUN_ID" in os.environ:
                stop_with_parent()
            yield

    def _arrived(self, number: int, is_repeated: bool) -> None:
        name = signal_name(number)
        if not is_repeated:
            self.signal = number
            if number == RESTART_SIGNAL:
                _log.info("a new host joined: all ranks end after this step and are restarted with it")
            elif number != signal.SIGTERM or not is_announced():  # torchrun's SIGTERM after a failure is not news
                _log.info("%s: the run ends after this step; a second signal ends it at once", name)
            return
        if os.environ.get("RANK", "0") == "0":  # not by print: the main thread may hold the stream's lock for ever
            os.write(2, f"error: ended at once by a second signal, {name}\n".encode())
        os._exit(128 + number)
