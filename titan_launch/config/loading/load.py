"""Loading of a job from files and the command line into a checked configuration, without torch."""

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
    """Configuration of the run."""

    provenance: Provenance
    """Location of each key, for problems that are found later."""


def load_job(
    path: str,
    overrides: Sequence[str] = (),
    extra_rules: Sequence[Rule] = (),
    aliases: Mapping[str, str] | None = None,
) -> LoadedJob:
    """Read a job file (`.toml`, or the `config.json` of a run), apply the overrides, and check the configuration.

    `aliases`: short options and the keys that they set (`--device`: `--planner.device`). Messages show options as the
    user wrote them. Raises UserError with all problems: location, key, value, reason and remedy of each.
    """
    draft, problems = _merge_all(path, overrides, aliases)
    config, more = _parse(draft.table)
    problems += more
    problems += _check_rules(config, (*RULES, *extra_rules), problems)
    provenance = draft.provenance(path)
    if problems:
        raise UserError(provenance.describe(problems))
    return LoadedJob(config, provenance)


def dump_job(config: JobConfig) -> str:
    """Return a configuration as JSON with all defaults. `load_job` reads it back."""
    import json

    return json.dumps(config.model_dump(mode="json", exclude_none=True), indent=2, allow_nan=False) + "\n"


def _merge_all(path: str, overrides: Sequence[str], aliases: Mapping[str, str] | None) -> tuple[Draft, list[Problem]]:
    """Return the merged files and overrides of a job, and the problems of overrides that cannot be applied."""
    given = parse_overrides(overrides, aliases)
    draft = Draft()
    for file in read_job(path):
        draft.merge_file(file.table, file)
    problems: list[Problem] = []
    for override in given:
        try:
            draft.override(override)
        except ConfigError as error:
            problems += error.problems
    return draft, problems


def _parse(table: dict[str, Any]) -> tuple[JobConfig, list[Problem]]:
    """Return the configuration in a table, and the problems of the table.

    In the configuration, a wrong key has its default value, so that the rules can check the other keys.
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
    """Return a table with an empty table for each missing section, so that one validator validates all sections."""
    return _with_kinds({name: {} for name in JobConfig.model_fields} | dict(table), ())


def _with_kinds(table: Mapping[str, Any], key: KeyPath) -> dict[str, Any]:
    """Return a table in which every omitted `kind` has its default. Without the kind, pydantic does not know which keys
    are valid."""
    tag = {"kind": TAGGED[key].default} if key in TAGGED else {}
    inner = {name: _with_kinds(v, (*key, name)) if isinstance(v, dict) else v for name, v in table.items()}
    return tag | inner


def _without(table: Mapping[str, Any], problems: Iterable[Problem]) -> dict[str, Any]:
    """Return a table without its wrong keys."""
    rest = deepcopy(dict(table))
    for problem in problems:
        _remove(rest, problem.key)
    return rest


def _remove(table: dict[str, Any], key: KeyPath) -> None:
    """Remove a wrong key. For a missing required key, and for a wrong `kind`, remove the whole table.

    An array is removed as a whole: without one of its items, the indices of the later items would be wrong.
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


def _check_rules(config: JobConfig, rules: Iterable[Rule], known: Iterable[Problem]) -> list[Problem]:
    """Return the problems that the rules find, without those that may be consequences of the problems in `known`."""
    wrong = [key for problem in known for key in _keys_of(problem)]
    found = [problem for rule in rules for problem in rule(config)]
    return [p for p in found if not any(_overlap(a, b) for a in _keys_of(p) for b in wrong)]


def _keys_of(problem: Problem) -> tuple[KeyPath, ...]:
    return (problem.key, *problem.also)


def _overlap(one: KeyPath, other: KeyPath) -> bool:
    """Return True if the keys are equal, or if one of them is a table that contains the other."""
    length = min(len(one), len(other))
    return one[:length] == other[:length]
