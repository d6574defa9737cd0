"""The location (file and line, or override) of every key, and error messages that name these locations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from titan_launch.config.sections.section import Section
from titan_launch.core.errors import UNSET, KeyPath, Problem, format_key, toml_string
from titan_launch.core.object_store import with_urls
from titan_launch.core.terminal import shortened


class KeyLocation(NamedTuple):
    """Location at which a key is set. Locations sort in the order of merging: by file, then by line; the command line
    is last."""

    source: int
    line: int
    text: str
    """Location as text: `configs/job.toml:7`, or `command line: --training.steps=20`."""


class Source(Protocol):
    """A file or an override of a job. Later sources override earlier ones."""

    def find(self, key: KeyPath) -> tuple[int, str]:
        """Return (line, location as text) of a key. `line`: line of the key, or else of the nearest table
        around the key; 0 if neither has a line."""


class Provenance:
    """The tables of a job, and the location of every key in them. Line numbers are computed on request."""

    def __init__(self, path: str):
        self.path = path
        """The job file, as the user named it."""
        self.table: dict[str, Any] = {}
        self._sources: list[Source] = []
        self._origins: dict[KeyPath, Source] = {}

    def find(self, key: KeyPath) -> KeyLocation:
        """Return the location of a key. If the key is not set, return the location of the nearest table around it, or
        else of the job file."""
        for length in range(len(key), 0, -1):
            source = self._origins.get(key[:length])
            if source is not None:
                return KeyLocation(self._sources.index(source), *source.find(key))
        return KeyLocation(0, 0, self.path)

    def place(self, key: KeyPath) -> str:
        """Return the location of a key as text: `configs/job.toml:7`."""
        return self.find(key).text

    def is_given(self, key: KeyPath) -> bool:
        """Return True if a file or an override sets a key, so that its value is not a default."""
        return contains(self.table, key)

    def describe(self, problems: Iterable[Problem]) -> str:
        """Return the message for all problems of a job, in the order of its files, lines and overrides. If several
        problems end with the same `said_once`, only the first of them is shown with this text."""
        ordered = sorted(problems, key=lambda problem: self.find(problem.key))
        said: set[str] = set()
        lines = []
        for problem in ordered:
            line = self._line(problem)
            lines.append(line.removesuffix(problem.said_once) if problem.said_once in said else line)
            said.add(problem.said_once)
        return report(lines, self.path)

    def _line(self, problem: Problem) -> str:
        place, key = self.find(problem.key).text, shortened(format_key(problem.key), _MAX_KEY_LENGTH)
        if problem.value is UNSET:
            return f"{place}: {key}: {problem.reason}"
        if problem.value is None:  # TOML has no null
            return f"{place}: {key} (not set in the job): {problem.reason}"
        note = "" if self.is_given(problem.key) else " (default, not set in the job)"
        return f"{place}: {key} = {shortened(toml_value(with_urls(problem.value)))}{note}: {problem.reason}"


_MAX_KEY_LENGTH = 300


def contains(table: Mapping[str, Any], key: KeyPath) -> bool:
    """Return True if a table contains a value at the path `key`."""
    value: Any = table
    for part in key:
        known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
        if part not in known:
            return False
        value = value[part]
    return True


MOST_PROBLEMS = 100
"""Largest number of problems in a message."""


def report(lines: Sequence[str], subject: str) -> str:
    """Return the error message for problems. The message for one problem is one line. For several problems, it has a
    line with their number, and one line for each problem, at most `MOST_PROBLEMS`. `subject`: the job file or the
    command line."""
    if len(lines) == 1:
        return f"error: {lines[0]}"
    more = [f"and {len(lines) - MOST_PROBLEMS:,} more"] if len(lines) > MOST_PROBLEMS else []
    return "\n  ".join([f"error: {len(lines)} problems in {subject}", *lines[:MOST_PROBLEMS], *more])


def toml_value(value: Any) -> str:
    """Return a value in TOML, in one line; `null` for None, which TOML does not have."""
    if isinstance(value, Section):
        value = value.model_dump(mode="json", exclude_none=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return toml_string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{format_key((key,))} = {toml_value(item)}' for key, item in value.items())}}}"
    return "null" if value is None else str(value)
