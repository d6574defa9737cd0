"""Errors of a run, and their exit statuses. The command line prints each error once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from titan_launch.core.terminal import LONGEST_NAME, one_line, short_name


class _Unset:
    def __repr__(self) -> str:
        return "UNSET"

    def __bool__(self) -> bool:
        return False

    def __reduce__(self) -> str:
        return "UNSET"  # ranks exchange problems by pickle; UNSET stays a singleton


UNSET: Any = _Unset()
"""Value of a problem whose key has no value, such as a missing key."""

KeyPath = tuple["str | int", ...]
"""A path into the job file, such as `("precision", "rules", 0, "match")`."""


class UserError(Exception):
    """An error that the user can fix. The message says what is wrong and what to do. Exit status 2, no traceback."""


class RunError(Exception):
    """An error that ends a run after its start. The message gives the reason. Exit status 1, no traceback."""


class Stopped(Exception):  # noqa: N818 - a requested stop is not an error
    """The early end of a run after a signal. The message says what was saved."""

    def __init__(self, message: str, status: int):
        """`status`: exit status of the process; 0 if nothing is lost."""
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Problem:
    """One error in a key of the job file.

    `reason` is the text after "key = value: ". It says why the value is wrong and, if possible, what to write instead.
    The source of the key (file and line, or the command line) is looked up when the problem is printed.
    """

    key: KeyPath
    reason: str
    value: Any = UNSET
    also: tuple[KeyPath, ...] = ()
    """Other keys on which the problem depends. If one of these keys is wrong too, this problem may be a consequence."""

    said_once: str = ""
    """Last part of `reason`, such as a list of allowed keys. If several problems of a message have the same last part,
    this part is printed only once, with the first of these problems."""


class ConfigError(UserError):
    """Error with one or more problems of a job file."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(f"{format_key(p.key)}: {p.reason}" for p in self.problems))


def config_error(key: KeyPath, reason: str, value: Any = UNSET, also: tuple[KeyPath, ...] = ()) -> ConfigError:
    """Return the error for a single problem: `raise config_error(("data", "path"), "no such file", path)`."""
    return ConfigError([Problem(key, reason, value, also)])


def format_key(key: KeyPath) -> str:
    """Return `precision.rules.0.match` for `("precision", "rules", 0, "match")`: the form of keys in overrides. A part
    that is not a bare key of TOML, such as `a.b`, is quoted."""
    return ".".join(part if _BARE.fullmatch(part) else toml_string(part) for part in map(str, key))


def scalars(value: Any, key: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Yield (path, value) for each value in nested tables and arrays. `key`: path of `value` itself."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from scalars(inner, (*key, name))
    else:
        yield key, value


def leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each value in nested tables. Names in the keys are not quoted."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


_BARE = re.compile(r"[A-Za-z0-9_-]+")

_ESCAPED = re.compile("[\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that `json.dumps` does not escape: some control characters, line separators, changes of the direction of
text, and halves of surrogate pairs."""


def toml_string(text: str) -> str:
    """Return a TOML string in one line, with escapes in place of control characters."""
    import json  # the escapes of JSON are valid in TOML

    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", json.dumps(text, ensure_ascii=False))


def nearest_multiples(number: int, of: int) -> str:
    """Return the multiples of `of` below and above `number` as text: "8 or 16". The multiple 0 is omitted."""
    below, above = number // of * of, (number // of + 1) * of
    return f"{below} or {above}" if below else str(above)


_MOST_CANDIDATES = 10_000
"""Largest number of candidates that are compared with a misspelt word. A file from other people may have more names."""


def nearest(word: str, candidates: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the candidate that is most similar to a misspelt word. Case is ignored. Only the first 10,000 candidates
    are compared.

    Return None if no candidate has at least the similarity `similarity`, from 0 to 1 (`difflib`), or if the word has
    more than 200 characters.
    """
    import difflib  # imported here to save a millisecond of every start

    if len(word) > LONGEST_NAME:  # the comparison takes time in proportion to the product of the lengths
        return None
    by_lower = {candidate.lower(): candidate for candidate in islice(candidates, _MOST_CANDIDATES)}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=similarity)
    return by_lower[near[0]] if near else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return `; did you mean "steps"?`, or "" if no candidate is similar. Case is ignored."""
    near = nearest(word, candidates)
    return f'; did you mean "{one_line(near)}"?' if near else ""


def listed(names: Sequence[str], most: int = 3) -> str:
    """Return the first `most` names, and the number of further names: "a, b, c and 2 more". Control characters in names
    are escaped, and long names are cut."""
    shown = ", ".join(short_name(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
