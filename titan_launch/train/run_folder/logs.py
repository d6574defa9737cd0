"""Log handlers of a rank: the console, and a file per rank in the run folder."""

from __future__ import annotations

import io
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from titan_launch.core.errors import RunError, UserError
from titan_launch.core.patches import replaced
from titan_launch.core.phantom import marked
from titan_launch.core.terminal import as_message, printable

_PACKAGE = logging.getLogger("titan_launch")


class _Lines(logging.Formatter):
    """A formatter that escapes control characters and file names that are not UTF-8. It indents all lines of a message
    except the first. Tracebacks are not indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return marked(as_message(super().formatMessage(record)))

    def formatException(self, *args: Any) -> str:  # noqa: N802
        return marked(printable(super().formatException(*args)))


class LogFile(logging.StreamHandler[TextIO]):
    """Log file of a rank: all messages of the launcher and all warnings of Python, with time and level.

    Messages before `open` are stored, and `open` writes them. Every line is flushed, so a killed process loses none. On
    a full disk the file lacks lines, but the console does not.
    """

    def __init__(self) -> None:
        super().__init__(io.StringIO())
        self.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))

    def open(self, path: Path) -> None:
        """Create the file and write the stored messages. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.acquire()
        try:
            early, self.stream = self.stream, path.open("x", encoding="utf-8")
            assert isinstance(early, io.StringIO)
            self.stream.write(early.getvalue())
            self.flush()
        finally:
            self.release()

    def close(self) -> None:
        """Close the file."""
        super().close()
        with suppress(OSError):  # a full disk
            self.stream.close()


@contextmanager
def rank_log() -> Iterator[LogFile]:
    """Send all messages of this process, and the error that ends the block, to a log file during the block. Yield the
    handler, whose file is not yet open.

    The error does not go to the console: `titan_launch.core.process` prints it once for all ranks.
    """
    file = LogFile()
    level, propagate, raising = _PACKAGE.level, _PACKAGE.propagate, logging.raiseExceptions
    _PACKAGE.setLevel(logging.DEBUG)
    _PACKAGE.propagate = False
    logging.raiseExceptions = False  # otherwise logging prints a traceback of its own if a pipe is closed
    _PACKAGE.addHandler(file)
    try:
        with _warnings_logged_to(file):
            yield file
    except BaseException as error:
        file.handle(_error_record(error))
        raise
    finally:
        _PACKAGE.removeHandler(file)
        file.close()
        _PACKAGE.setLevel(level)
        _PACKAGE.propagate, logging.raiseExceptions = propagate, raising


@contextmanager
def console_log(is_rank_0: bool, level: str = "INFO") -> Iterator[None]:
    """Print rank 0's messages and all ranks' warnings to standard output. `level`: lowest level of these messages."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Lines("%(message)s"))
    handler.setLevel(level)
    if not is_rank_0:
        handler.setLevel(max(handler.level, logging.WARNING))
    _PACKAGE.addHandler(handler)
    try:
        yield
    finally:
        _PACKAGE.removeHandler(handler)


def _warnings_logged_to(log: LogFile) -> AbstractContextManager[None]:
    """Return a context manager that also sends Python's warnings to `log`."""
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

    return replaced(warnings, "showwarning", show_and_log)


def _error_record(error: BaseException) -> logging.LogRecord:
    """Return the log record of the error that ends the rank. A UserError or RunError has no traceback in the record."""
    if isinstance(error, UserError | RunError):
        return _record(logging.ERROR, str(error))
    record = _record(logging.ERROR, f"the rank ends: {type(error).__name__}")
    record.exc_info = (type(error), error, error.__traceback__)
    return record


def _record(level: int, text: str) -> logging.LogRecord:
    """Return a log record that is written to the log file, but not to the console."""
    return logging.LogRecord("titan_launch", level, "", 0, text, None, None)
