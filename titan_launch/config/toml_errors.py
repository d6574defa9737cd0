"""tomli's syntax errors, with file, line and a plain reason."""

from __future__ import annotations

import re

import tomli

from titan_launch.config.toml_lines import repeated_key
from titan_launch.errors import format_key

_AT = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")
_REPETITIONS = ("Cannot overwrite a value", "Cannot declare", "Duplicate inline table key")


def explain_toml_error(path: str, text: str, error: tomli.TOMLDecodeError) -> str:
    """One line: where a file stops being TOML, and why."""
    what, line, column = _take_apart(str(error), text)
    if what.startswith(_REPETITIONS):
        repeated = repeated_key(text)
        if repeated is not None:
            key, first_line = repeated
            return f"{path}:{line}: {format_key(key)}: given twice, first in line {first_line}; keep one of them"
    return f"{path}:{line}: not valid TOML: {what}{column}{_remedy(what, text, line)}"


def _take_apart(message: str, text: str) -> tuple[str, int, str]:
    """tomli's message as what is wrong, the line, and a note about the column."""
    at = _AT.search(message)
    if at is None:
        return message, 1, ""
    what = message[: at.start()]
    if at[1] is None:
        return f"{what} before the end of the file", len(text.rstrip().splitlines()) or 1, ""
    return what, int(at[1]), f" (column {at[2]})"


def _remedy(what: str, text: str, line: int) -> str:
    """What to do about the most common slips."""
    if what == r"Illegal character '\n'":
        return "; a string is closed, with the quotes that open it, on the same line"
    if what != "Invalid value":
        return ""
    value = text.splitlines()[line - 1].partition("=")[2].partition("#")[0].strip()
    if value in ("True", "False"):
        return f"; write {value.lower()}"
    return f'; a string needs quotes: "{value}"' if value[:1].isalpha() else ""
