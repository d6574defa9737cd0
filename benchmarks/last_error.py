"""The error that ended a process, found in its output."""

from __future__ import annotations

import re

_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Prefix that PyTorch adds to every line of a traceback in a process group."""

_ECHOES = ("ChildFailedError", "error: the run failed")
"""Parts of lines that torchrun and the launcher print after an error, without its cause."""

_MOST_CHARACTERS = 300


def last_error(output: str) -> str:
    """Return the `Type: message` line of the last traceback, or the last line of the output if it has no traceback."""
    lines = [_RANK_PREFIX.sub("", line) for line in output.splitlines() if line.strip()]
    for start in reversed([n for n, line in enumerate(lines) if line.startswith("Traceback (most recent call last):")]):
        rest = [line for line in lines[start + 1 :] if not line[0].isspace()]
        if rest and not _is_echo(rest[0]) and not rest[0].startswith("Traceback"):
            is_split = rest[0].endswith(":") and len(rest) > 1  # the message begins in the next line
            return (f"{rest[0]} {rest[1]}" if is_split else rest[0])[:_MOST_CHARACTERS]
    return last_line("\n".join(line for line in lines if not _is_echo(line)))


def _is_echo(line: str) -> bool:
    return any(echo in line for echo in _ECHOES)


def last_line(output: str) -> str:
    """Return the last line with text."""
    return (output.strip().splitlines() or ["no output"])[-1].strip()[:_MOST_CHARACTERS]
