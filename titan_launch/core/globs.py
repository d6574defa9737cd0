"""Globs for dotted paths of modules and parameters."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import translate


def matches(pattern: str, path: str) -> bool:
    """Return True if a glob matches a whole dotted path.

    `*`, `?` and `[...]` match within one segment. `**` matches zero or more whole segments: `**.norm` matches `norm`
    and `layers.0.norm`. `layers.*` matches `layers.0`, but not `layers.0.norm`.
    """
    return _matches(_segments(pattern), tuple(path.split(".")))


@functools.cache
def _segments(pattern: str) -> tuple[str, ...]:
    """Return the segments of a glob, with one `**` in place of several in sequence."""
    parts = pattern.split(".")
    return tuple(part for part, before in zip(parts, ["", *parts], strict=False) if (part, before) != ("**", "**"))


@functools.cache
def _matches(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    if not pattern:
        return not path
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_matches(rest, path[i:]) for i in range(len(path) + 1))
    return bool(path) and _segment(head).match(path[0]) is not None and _matches(rest, path[1:])


@functools.cache
def _segment(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))


def alike(paths: Iterable[str]) -> dict[str, int]:
    """Return the number of paths for each pattern. A pattern is a path with `*` in place of each number, such as
    `layers.*.norm`."""
    return Counter(re.sub(r"\b\d+\b", "*", path) for path in paths)
