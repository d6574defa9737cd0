"""Conversion of pydantic's validation errors to config problems, with remedies.

This module is imported only after a validation has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.foreign_keys import foreign_key
from titan_launch.config.loading.provenance import MOST_PROBLEMS, toml_value
from titan_launch.config.loading.schema_walk import TableSchema, kinds_of, locate, tables
from titan_launch.config.sections.section import Section
from titan_launch.core.errors import UNSET, KeyPath, Problem, format_key, nearest
from titan_launch.core.terminal import counted, shortened
from titan_launch.models.architectures import ARCHITECTURES


def translate(error: ValidationError, section: type[Section], table: KeyPath = ()) -> list[Problem]:
    """Return the problems in a validation error of `section`, at most `MOST_PROBLEMS`. `table`: path of the section in
    the job file."""
    found: dict[KeyPath, Problem] = {}
    in_unions: set[KeyPath] = set()
    for details in error.errors(include_url=False)[:MOST_PROBLEMS]:
        key, owner, in_union = locate(details["loc"], section)
        problem = _translate(details, (*table, *key), owner)
        if in_union:
            in_unions.add(problem.key)
        if problem.key in found:
            problem = _in_no_member(found[problem.key], problem)
        found[problem.key] = problem
    # If an item inside of a value has a problem, the value itself has the right type.
    around = {key[:length] for key in found for length in range(len(key))}
    return [problem for key, problem in found.items() if not (key in in_unions and key in around)]


def _in_no_member(one: Problem, other: Problem) -> Problem:
    """Merge the problems of one value for two members of a union: "must be a string or an array". The result has no
    remedy, because the members' remedies contradict each other."""
    reasons = [problem.reason.partition(";")[0] for problem in (one, other)]
    return Problem(one.key, f"{reasons[0]} or {reasons[1].removeprefix('must be ')}", one.value)


def _translate(details: ErrorDetails, key: KeyPath, owner: type[Section] | None) -> Problem:
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        return explain_unknown_key(key, value, owner)
    if kind == "missing":
        return Problem(key, "is required, but missing")
    if kind == "union_tag_invalid":
        choices = _listed(details, "expected_tags")
        return Problem((*key, "kind"), _one_of(choices, value["kind"]), value["kind"])
    return Problem(key, _reason(details, key), value)


def _reason(details: ErrorDetails, key: KeyPath) -> str:
    context, value = details.get("ctx", {}), details["input"]
    match details["type"]:
        case "literal_error":
            return _one_of(_listed(details, "expected"), value)
        case "value_error":
            return str(context["error"])
        case "model_type" | "model_attributes_type" | "dict_type" | "union_tag_not_found":
            foreign = None if isinstance(value, list) else foreign_key(key)
            return f"must be a table{f'; {foreign[0]}' if foreign else _brackets_hint(key, value)}"
        case "string_too_short":
            return "must not be empty; write a text, or remove this key"
        case "too_short":
            return f"must be an array with at least {counted(context['min_length'], 'value')}"
        case "tuple_type" if _is_array_of_tables(key):
            header = f"[{format_key(key)}]"
            return f"must be an array of tables; write [{header}]{f', not {header}' * isinstance(value, dict)}"
        case "tuple_type":
            return f"must be an array{'' if isinstance(value, dict) else f'; write [{shortened(toml_value(value))}]'}"
        case kind if kind in _TYPES:
            noun, hint = _TYPES[kind]
            return f"must be {noun}{hint(value)}"
        case kind if kind in _BOUNDS:
            name, words = _BOUNDS[kind]
            return f"must be {words} {context[name]:{'' if isinstance(context[name], int) else 'g'}}"
    return details["msg"][:1].lower() + details["msg"][1:]


def _one_of(choices: list[str], value: Any) -> str:
    known = ", ".join(f'"{choice}"' for choice in choices)
    similarity = 0.7  # 0.6 would suggest "cpu" for "gpu"
    near = nearest(value, choices, similarity) if isinstance(value, str) else None
    hint = f'; did you mean "{near}"?' if near else ""
    if value in _HALF and "bfloat16" in choices:
        hint = "; float16 needs loss scaling, which is not supported; use bfloat16"
    return f"must be {known}" if len(choices) == 1 else f"must be one of {known}{hint}"


def _listed(details: ErrorDetails, name: str) -> list[str]:
    """Return the choices that pydantic lists as `'a', 'b' or 'c'`."""
    return details["ctx"][name].split("'")[1::2]


def _number_hint(value: Any) -> str:
    """Return a hint for a number that is in quotes or has a decimal point; "" for any other value. The hint shows a
    whole number without a decimal point."""
    try:
        number = float(value) if isinstance(value, (str, float)) else None
    except ValueError:
        return ""
    if number is None or number in (float("inf"), float("-inf")) or number != number:
        return ""
    shown = str(int(number)) if number.is_integer() and abs(number) < 1e15 else str(number)
    return f"; write {shown}{', without quotes' if isinstance(value, str) else ''}"


