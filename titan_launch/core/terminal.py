"""Output functions: all text that commands print on the terminal passes through this module.

Names and texts from files may contain control characters. With these characters, a file could move the cursor of the
terminal, erase lines or change the title. This module replaces control characters by escapes, such as `\\x1b`.
"""

from __future__ import annotations

import sys
import unicodedata
import warnings
from collections.abc import Sequence
from typing import TextIO

CLEAR_LINE = "\r\x1b[K"
"""Escape sequence that deletes the present line of a terminal."""

_OVERRIDES = range(0x202A, 0x202F), range(0x2066, 0x206A)
"""Characters that change the direction of the text after them."""


class _Escapes(dict[int, str | int]):
    """A table for `str.translate` that computes the entry of a character at its first use."""

    def __init__(self, kept: tuple[str, ...]):
        super().__init__({ord(character): character for character in kept})

    def __missing__(self, code: int) -> str | int:
        is_shown = unicodedata.category(chr(code)) not in ("Cc", "Cs", "Zl", "Zp")
        is_shown &= not any(code in overrides for overrides in _OVERRIDES)
        found = code if is_shown else chr(code).encode("unicode_escape", "surrogatepass").decode()
        if code < 0x3000:  # higher characters are not cached: a text with many of them would fill the memory
            self[code] = found
        return found


_KEEPING_LINES, _KEEPING_NOTHING = _Escapes(("\n", "\t")), _Escapes(())


def printable(text: str) -> str:
    """Return a text with escapes in place of control characters. Line ends and tabs stay."""
    is_plain = text.isascii() and text.replace("\n", "").replace("\t", "").isprintable()
    return text if is_plain else text.translate(_KEEPING_LINES)


def one_line(text: str) -> str:
    """Return a name or another part of a message, with escapes in place of control characters and line ends."""
    return text if text.isprintable() else text.translate(_KEEPING_NOTHING)


def shortened(text: str, most: int = 60) -> str:
    """Return a text. If the text is longer than `most` characters, ` ... ` replaces its middle."""
    half = most // 2
    return text if len(text) <= most else f"{text[: half - 2]} ... {text[-half + 3 :]}"


LONGEST_NAME = 200


def counted(number: float, noun: str) -> str:
    """Return a number with a noun, such as `1 rank`, `2,000 ranks` or `0.5 epochs`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def short_name(name: str) -> str:
    """Return a name from a file as a part of a message: in one line, and without its middle if it is long."""
    return one_line(shortened(name, LONGEST_NAME))


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return lines of cells as text, with every column as wide as its widest cell, and control characters escaped."""
    rows = [[one_line(cell) for cell in line] for line in lines]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def as_message(text: str) -> str:
    """Return an error or a log message with escapes in place of control characters. All lines after the first are
    indented, so that none of them looks like a separate message."""
    first, *others = printable(text).split("\n")
    return "\n".join([first, *(line if not line or line[0].isspace() else f"  {line}" for line in others)])


def say(text: str = "", file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print a text with escapes in place of control characters. `file`: standard output by default."""
    say_escaped(printable(text), file, end, flush)


def say_data(text: str, end: str = "\n", flush: bool = False) -> None:
    """Print a text to standard output: with escapes on a terminal, and unchanged to a pipe or file for other
    programs."""
    (say if sys.stdout.isatty() else say_escaped)(text, end=end, flush=flush)


def say_escaped(text: str, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print a text unchanged. The caller has already escaped its control characters, and may have added colours."""
    print(text, file=sys.stdout if file is None else file, end=end, flush=flush)


def escape_warnings() -> None:
    """Print Python's warnings with escapes too, because their texts may contain names from files."""
    warnings.formatwarning = _format_warning


_PLAIN_FORMAT = warnings.formatwarning


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    return as_message(_PLAIN_FORMAT(message, category, filename, lineno, line))
