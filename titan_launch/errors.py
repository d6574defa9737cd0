"""Errors a user can fix. The command line prints them as one message, once, and exits with status 2."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "UNSET", "__bool__": lambda self: False})()
"""Marks a problem that has no offending value (a missing key, for example)."""

KeyPath = tuple["str | int", ...]
"""A path into the job file, such as `("precision", "rules", 0, "match")`."""


class UserError(Exception):
    """Something the user can fix: the message says what is wrong and what to do. Exit status 2, no traceback."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a key of the job file.

    `reason` is a clause that can stand behind "key = value: "; it names the remedy where there is one.
    Where the key came from (file and line, or the command line) is looked up when the problem is printed.
    """

    key: KeyPath
    reason: str
    value: Any = UNSET


class ConfigError(UserError):
    """A job file that cannot be run; holds every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{format_key(p.key)}: {p.reason}" for p in self.problems))


def config_error(key: KeyPath, reason: str, value: Any = UNSET) -> ConfigError:
    """The error for a single problem, to be raised: `raise config_error(("data", "path"), "no such file", path)`."""
    return ConfigError([Problem(key, reason, value)])


def format_key(key: KeyPath) -> str:
    """`("precision", "rules", 0, "match")` as `precision.rules.0.match`, the form that overrides take."""
    return ".".join(map(str, key))


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean "steps"?`, or nothing when no candidate is near. Case is ignored."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f'; did you mean "{by_lower[near[0]]}"?' if near else ""
