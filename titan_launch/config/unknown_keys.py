"""The remedy for a key that does not exist: the key that was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from titan_launch.config.architectures import ARCHITECTURES
from titan_launch.config.base import Section
from titan_launch.config.fields import TableSchema, tables
from titan_launch.config.foreign_keys import foreign_key
from titan_launch.config.job import JobConfig
from titan_launch.config.kinds import TAGGED
from titan_launch.errors import UNSET, KeyPath, Problem, format_key, nearest

_ARGS = ("model", "args")

_MAX_HOMES = 2
"""A key that more tables than this have says nothing about which table was meant."""

_SINGLE_WORDS = {"beta1", "beta2", "eps", "flavor", "lr", "mfu", "nesterov", "rounding", "shuffle", "steps"}
"""Names without an underscore that mean the same in any table. Others, such as `path` or `enable`, do not."""

_SIMILARITY, _SIMILARITY_ELSEWHERE = 0.78, 0.88
"""Least similarity of a misspelt key to a key of its table, and to a key of another table."""


def explain_unknown_key(key: KeyPath, value: Any, owner: type[Section] | None) -> Problem:
    """The problem of a key that `owner`, the section around it, does not have, with the most likely remedy."""
    is_table = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    noun = "section" if is_table and len(key) == 1 else "key"
    for remedy, meant in _remedies(key, owner):
        return Problem(key, f"unknown {noun}; {remedy}", UNSET if is_table else value, also=tuple(meant))
    return Problem(key, f"unknown {noun}; {_list_keys(key[:-1], owner)}", UNSET if is_table else value)


def _remedies(key: KeyPath, owner: type[Section] | None) -> Iterator[tuple[str, Sequence[KeyPath]]]:
    """Yield remedies, the likeliest first, each with the keys that were meant."""
    name, parent = str(key[-1]), key[:-1]
    if kinds := _kinds_with(name, parent):
        yield f"only kind = {_any_of(kinds)} has it", [(*parent, "kind")]
    if parent == _ARGS and (models := _models_with(name)):
        yield f"it is an argument of {_any_of(models)}", [("model", "name")]
    if foreign := foreign_key(key):
        yield foreign
    if homes := _homes(name):
        yield f"it belongs in {_any_of(homes)}", [(*home, name) for home in homes.values()]
    if near := nearest(name, owner.model_fields if owner else (), _SIMILARITY):
        yield f'did you mean "{format_key((*parent, near))}"?', [(*parent, near)]
    if far := _nearest_anywhere(name):
        yield f'did you mean "{format_key(far)}"?', [far]


def _models_with(argument: str) -> list[str]:
    return [f'"{name}"' for name, architecture in ARCHITECTURES.items() if argument in architecture.args.model_fields]


def _kinds_with(name: str, table: KeyPath) -> list[str]:
    kinds = TAGGED.get(table)
    return [f'"{kind}"' for kind, section in kinds.variants.items() if name in section.model_fields] if kinds else []


def _homes(name: str) -> dict[str, KeyPath]:
    """The tables that have such a key, by header, if the name says enough."""
    homes = {table.header: table.key for table in _all_tables() if name in table.section.model_fields}
    return homes if _is_specific(name) and len(homes) <= _MAX_HOMES else {}


def _nearest_anywhere(name: str) -> KeyPath | None:
    """A very similar key of another table. (Keys in arrays have no path to suggest; keys of several are ambiguous.)"""
    keys: dict[str, list[KeyPath]] = {}
    for table in _all_tables():
        for field in table.section.model_fields if table.header[1] != "[" else ():
            keys.setdefault(field, []).append((*table.key, field))
    near = nearest(name, filter(_is_specific, keys), _SIMILARITY_ELSEWHERE)
    paths = set(keys[near]) if near else set()
    return paths.pop() if len(paths) == 1 else None


def _is_specific(name: str) -> bool:
    return "_" in name or name in _SINGLE_WORDS


def _all_tables() -> Iterator[TableSchema]:
    yield from tables(JobConfig)
    for architecture in ARCHITECTURES.values():
        yield TableSchema("[model.args]", _ARGS, architecture.args)


def _list_keys(table: KeyPath, owner: type[Section] | None) -> str:
    known = ", ".join(owner.model_fields if owner else ())
    return f"{format_key(table)} has {known}" if table else f"the sections are {known}"


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(names)
