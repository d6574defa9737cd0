"""The claims of a sentence about the job file: keys, values, options of commands, and features that do not exist.

Hints write each key of the job file in quotes, with its section: `use "compile.backend" = "eager"`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import tomli
from pydantic import ConfigDict, TypeAdapter, ValidationError

from titan_launch.cli import COMMANDS, command_module
from titan_launch.commands.parser import Parser
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.schema_walk import alternatives, choices, item_types, tables
from titan_launch.config.optimizers import ALGORITHMS
from titan_launch.config.sections.run import SINKS_WITH_PACKAGE
from titan_launch.core.errors import format_key
from titan_launch.models.architectures import ARCHITECTURES

FACTORY = "package.module:factory"


@cache
def keys() -> dict[str, list[Any]]:
    """Return the fields of every dotted key: several for a key of tables with a kind."""
    found: dict[str, list[Any]] = {name: [field] for name, field in JobConfig.model_fields.items()}
    sections = [(format_key(table.key), table.section) for table in tables(JobConfig)]
    sections += [("model.args", model.args) for model in ARCHITECTURES.values()]
    for header, section in sections:
        for name, field in section.model_fields.items():
            found.setdefault(f"{header}.{name}", []).append(field)
    return found


def strings(source: str) -> list[str]:
    """Return the strings in code without its docstrings, with `…` in place of inserted values."""
    nodes = list(ast.walk(ast.parse(source)))
    skipped = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    skipped |= {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    found = []
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            found.append(node.value)
    return found


def unquoted_keys(text: str) -> list[str]:
    """Return the dotted names without quotes whose section exists."""
    rest = re.sub(r'"[^"]*"|\[[^]]*\]', "", text)
    return [key for key in re.findall(r"\b\w+(?:\.\w+)+\b", rest) if key.partition(".")[0] in JobConfig.model_fields]


def wrong_keys(text: str) -> list[str]:
    """Return the quoted keys that do not exist, and the values that a key does not take."""
    quoted = re.findall(r'"([^" ]+\.[^" ]+)"', text)
    wrong = [key for key in quoted if key not in {*keys(), FACTORY}]
    headers = re.findall(r"\[\[?([a-z_.]+)\]", text)
    wrong += [header for header in headers if header not in {*keys(), "model.args"}]
    assigned = re.findall(r'"([\w.]+)" = (true|false|\[[^\]]*\]|"[^"]*"|[\d.]+)', text)
    wrong += [f"{key} = {value}" for key, value in assigned if not takes(key, tomli.loads(f"x = {value}")["x"])]
    words = re.findall(r'"([\w-]+)"', re.sub(r'"[\w.]+" = (?:\[[^\]]*\]|"[^"]*")', "", text))
    return wrong + [word for word in words if not any(takes(key, word) and _has_choices(key) for key in quoted)]


def takes(key: str, value: Any) -> bool:
    """Return True if a key takes a value, as far as its type says."""

    def is_taken(field: Any) -> bool:
        try:
            TypeAdapter(field.rebuild_annotation(), config=ConfigDict(strict=True)).validate_python(value)
        except ValidationError:
            return False
        return True

    return any(map(is_taken, keys().get(key, ())))


def _has_choices(key: str) -> bool:
    return any(choices(kind) for field in keys()[key] for kind in alternatives(field.annotation))


@cache
def parser_of(command: str) -> Parser:
    """Return the parser of a command."""
    parser = Parser(prog=f"titan-launch {command}")
    command_module(command).add_arguments(parser)
    return parser


def options_of(command: str) -> set[str]:
    """Return the options of a command, such as `--config`; none for a command that does not exist."""
    return {*parser_of(command)._option_string_actions} if command in COMMANDS else set()


OPTION = r"(?<![\w-])(--[a-z][\w-]*)(?![\w.-]*\.)"
"""An option, but no override of a key."""


def options_of_commands(text: str) -> Iterator[tuple[str, str]]:
    """Yield (command, option) for the options in a hint: `titan-launch export --dtype`, and the option --nnodes of
    `launch`. An option without a command has the command ""."""
    for option, commands in re.findall(OPTION + r"( of `\w+`(?: and `\w+`)*)?", text):
        before = re.findall(rf"titan-launch ([\w-]+) {option}", text)
        yield from ((command, option) for command in re.findall(r"`(\w+)`", commands) or before or [""])


def wrong_options(text: str) -> list[str]:
    """Return the options of a hint that their command does not have, and the commands that do not exist."""
    wrong = [f"{name} {option}" for name, option in options_of_commands(text) if option not in options_of(name)]
    return wrong + [name for name in re.findall(r"titan-launch ([\w-]+)", text) if name not in COMMANDS]


DENIAL = r"not supported|no counterpart|no effect|without effect|remove this key|does not exist"


@cache
def _vocabulary() -> dict[str, str]:
    """Return a key for each word in the names of keys, and in the values that they may have."""
    found: dict[str, str] = {}
    for key, fields in keys().items():
        names = [key.rpartition(".")[2]]
        for field in fields:
            kinds = alternatives(field.annotation)
            kinds += [item for kind in kinds for item in item_types(kind)]
            names += [str(choice) for kind in kinds for choice in choices(kind)]
        names += {"metrics.sinks": SINKS_WITH_PACKAGE, "optimizer.name": tuple(ALGORITHMS)}.get(key, ())
        for word in _words(" ".join(names)):
            found.setdefault(word, key)
    return found


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[a-z0-9]+", text.lower().replace("_", " ")) if len(word) > 3}


def _is_same(one: str, other: str) -> bool:
    """Return True for words with the same stem, such as `profiler` and `profiling`."""
    shorter = min(len(one), len(other))
    stem = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shorter)
    return one == other or (stem >= max(5, shorter - 3) and one.isalpha() and other.isalpha())


def denied_keys(text: str, name: str = "") -> dict[str, str]:
    """Return the words with which a text denies a feature that the job file has, each with the key of the feature.

    They are the words before the denial, or else those of `name`, the key of another tool that the text is about.
    """
    subjects = [clause[: found.start()] for clause in text.split(";") if (found := re.search(DENIAL, clause))]
    if not subjects:
        return {}
    section, _, last = name.rpartition(".")
    denied = _words(" ".join(subjects)) or _words(last if section in JobConfig.model_fields else name)
    return {word: key for word in sorted(denied) for known, key in _vocabulary().items() if _is_same(word, known)}
