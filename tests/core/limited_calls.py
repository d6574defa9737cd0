"""An object whose methods do what limits forbid. The helper process imports this module, so it imports little."""

from __future__ import annotations

import os
import sys
import threading
import time

from titan_launch.data.chat_rendering import RecordError


class Calls:
    """Methods that tests call. The helper process imports this module."""

    def __init__(self, first: int = 0):
        if first < 0:
            raise ValueError("first is negative")
        self.count = first

    def add(self, number: int = 1) -> int:
        """Return the sum of all numbers so far."""
        self.count += number
        return self.count

    def pid(self) -> int:
        """Return the process of this object."""
        return os.getpid()

    def loop(self) -> None:
        """Run without end."""
        while True:
            pass

    def spend(self, seconds: float) -> None:
        """Use CPU time."""
        end = time.process_time() + seconds
        while time.process_time() < end:
            pass

    def threads(self) -> None:
        """Run without end in several threads, while the main thread waits."""
        for _ in range(3):
            threading.Thread(target=self.loop).start()
        threading.Event().wait()

    def allocate(self, size: int, text: str = "") -> int:
        """Allocate memory, and return its size."""
        return len(bytes(size))

    def end(self, number: int) -> None:
        """End the process by a signal, or with an exit status."""
        if number < 0:
            os._exit(-number)
        os.kill(os.getpid(), number)

    def large(self, size: int) -> bytes:
        """Return a large answer."""
        return bytes(size)

    def write(self) -> None:
        """Write to the standard streams, and read from one."""
        print("to standard output", flush=True)
        os.write(1, b"to standard output")
        os.write(2, b"to standard error")
        assert sys.stdin.read() == ""

    def refuse(self) -> None:
        """Raise an error of this package."""
        raise RecordError("no chat", "a detail", "template")

    def fail(self) -> None:
        """Raise an error with a long text of two lines."""
        raise RuntimeError("first\nsecond" + "x" * 10_000)
