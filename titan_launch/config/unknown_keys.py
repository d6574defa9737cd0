"""Which key somebody meant who wrote one that does not exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from titan_launch.config.architectures import ARCHITECTURES
from titan_launch.config.base import Section
from titan_launch.config.fields import TableSchema, tables
from titan_launch.config.job import JobConfig
from titan_launch.config.kinds import TAGGED
from titan_launch.errors import UNSET, KeyPath, Problem, format_key, nearest

_ARGS = ("model", "args")

_MOVED: dict[KeyPath, KeyPath] = {
    ("training", "dtype"): ("precision", "storage_dtype"),
    ("training", "mixed_precision_param"): ("precision", "param_dtype"),
    ("training", "mixed_precision_reduce"): ("precision", "reduce_dtype"),
    ("training", "dataset_path"): ("data", "path"),
    ("training", "gradient_accumulation_steps"): ("training", "global_batch_size"),
    ("validation", "steps"): ("validation", "max_samples"),
}
"""What TorchTitan's job files, and others', call something that is called otherwise here."""

_MAX_HOMES = 2
"""A key that more tables than this have, such as `name`, says nothing about which one was meant."""


def explain_unknown_key(key: KeyPath, value: Any, owner: type[Section] | None) -> Problem:
    """The problem of a key that `owner`, the section around it, does not have, with the most likely remedy."""
    is_table = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    noun = "section" if is_table and len(key) == 1 else "key"
    for remedy, meant in _remedies(key, owner):
        return Problem(key, f"unknown {noun}; {remedy}", UNSET if is_table else value, also=(meant,))
    return Problem(key, f"unknown {noun}; {_list_keys(key[:-1], owner)}", UNSET if is_table else value)


def _remedies(key: KeyPath, owner: type[Section] | None) -> Iterator[tuple[str, KeyPath]]:
    """What to do, the likeliest first, each with the key that was meant."""
    name, parent = str(key[-1]), key[:-1]
    if key in _MOVED:
        yield f'here it is "{format_key(_MOVED[key])}"', _MOVED[key]
    if kinds := _kinds_with(name, parent):
        yield f"only kind = {_any_of(kinds)} has it", (*parent, "kind")
    if parent == _ARGS and (models := _models_with(name)):
        yield f"it is an argument of {_any_of(models)}", ("model", "name")
    elif homes := _homes(name):
        yield f"it belongs in {_any_of(homes)}", (*next(iter(homes.values())), name)
    if near := nearest(name, owner.model_fields if owner else ()):
        yield f'did you mean "{format_key((*parent, near))}"?', (*parent, near)
    if far := _nearest_anywhere(name):
        yield f'did you mean "{format_key(far)}"?', far


def _models_with(argument: str) -> list[str]:
    return [f'"{name}"' for name, architecture in ARCHITECTURES.items() if argument in architecture.args.model_fields]


def _kinds_with(name: str, table: KeyPath) -> list[str]:
    kinds = TAGGED.get(table)
    return [f'"{kind}"' for kind, section in kinds.variants.items() if name in section.model_fields] if kinds else []


def _homes(name: str) -> dict[str, KeyPath]:
    """The tables that have such a key, by header."""
    homes = {table.header: table.key for table in _all_tables() if name in table.section.model_fields}
    return homes if len(homes) <= _MAX_HOMES else {}


def _nearest_anywhere(name: str) -> KeyPath | None:
    """A very similar key of any table; those in arrays have no path to suggest."""
    keys = {field: (*t.key, field) for t in _all_tables() if t.header[1] != "[" for field in t.section.model_fields}
    near = nearest(name, keys, similarity=0.8)
    return keys[near] if near else None


def _all_tables() -> Iterator[TableSchema]:
    yield from tables(JobConfig)
    for architecture in ARCHITECTURES.values():
        yield TableSchema("[model.args]", _ARGS, architecture.args)


def _list_keys(table: KeyPath, owner: type[Section] | None) -> str:
    known = ", ".join(owner.model_fields if owner else ())
    return f"{format_key(table)} has {known}" if table else f"the sections are {known}"


def _any_of(names: Iterable[str]) -> str:
    return " or ".join(names)
