"""Limits of the size and content of a job file. With these limits, a job file from somebody else can cause an error,
but cannot use up memory or time."""

from __future__ import annotations

from typing import Any

from titan_launch.core.errors import KeyPath
from titan_launch.core.files import MIB

MOST_BYTES = {".toml": MIB, ".json": 4 * MIB}
"""Largest size of a job file in bytes, by suffix. The `config.json` of a run with a model of 21,000 named classes has 2
MiB."""

MOST_VALUES = 100_000
"""Largest number of values in a job file."""

MOST_FILES = 100
"""Largest number of files of a job: the job file, and the files that it extends."""

MOST_DEPTH = 32
"""Largest depth of nested tables and arrays. The depth is limited because code that walks through a job is
recursive."""

MOST_ITEMS = 1_000
"""Largest number of items in an array. The number is limited because the items of some arrays, such as rules and globs,
are compared with each other or with all modules."""

MOST_PATHS = 10_000
"""Largest number of items in the `path` of a data source."""

MOST_KEY_LENGTH = 200

_INTEGERS = range(-(2**63), 2**63)
"""The range of TOML's integers."""


def outside_of_limits(value: Any, key: KeyPath = ()) -> tuple[KeyPath, str] | None:
    """Return (key, reason) of a value that is outside of the limits; None if all values are within the limits.

    The values are `value` and all values in its tables and arrays. If there are too many values, the returned key is
    (). `key`: path of `value`.
    """
    waiting, count = [(key, value)], 0
    while waiting:
        key, value = waiting.pop()
        if (count := count + 1) > MOST_VALUES:
            return (), f"has more than {MOST_VALUES:,} values, the limit of a job file"
        if reason := _why_outside(key, value):
            return key, reason
        if isinstance(value, dict):
            for name, item in value.items():
                if len(name) > MOST_KEY_LENGTH:
                    return key, f"has a key of {len(name):,} characters; a key must have at most {MOST_KEY_LENGTH}"
                if "\0" in name:
                    return key, "has a key with the character NUL; remove it"
                waiting.append(((*key, name), item))
        elif isinstance(value, list):
            waiting += [((*key, index), item) for index, item in enumerate(value)]
    return None


def _why_outside(key: KeyPath, value: Any) -> str | None:
    if len(key) > MOST_DEPTH:
        return f"is nested too deeply; a job has at most {MOST_DEPTH} nested tables and arrays"
    if isinstance(value, str) and "\0" in value:
        return "has the character NUL, which no name or path can have; remove it"
    if isinstance(value, int) and value not in _INTEGERS:
        return "must be a whole number from -2^63 to 2^63 - 1"
    if isinstance(value, list):
        most, remedy = (MOST_PATHS, "; use a glob") if key[-1:] == ("path",) else (MOST_ITEMS, "")
        return f"has {len(value):,} items; an array has at most {most:,}{remedy}" if len(value) > most else None
    return None
