"""Where the messages of a rank go: the console, and a file of its own in the run's folder."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from titan_launch.core.errors import RunError, UserError

_PACKAGE = logging.getLogger("titan_launch")


class _Lines(logging.Formatter):
    """A formatter whose lines can be encoded. It shows a file name that is not UTF-8 with escapes, as Python does on
    standard error."""

    def format(self, record: logging.LogRecord) -> str:
        return super().format(record).encode(errors="backslashreplace").decode()


class LogFile(logging.Handler):
    """A rank's log: every message of the launcher and every warning of Python, with time and level.

    The run's folder is known only when much has been said already, so messages are kept until `open` and written then.
    A line is in the file when the call that logs it returns: a process that is killed loses none. Where the disk is
    full, lines are missing here, and are on the console.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        self._early: list[str] = []
        self._file: TextIO | None = None

    def open(self, path: Path) -> None:
        """Write to a new file from now on, and what was said before first. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.acquire()
        try:
            self._file = path.open("x", encoding="utf-8")
            self._file.write("".join(self._early))
            self._file.flush()
            self._early.clear()
        finally:
            self.release()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a message, or keep it."""
        try:
            line = self.format(record) + "\n"
            if self._file is None:
                self._early.append(line)
            else:
                self._file.write(line)
                self._file.flush()
        except Exception:  # a message that cannot be written must not end a run
            self.handleError(record)

    def close(self) -> None:
        """Close the file."""
        super().close()
        if self._file is not None:
            with suppress(OSError):  # a full disk
                self._file.close()


@contextmanager
def rank_log() -> Iterator[LogFile]:
    """A log file that takes all messages of this process; on the way out also the error that ends the rank.

    That error goes only there: `titan_launch.core.process` prints it, once for all ranks.
    """
    file = LogFile()
    level, propagate, raising = _PACKAGE.level, _PACKAGE.propagate, logging.raiseExceptions
    _PACKAGE.setLevel(logging.DEBUG)
    _PACKAGE.propagate = False
    logging.raiseExceptions = False  # a closed pipe is reported once, by the console's next line
    _PACKAGE.addHandler(file)
    try:
        with _warnings_logged_to(file):
            yield file
    except BaseException as error:
        file.handle(_end_of(error))
        raise
    finally:
        _PACKAGE.removeHandler(file)
        file.close()
        _PACKAGE.setLevel(level)
        _PACKAGE.propagate, logging.raiseExceptions = propagate, raising


@contextmanager
def console_log(is_main: bool, verbose: bool = False) -> Iterator[None]:
    """Print messages of rank 0 to standard output (`verbose`: those of level DEBUG too), and all ranks' warnings."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Lines("%(message)s"))
    handler.setLevel((logging.DEBUG if verbose else logging.INFO) if is_main else logging.WARNING)
    _PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        _PACKAGE.removeHandler(handler)


@contextmanager
def _warnings_logged_to(log: LogFile) -> Iterator[None]:
    """Python's warnings are shown as before, and logged."""
    show = warnings.showwarning

    def show_and_log(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        show(message, category, filename, lineno, file, line)
        text = warnings.formatwarning(message, category, filename, lineno, line).rstrip()
        log.handle(_record(logging.WARNING, text))

    warnings.showwarning = show_and_log
    try:
        yield
    finally:
        warnings.showwarning = show


def _end_of(error: BaseException) -> logging.LogRecord:
    """What ends the rank; with a traceback, unless the message says all."""
    if isinstance(error, UserError | RunError):
        return _record(logging.ERROR, str(error))
    record = _record(logging.ERROR, f"the rank ends: {type(error).__name__}")
    record.exc_info = (type(error), error, error.__traceback__)
    return record


def _record(level: int, text: str) -> logging.LogRecord:
    """A record that goes to the file alone."""
    return logging.LogRecord("titan_launch", level, "", 0, text, None, None)
