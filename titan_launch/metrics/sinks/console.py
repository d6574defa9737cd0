"""Metrics on the console: a line per report, and a progress bar."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.core.phantom import marked
from titan_launch.core.terminal import CLEAR_LINE, say_escaped
from titan_launch.metrics.sinks.interface import Sink
from titan_launch.metrics.tags import TAGS

_BOLD, _CYAN, _RED = "1", "36", "31"
_SECONDS_BETWEEN_REDRAWS = 0.1
_BAR_WIDTH = 24


class ConsoleSink(Sink, Observer):
    """A sink that prints one line per report, with aligned fields. On a terminal it also shows a progress bar with the
    remaining time, unless the variable TERM is `dumb`.

    Only terminals get escape sequences, so a log file stays plain text. The variable NO_COLOR disables colours
    (https://no-color.org).
    """

    def __init__(self, total_steps: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        """`stream`: output of all lines and of the bar. None is standard output."""
        self._stream = stream = stream or sys.stdout
        self._total_steps = total_steps
        self._clock = clock
        self._has_bar = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._has_color = self._has_bar and not os.environ.get("NO_COLOR")
        self._first: tuple[int, float] | None = None  # step and time of the first call of `progress`
        self._drawn_step: int | None = None
        self._drawn_at = -math.inf

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print the line of `step`, with those `scalars` that have a `console` field in `TAGS`. If there are none,
        print nothing."""
        fields = [
            self._field(tag.name, tag.console, scalars[tag.name])
            for tag in TAGS
            if tag.console is not None and tag.name in scalars and tag.console_fallback_for not in scalars
        ]
        if not fields:
            return
        width = len(str(self._total_steps))
        line = "  ".join([self._paint(f"step {step:>{width}}/{self._total_steps}", _BOLD), *fields])
        say_escaped(f"{CLEAR_LINE if self._drawn_step is not None else ''}{marked(line)}", self._stream)
        if self._drawn_step is not None:
            self._draw(step)
        self._stream.flush()

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        self.progress(step.number)

    def progress(self, step: int) -> None:
        """Redraw the bar, at most ten times a second, and always at the last step. Without a terminal there is no
        bar."""
        if not self._has_bar:
            return
        now = self._clock()
        self._first = self._first or (step, now)
        if now - self._drawn_at >= _SECONDS_BETWEEN_REDRAWS or step == self._total_steps:
            self._drawn_at = now
            say_escaped(CLEAR_LINE, self._stream, end="")
            self._draw(step)
            self._stream.flush()

    def clear(self) -> None:
        """Remove the bar, so that other lines can be printed. The next call of `progress` draws it again."""
        if self._drawn_step is not None:
            say_escaped(CLEAR_LINE, self._stream, end="", flush=True)
            self._drawn_step, self._drawn_at = None, -math.inf

    def rewind(self, step: int) -> None:
        """Remove the bar, and restart the estimate of the remaining time."""
        self.clear()
        self._first = None

    def close(self, failed: bool = False) -> None:
        """Remove the bar. The stream stays open, because the caller owns it."""
        self.clear()

    def _draw(self, step: int) -> None:
        self._drawn_step = step
        filled = _BAR_WIDTH * step // self._total_steps
        bar = "#" * filled + "." * (_BAR_WIDTH - filled)
        text = f"[{bar}] {step}/{self._total_steps}  {100 * step // self._total_steps} %  {self._time_left(step)}"
        say_escaped(text[: shutil.get_terminal_size().columns - 1], self._stream, end="")

    def _time_left(self, step: int) -> str:
        assert self._first is not None
        first_step, first_time = self._first
        if step == first_step:
            return "ETA ?"
        seconds = round((self._clock() - first_time) / (step - first_step) * (self._total_steps - step))
        return f"ETA {seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"

    def _field(self, name: str, pattern: str, value: float) -> str:
        text = pattern.format(value)
        if not math.isfinite(value):
            return self._paint(text, _RED)
        return self._paint(text, _CYAN) if name.endswith("/loss") else text

    def _paint(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._has_color else text
