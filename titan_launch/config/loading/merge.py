"""Merging of job files and command-line overrides (`--section.key=value`) into one table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tomli

from titan_launch.config.loading.job_files import FolderFile, JobFile
from titan_launch.config.loading.limits import MOST_DEPTH, MOST_KEY_LENGTH, outside_of_limits
from titan_launch.config.loading.provenance import Provenance, Source, contains, report, toml_value
from titan_launch.config.loading.schema_walk import kinds_of
from titan_launch.core.errors import ConfigError, KeyPath, Problem, UserError, config_error, format_key
from titan_launch.core.terminal import shortened

_MAX_TEXT_LENGTH = 300
_NOT_AN_OVERRIDE = "is not an override; overrides have the form --section.key=value"


@dataclass(frozen=True, eq=False)
class Override:
    """One key that is set on the command line."""

    text: str
    """The override as the user wrote it."""

    key: tuple[str, ...]
    """Path of the key. Indices of arrays are still strings of digits."""

    value: Any

    def find(self, key: KeyPath) -> tuple[int, str]:
        """Return (0, location as text) for any key: an override has no line, and its location shows `text`."""
        return 0, f"command line: {shortened(self.text, _MAX_TEXT_LENGTH)}"

    @property
    def sets_kind(self) -> bool:
        """True if the override may change which other keys are valid."""
        return self.key[-1] == "kind" or (isinstance(self.value, dict) and "kind" in self.value)


def parse_overrides(arguments: Sequence[str], aliases: Mapping[str, str] | None = None) -> list[Override]:
    """Read overrides of the forms `--section.key=value`, `--section.key value` and `--section.flag` (sets the key to
    true).

    `aliases`: short options, each with the option that it stands for (`--device`: `--planner.device`). Overrides that
    set a `kind` come first in the result, so that the order on the command line does not matter. Raises UserError,
    which lists all arguments that are not valid overrides.
    """
    overrides, problems = [], []
    for text, name, value in _split(arguments):
        try:
            key = _parse_key((aliases or {}).get(name, name))
            parsed = True if value is None else parse_value(value)
            if len(key) > MOST_DEPTH or max(map(len, key)) > MOST_KEY_LENGTH:
                raise ValueError(f"a key has at most {MOST_DEPTH} parts, each of at most {MOST_KEY_LENGTH} characters")
            if found := outside_of_limits(parsed, key):
                raise ValueError(found[1])
            overrides.append(Override(text, key, parsed))
        except ValueError as error:
            problems.append(f"command line: {shortened(text, _MAX_TEXT_LENGTH)}: {error}")
    if problems:
        raise UserError(report(problems, "the command line"))
    return sorted(overrides, key=lambda override: not override.sets_kind)


def _split(arguments: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """Yield (text, name, value) for each override in the arguments. The value is None for `--section.flag`."""
    rest = list(arguments)
    while rest:
        text = rest.pop(0)
        name, has_value, value = text.partition("=")
        if has_value:
            yield text, name, value
        elif name.startswith("--") and rest and not rest[0].startswith("--"):
            yield f"{text} {rest[0]}", name, rest.pop(0)
        else:
            yield text, name, None


def _parse_key(name: str) -> tuple[str, ...]:
    if not name.startswith("--"):
        remedy = f"; write --{name}=..." if "." in name and not name.startswith("-") else ""
        raise ValueError(f"{_NOT_AN_OVERRIDE}{remedy}")
    key = _split_key(name[2:])
    if key[0] == "extends":
        raise ValueError("extends cannot be set on the command line; set it in the file that --config names")
    return key


def _split_key(name: str) -> tuple[str, ...]:
    """Return the parts of a dotted key, which may be quoted as in TOML. Raises ValueError for a text that is no key."""
    if '"' not in name and "'" not in name and all(name.split(".")):
        return tuple(name.split("."))
    try:
        table = tomli.loads(f"{name} = 0")
    except (tomli.TOMLDecodeError, RecursionError):
        raise ValueError(_NOT_AN_OVERRIDE) from None
    parts = []
    while isinstance(table, dict):
        ((part, table),) = table.items()
        parts.append(part)
    return tuple(parts)


def parse_value(text: str) -> Any:
    """Parse a TOML value. Text that is not TOML is returned as a string, so most strings need no quotes.

    Raises ValueError for a table or an array that is not valid TOML, for a value that is nested too deeply, and for a
    number with too many digits.
    """
    try:
        table = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError as error:
        if text.lstrip().startswith(("{", "[")):
            reason = str(error).partition(" (at ")[0]
            hint = "; write strings in quotes" if reason == "Invalid value" else ""
            raise ValueError(f"not valid TOML: {reason}{hint}") from None
        return text
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except ValueError:
        raise ValueError("a number has thousands of digits; write a shorter number") from None
    return table["value"] if len(table) == 1 else text


_ALTERNATIVES: Mapping[KeyPath, str] = {("training", "steps"): "epochs", ("training", "epochs"): "steps"}
"""Keys of which a job sets only one: the path of each key, with the name of the other key in the same table."""


class Draft(Provenance):
    """The merged files and overrides of a job. Tables are merged key by key; other values are replaced."""

    def __init__(self, path: str, files: Iterable[JobFile | FolderFile], overrides: Iterable[Override]):
        super().__init__(path)
        self.problems: list[Problem] = []
        """Problems of the overrides that cannot be applied, and of steps after the merge."""
        for file in files:
            self._sources.append(file)
            self._merge(self.table, file.table, (), file)
        for override in overrides:
            self._sources.append(override)
            try:
                self._set(override)
            except ConfigError as error:
                self._origins.update({problem.key: override for problem in error.problems})
                self.problems += error.problems

    def _set(self, override: Override) -> None:
        """Set the key of an override. Raises ConfigError for a wrong index, and for a key below a value that is neither
        a table nor an array (`training.steps.max`)."""
        container: Any = self.table
        key: KeyPath = ()
        for part, following in pairwise((*override.key, "")):
            name = _name_in(container, part, (*key, part))
            key = (*key, name)
            if following:
                container = self._enter(container, name, key, following, override)
            elif isinstance(container, dict):
                self._merge(container, {str(name): override.value}, key[:-1], override)
            else:
                self._put(container, name, override.value, key, override)

    def _merge(self, table: dict[str, Any], new: Mapping[str, Any], key: KeyPath, source: Source) -> None:
        # If `new` changes the kind of the table, remove keys that the new kind lacks or gives another meaning.
        if kinds := kinds_of(key):
            for name in kinds.dropped_keys(table, new):
                self._forget((*key, name), table.pop(name))
        self._drop_alternatives(table, new, key, source)
        for name, value in new.items():
            self._put(table, name, value, (*key, name), source)

    def _drop_alternatives(self, table: dict[str, Any], new: Mapping[str, Any], key: KeyPath, source: Source) -> None:
        """If `new` sets one of two alternative keys, and an earlier file has set the other key, remove the other key.
        If one file, or the command line, sets both keys, both stay, and a rule reports the contradiction."""
        for name in new:
            other = _ALTERNATIVES.get((*key, name))
            if other not in table or other in new:
                continue
            if not (isinstance(source, Override) and isinstance(self._origins.get((*key, other)), Override)):
                self._forget((*key, other), table.pop(other))

    def _put(self, container: Any, name: str | int, value: Any, key: KeyPath, source: Source) -> None:
        """Set `container[name] = value`. The index after the last item of an array appends an item. A table is merged
        into an existing table."""
        if isinstance(container, list) and name == len(container):
            container.append(None)
        old = container[name] if contains(container, (name,)) else None
        if isinstance(value, dict):
            if not isinstance(old, dict):
                self._forget(key, old)
                old = container[name] = {}
            self._merge(old, value, key, source)
        else:
            self._forget(key, old)
            container[name] = value
        self._origins[key] = source

    def _enter(self, container: Any, name: str | int, key: KeyPath, following: str, source: Source) -> Any:
        """Return the table or array at `key`. If it does not exist, create it: an array if `following`, the next part
        of the key, is an index, otherwise a table."""
        if not contains(container, (name,)):
            self._put(container, name, [] if following.isdecimal() else {}, key, source)
        inside = container[name]
        if not isinstance(inside, (dict, list)):
            reason = f"{format_key(key)} is {toml_value(inside)}, not a table or an array; set {format_key(key)} itself"
            raise config_error((*key, following), reason)
        return inside

    def _forget(self, key: KeyPath, value: Any) -> None:
        """Remove the recorded source of `key`, and the sources of all keys in its old value `value`."""
        self._origins.pop(key, None)
        names = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        for name in names:
            self._forget((*key, name), value[name])


def _name_in(container: Any, part: str, key: KeyPath) -> str | int:
    """Return `part` of an override's key as Python needs it: a string if `container` is a table, an integer index if
    `container` is an array. Raises ConfigError for a wrong index."""
    if isinstance(container, dict):
        return part
    if part.isdecimal() and len(part) < 10 and int(part) <= len(container):
        return int(part)
    wrong = "" if part.isdecimal() else f'"{part}" is not an index; '
    raise config_error(key, wrong + _index_reason(format_key(key[:-1]), len(container)))


def _index_reason(array: str, length: int) -> str:
    if not length:
        return f"{array} is empty; use index 0 to append the first item"
    items = "item 0" if length == 1 else f"items 0 to {length - 1}"
    return f"{array} has only {items}; use index {length} to append an item"
