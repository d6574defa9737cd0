"""Where every key of a job was given: in a line of a file, or on the command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from titan_launch.errors import KeyPath


class Place(NamedTuple):
    """Where a key was given. Places sort as they were read: files, lines, then the command line."""

    source: int
    line: int
    text: str
    """`configs/job.toml:7`, or `command line: --training.steps=20`."""


class Source(Protocol):
    """A file or an override, laid over those before it."""

    def find(self, key: KeyPath) -> tuple[int, str]:
        """The line of a key, or of the nearest table around it (0 where there is none), and the place in words."""


class Provenance:
    """The place of every key of a loaded job. Lines are looked for only when somebody asks."""

    def __init__(
        self, path: str, table: Mapping[str, Any], origins: Mapping[KeyPath, Source], sources: Sequence[Source]
    ):
        self.path = path
        """The job file, as the user named it."""
        self._table, self._origins, self._sources = table, origins, sources

    def find(self, key: KeyPath) -> Place:
        """Where a key was given; for a key that was not given, where the nearest table around it was."""
        for length in range(len(key), 0, -1):
            source = self._origins.get(key[:length])
            if source is not None:
                return Place(self._sources.index(source), *source.find(key))
        return Place(0, 0, self.path)

    def place(self, key: KeyPath) -> str:
        """The same in words: `configs/job.toml:7`."""
        return self.find(key).text

    def is_given(self, key: KeyPath) -> bool:
        """Whether a key was written somewhere, so that its value is not a default."""
        return contains(self._table, key)


def contains(table: Mapping[str, Any], key: KeyPath) -> bool:
    """Whether a key is in a table, or in the tables and arrays in it."""
    value: Any = table
    for part in key:
        known = range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ()
        if part not in known:
            return False
        value = value[part]
    return True
