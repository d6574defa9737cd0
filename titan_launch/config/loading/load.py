"""From a job file and the command line to a checked configuration, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.files import read_job
from titan_launch.config.loading.merge import Draft, parse_overrides
from titan_launch.config.loading.provenance import Provenance, contains
from titan_launch.config.loading.schema_walk import TAGGED
from titan_launch.config.rules import RULES, Rule
from titan_launch.core.errors import ConfigError, KeyPath, Problem, UserError


@dataclass(frozen=True)
class LoadedJob:
    """A job that has passed every check."""

    config: JobConfig
    """What to run."""

    provenance: Provenance
    """Where each key was given, for problems that are found later."""


def load_job(
    path: str,
    overrides: Sequence[str] = (),
    extra_rules: Sequence[Rule] = (),
    aliases: Mapping[str, str] | None = None,
) -> LoadedJob:
    """Read a job file (`.toml`, or the `config.json` of a run), lay the overrides over it, and check everything.

    `aliases`: options that stand for overrides (`--device` for `--planner.device`), which messages show as given.
    Raises UserError whose text is complete: every problem, with its place, key, value and remedy.
    """
    draft, problems = _lay_out(path, overrides, aliases)
    config, more = _parse(draft.table)
    problems += more
    problems += _judge(config, (*RULES, *extra_rules), problems)
    provenance = draft.provenance(path)
    if problems:
        raise UserError(provenance.describe(problems))
    return LoadedJob(config, provenance)


def dump_job(config: JobConfig) -> str:
    """A configuration as JSON that `load_job` reads back, complete with all defaults."""
    import json

    return json.dumps(config.model_dump(mode="json", exclude_none=True), indent=2, allow_nan=False) + "\n"


def _lay_out(path: str, overrides: Sequence[str], aliases: Mapping[str, str] | None) -> tuple[Draft, list[Problem]]:
    """The files and overrides of a job, laid over each other, and the overrides that do not fit."""
    given = parse_overrides(overrides, aliases)
    draft = Draft()
    for file in read_job(path):
        draft.lay(file.table, file)
    problems: list[Problem] = []
    for override in given:
        try:
            draft.override(override)
        except ConfigError as error:
            problems += error.problems
    return draft, problems


def _parse(table: dict[str, Any]) -> tuple[JobConfig, list[Problem]]:
    """The configuration in a table, and what is wrong with it.

    Wrong keys are left out of the configuration, so that the rules can still judge the rest of it.
    """
    try:
        return JobConfig.model_validate(_complete(table)), []
    except ValidationError as error:
        from titan_launch.config.loading.validation_errors import translate

        problems = translate(error, JobConfig)
    rest = _without(table, problems)
    config, more = _parse(rest) if rest != table else (JobConfig(), [])
    return config, problems + more


def _complete(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with every section, empty if need be: then one validator does all the work."""
    return _with_kinds({name: {} for name in JobConfig.model_fields} | dict(table), ())


def _with_kinds(table: Mapping[str, Any], key: KeyPath) -> dict[str, Any]:
    """The table with every kind that was left out: without it, pydantic cannot tell what keys to expect."""
    tag = {"kind": TAGGED[key].default} if key in TAGGED else {}
    inner = {name: _with_kinds(v, (*key, name)) if isinstance(v, dict) else v for name, v in table.items()}
    return tag | inner


def _without(table: Mapping[str, Any], problems: Iterable[Problem]) -> dict[str, Any]:
    """The table without its wrong keys."""
    rest = deepcopy(dict(table))
    for problem in problems:
        _remove(rest, problem.key)
    return rest


def _remove(table: dict[str, Any], key: KeyPath) -> None:
    """Take out a key, or the table that it is missing from, or whose kind it is.

    An array goes as a whole: without one of them, the other items would answer to wrong indices.
    """
    is_kind = key[-1] == "kind" and key[:-1] in TAGGED
    if is_kind or not contains(table, key):
        key = key[:-1]
    while key and isinstance(key[-1], int):
        key = key[:-1]
    if key and contains(table, key):
        container: Any = table
        for part in key[:-1]:
            container = container[part]
        del container[key[-1]]


def _judge(config: JobConfig, rules: Iterable[Rule], known: Iterable[Problem]) -> list[Problem]:
    """What the rules find, save for what may only follow from problems that are known already."""
    wrong = [key for problem in known for key in _concerned(problem)]
    found = [problem for rule in rules for problem in rule(config)]
    return [p for p in found if not any(_overlap(a, b) for a in _concerned(p) for b in wrong)]


def _concerned(problem: Problem) -> tuple[KeyPath, ...]:
    return (problem.key, *problem.also)


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    """Whether one key is the other, or in it."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]
