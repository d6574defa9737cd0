"""`--section.key=value`: the keys of a job that the command line overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tomli

from titan_launch.config.explain import report
from titan_launch.errors import KeyPath, UserError


class Override:
    """One key, given on the command line."""

    def __init__(self, text: str, key: tuple[str, ...], value: Any):
        self.text = text
        """As the user wrote it."""
        self.key = key
        """Its path; items of arrays are still strings of digits."""
        self.value = value

    def find(self, key: KeyPath) -> tuple[int, str]:
        """No line, and the place in words."""
        return 0, f"command line: {self.text}"

    @property
    def sets_kind(self) -> bool:
        """Whether it may change which other keys there are."""
        return self.key[-1] == "kind" or (isinstance(self.value, dict) and "kind" in self.value)


def parse_overrides(arguments: Sequence[str], aliases: Mapping[str, str] | None = None) -> list[Override]:
    """Read `--section.key=value`, `--section.key value` and `--section.flag` (which means true).

    `aliases`: short names of options, and the dotted keys they stand for (`--device`: `--planner.device`). Overrides
    that set a `kind` come first, so that the order on the command line does not matter. Raises UserError, complete,
    with everything that is not an override.
    """
    overrides, problems = [], []
    for text, name, value in _split(arguments):
        try:
            key = _parse_key((aliases or {}).get(name, name))
            overrides.append(Override(text, key, True if value is None else parse_value(value)))
        except ValueError as error:
            problems.append(f"command line: {text}: {error}")
    if problems:
        raise UserError(report(problems, "the command line"))
    return sorted(overrides, key=lambda override: not override.sets_kind)


def _split(arguments: Sequence[str]) -> Iterator[tuple[str, str, str | None]]:
    """The overrides among the arguments: each in full, its name, and its value if it has one."""
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
        raise ValueError(f"not an override, which has the form --section.key=value{remedy}")
    key = _split_key(name[2:])
    if key[0] == "extends":
        raise ValueError("only job files extend others; write it into the file that --config names")
    return key


def _split_key(name: str) -> tuple[str, ...]:
    """The parts of a dotted key, which may be quoted as in TOML."""
    if '"' not in name and "'" not in name and all(name.split(".")):
        return tuple(name.split("."))
    try:
        table = tomli.loads(f"{name} = 0")
    except tomli.TOMLDecodeError:
        raise ValueError("not an override, which has the form --section.key=value") from None
    parts = []
    while isinstance(table, dict):
        ((part, table),) = table.items()
        parts.append(part)
    return tuple(parts)


def parse_value(text: str) -> Any:
    """A value in TOML; what is not TOML is a string, so that most strings need no quotes.

    Raises ValueError for a table or an array that does not end well.
    """
    try:
        table = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError as error:
        if text.lstrip().startswith(("{", "[")):
            raise ValueError(f"not TOML: {str(error).partition(' (at ')[0]}") from None
        return text
    return table["value"] if len(table) == 1 else text
