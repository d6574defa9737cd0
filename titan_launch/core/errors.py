"""Errors a user can fix. The command line prints them as one message, once, and exits with status 2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "UNSET"  # problems travel between ranks, and there is one of it on each


UNSET: Any = _Unset()
"""Marks a problem that has no offending value (a missing key, for example)."""

KeyPath = tuple["str | int", ...]
"""A path into the job file, such as `("precision", "rules", 0, "match")`."""


class UserError(Exception):
    """Something the user can fix: the message says what is wrong and what to do. Exit status 2, no traceback."""


class RunError(Exception):
    """Why a run that was under way cannot go on, in a sentence. Exit status 1, no traceback."""


class Stopped(Exception):  # noqa: N818 - it is the end that was asked for
    """The run ended early because a signal asked for it; the message says what that means for what it did."""

    def __init__(self, message: str, status: int):
        """`status`: the process's exit status; 0 where nothing is lost."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a key of the job file.

    `reason` is a clause that can stand behind "key = value: "; it names the remedy where there is one.
    Where the key came from (file and line, or the command line) is looked up when the problem is printed.
    """

    key: KeyPath
    reason: str
    value: Any = UNSET
    also: tuple[KeyPath, ...] = ()
    """Other keys it depends on: when one of those is wrong itself, this problem may only follow from that one."""


class ConfigError(UserError):
    """A job file that cannot be run; holds every problem found, not only the first."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{format_key(p.key)}: {p.reason}" for p in self.problems))


def config_error(key: KeyPath, reason: str, value: Any = UNSET, also: tuple[KeyPath, ...] = ()) -> ConfigError:
    """The error for a single problem, to be raised: `raise config_error(("data", "path"), "no such file", path)`."""
    return ConfigError([Problem(key, reason, value, also)])


def format_key(key: KeyPath) -> str:
    """`("precision", "rules", 0, "match")` as `precision.rules.0.match`, the form that overrides take."""
    return ".".join(_format_key_part(str(part)) for part in key)


def _format_key_part(part: str) -> str:
    is_bare = part.isascii() and part.replace("_", "").replace("-", "").isalnum()
    return part if is_bare else f'"{part}"'


def nearest_multiples(number: int, of: int) -> str:
    """The multiples of `of` on both sides of a number, in words; of a small number the one above, since 0 is none."""
    below, above = number // of * of, (number // of + 1) * of
    return f"{below} or {above}" if below else str(above)


def nearest(word: str, candidates: Iterable[str], similarity: float = 0.6) -> str | None:
    """The candidate that a misspelt word most likely means, if any is near. Case is ignored."""
    import difflib  # only errors need it, and importing it takes a millisecond of every start

    by_lower = {candidate.lower(): candidate for candidate in candidates}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[near[0]] if near else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean "steps"?`, or nothing when no candidate is near. Case is ignored."""
    near = nearest(word, candidates)
    return f'; did you mean "{near}"?' if near else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """The first few of several names, and how many more there are."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