def _whole_number_hint(value: Any) -> str:
    hint = _number_hint(value)
    return "" if "." in hint or re.search(r"\de", hint) else hint


def _bool_hint(value: Any) -> str:
    is_word = isinstance(value, str) and value.lower() in ("true", "false")
    return f"; write {value.lower()}, in lower case and without quotes" if is_word else ""


def _string_hint(value: Any) -> str:
    return "" if isinstance(value, (list, dict)) else f'; put it in quotes: "{shortened(toml_value(value))}"'


def _is_array_of_tables(key: KeyPath) -> bool:
    name = tuple(part for part in key if isinstance(part, str))
    return any(table.key == name and table.header.startswith("[[") for table in _all_tables())


def _brackets_hint(key: KeyPath, value: Any) -> str:
    name = format_key(key)
    if not isinstance(key[-1], str):
        return ""
    if isinstance(value, list):
        return f"; write [{name}], not [[{name}]]"
    return f"; write the header [{name}] and the keys below it"


_HALF = ("float16", "fp16", "half")
_TYPES: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "int_type": ("a whole number", _whole_number_hint),
    "float_type": ("a number", _number_hint),
    "finite_number": ("a finite number", lambda value: ""),
    "bool_type": ("true or false", _bool_hint),
    "string_type": ("a string", _string_hint),
}
_BOUNDS: Mapping[str, tuple[str, str]] = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


_ARGS = ("model", "args")

_MAX_TABLES = 2
"""Largest number of tables that a hint for a misplaced key names. If more tables have the key, there is no hint."""

_SINGLE_WORDS = {"beta1", "beta2", "eps", "flavor", "lr", "mfu", "nesterov", "rounding", "shuffle", "steps"}
"""Names without an underscore that have the same meaning in every table. All other names without an underscore (`path`,
`enable`) have several meanings, so no hint names the tables that have such a key."""

_SIMILARITY, _SIMILARITY_ELSEWHERE = 0.78, 0.88
"""Minimum similarity of a misspelt key to a key of its table, and to a key of another table."""


def explain_unknown_key(key: KeyPath, value: Any, owner: type[Section] | None) -> Problem:
    """Return the problem of an unknown key, with the likeliest remedy. Without a remedy, the problem lists the known
    keys. `owner`: the section that contains the key; None if there is none."""
    is_table = isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))
    what = "unknown section" if is_table and len(key) == 1 else "unknown key"
    for remedy, meant in _remedies(key, owner):
        return Problem(key, f"{what}; {remedy}", UNSET if is_table else value, also=tuple(meant))
    of_table = f"{format_key(key[:-1])} has" if key[:-1] else "the sections are"
    known = f"; {of_table} {', '.join(owner.model_fields if owner else ())}"
    return Problem(key, f"{what}{known}", UNSET if is_table else value, said_once=known)


def _remedies(key: KeyPath, owner: type[Section] | None) -> Iterator[tuple[str, Sequence[KeyPath]]]:
    """Yield (remedy, keys) for an unknown key, the likeliest remedy first. `keys`: the keys that the user may have
    meant."""
    name, parent = str(key[-1]), key[:-1]
    variants = kinds.variants if (kinds := kinds_of(parent)) else {}
    if having := [f'"{kind}"' for kind, section in variants.items() if name in section.model_fields]:
        yield f"only kind = {' or '.join(having)} has this key", [(*parent, "kind")]
    models = [f'"{model}"' for model, row in ARCHITECTURES.items() if name in row.args.model_fields]
    if parent == _ARGS and models:
        yield f"only model.name = {' or '.join(models)} has this argument", [("model", "name")]
    if foreign := foreign_key(key):
        yield foreign
    if found := _tables_with(name):
        yield f"it belongs in {' or '.join(found)}", [(*table, name) for table in found.values()]
    if near := nearest(name, owner.model_fields if owner else (), _SIMILARITY):
        yield f'did you mean "{format_key((*parent, near))}"?', [(*parent, near)]
    if far := _nearest_anywhere(name):
        yield f'did you mean "{format_key(far)}"?', [far]


def key_without_its_section(name: str) -> str | None:
    """Return the remedy for a command-line key that is given without its section; None if no remedy is known."""
    if foreign := foreign_key((name,)):
        return foreign[0]
    keys = [f'"--{format_key((*table, name))}"' for table in _tables_with(name).values()]
    return f"did you mean {' or '.join(keys)}?" if keys else None


def _tables_with(name: str) -> dict[str, KeyPath]:
    """Return the path of each table that has a key with this name, by the header of the table. Return an empty dict if
    the name is not specific, or if more than `_MAX_TABLES` tables have the key."""
    found = {table.header: table.key for table in _all_tables() if name in table.section.model_fields}
    return found if _is_specific(name) and len(found) <= _MAX_TABLES else {}


def _nearest_anywhere(name: str) -> KeyPath | None:
    """Return the path of the key whose name is most similar to `name`, among the keys of all tables. Return None if no
    key is similar enough, or if several tables have the most similar key. Keys in arrays of tables are not searched,
    because they have no fixed path."""
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
