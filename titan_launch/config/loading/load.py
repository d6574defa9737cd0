"""Loading of a job from files and the command line into a checked configuration, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.job_files import FolderFile, read_job
from titan_launch.config.loading.merge import Draft, parse_overrides
from titan_launch.config.loading.provenance import MOST_PROBLEMS, Provenance, contains
from titan_launch.config.loading.schema_walk import kinds_of
from titan_launch.config.loading.urls import has_copies, with_local_copies
from titan_launch.config.rules import RULES, Rule
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.core.errors import ConfigError, KeyPath, Problem, UserError, config_error, did_you_mean
from titan_launch.core.import_string import FOLDERS_CHOOSE_NO_CODE
from titan_launch.core.object_store import with_urls


@dataclass(frozen=True)
class LoadedJob:
    """A job that has passed the checks of `load_job`."""

    config: JobConfig
    """Configuration of the run."""

    provenance: Provenance
    """Location of each key, for problems that are found later."""


def load_job(
    path: str | None,
    overrides: Sequence[str] = (),
    rules: Sequence[Rule] = RULES,
    aliases: Mapping[str, str] | None = None,
) -> LoadedJob:
    """Read a job file (`.toml`, or the `config.json` of a run), apply the overrides, copy the files at URLs, and check
    the configuration.

    `path`: None if the job consists only of overrides. `rules`: the rules that are checked. `aliases`: see
    `parse_overrides`. Messages show options as the user wrote them. Raises UserError with all problems: location, key,
    value, reason and remedy of each.
    """
    draft = _merge_all(path, overrides, aliases)
    config, wrong = _parse(draft.table)
    problems = draft.problems + wrong
    problems += _check_rules(config, rules, problems)
    if problems:
        raise UserError(draft.describe(problems))
    return LoadedJob(config, draft)


def dump_job(config: JobConfig) -> str:
    """Return a configuration as JSON with all defaults except None, and with URLs in place of their local copies.
    `load_job` can read this JSON as a job file."""
    import json

    table = with_urls(config.model_dump(mode="json", exclude_none=True))
    return json.dumps(table, indent=2, allow_nan=False) + "\n"


def _merge_all(path: str | None, overrides: Sequence[str], aliases: Mapping[str, str] | None) -> Draft:
    """Return the merged files and overrides of a job. Its problems are overrides that cannot be applied, URLs that
    cannot be copied, and problems of the model's folder (see `_model_of_folder`).

    For a job with URLs, raises UserError for wrong keys or values before anything is copied.
    """
    given, files = parse_overrides(overrides, aliases), read_job(path) if path else []
    subject = path or "the command line"
    draft = Draft(subject, files, given)
    if has_copies(draft.table):
        # Overrides of `model.args` may look wrong only because the model's folder is not read yet.
        wrong = [problem for problem in draft.problems if problem.key[:2] != ("model", "args")]
        wrong += _parse(draft.table)[1]
        if wrong:
            raise UserError(draft.describe(wrong))
    draft.table, unavailable = with_local_copies(draft.table)
    if unavailable:
        draft.problems += unavailable
        return draft
    try:
        if folder := _model_of_folder(draft.table.get("model")):
            local = draft.table
            draft = Draft(subject, [folder, *files], given)
            own = {name: local["model"][name] for name in ("path", "weights") if name in local["model"]}
            draft.table = {**local, "model": {**draft.table["model"], **own}}
    except ConfigError as error:
        draft.problems += error.problems
    return draft


def _model_of_folder(model: Any) -> FolderFile | None:
    """Return the keys of `[model]` from the `config.json` of the model's folder, as a file that the job files override.
    Return None if the job names no such folder, or needs no keys from it. Raises ConfigError for an unusable folder."""
    if not isinstance(model, dict):
        return None
    return _class_of_folder(model) if model.get("name") == HUGGINGFACE else _model_of_weights(model)


_WITHOUT_EFFECT = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "use_cache")
"""Keys of a `config.json` that are not passed to a class of `transformers`. The launcher chooses the dtypes and the
cache. The other keys do not change the model."""

_OVERRIDES = {"architectures": (), "num_labels": ("id2label", "label2id")}
"""Keys that a job may set in `[model.args]` although `config.json` does not have them, each with the keys of
`config.json` that it replaces."""


def _class_of_folder(model: Mapping[str, Any]) -> FolderFile | None:
    """Return the arguments of a class of `transformers`, from the folder in `model.path` or `model.weights`.

    Return None if there is no folder, or if `model.args` has `model_type`. The `config.json` of a run contains all
    arguments, so a run that starts from it does not read the folder. Raises ConfigError if the folder has no valid
    `config.json`, or if the job sets arguments that this file does not have.
    """
    name = "path" if "path" in model else "weights"
    folder, given = model.get(name), model.get("args", {})
    if not isinstance(folder, str) or not isinstance(given, dict) or "model_type" in given:
        return None
    from titan_launch.models.huggingface.config_json import read_json
    from titan_launch.models.huggingface.files import CONFIG_FILE, WeightsError

    path = Path(folder, CONFIG_FILE)
    try:
        table = read_json(path)
    except WeightsError as error:
        raise config_error(("model", name), str(error), folder, also=(("model", "args"),)) from None
    unknown = [key for key in given if key not in table and key not in _OVERRIDES]
    if unknown:
        also: tuple[KeyPath, ...] = (("model", name),)
        hints = {key: did_you_mean(key, table) or "; remove this key" for key in unknown}
        raise ConfigError(
            Problem(("model", "args", key), f"{path} has no such key{hint}", given[key], also)
            for key, hint in hints.items()
        )
    replaced = {*_WITHOUT_EFFECT, *(key for name in given for key in _OVERRIDES.get(name, ()))}
    args = {key: value for key, value in table.items() if key not in replaced}
    return FolderFile(str(path), {"model": {"args": args}})


def _model_of_weights(model: Mapping[str, Any]) -> FolderFile | None:
    """Return the name, flavor and arguments of the model in the folder `model.weights`.

    Return None for a job without `model.weights`, with a flavor, or with a factory in `model.name`. Raises
    ConfigError if the `config.json` of the folder cannot be read, names no model of this package, or names a different
    model than the job.
    """
    if not isinstance(model.get("weights"), str):
        return None
    name, weights = model.get("name"), model["weights"]
    if "flavor" in model or ":" in str(name):
        return None
    from titan_launch.models.huggingface.config_json import read_folder_config
    from titan_launch.models.huggingface.files import CONFIG_FILE, WeightsError

    try:
        folder = read_folder_config(weights)
    except WeightsError as error:
        raise config_error(("model", "weights"), str(error), weights, also=(("model",),)) from None
    if ":" in folder.name:
        reason = f"its {CONFIG_FILE} names the factory {folder.name}, and {FOLDERS_CHOOSE_NO_CODE}; set model.name"
        raise config_error(("model", "weights"), reason, weights, also=(("model",),))
    if name not in (None, folder.name):
        remedy = f'set "{folder.name}", or name another folder in model.weights'
        reason = f"{weights} holds the weights of {folder.name}; {remedy}"
        raise config_error(("model", "name"), reason, name, also=(("model",),))
    table = {"name": folder.name, "flavor": folder.flavor, "args": dict(folder.args)}
    return FolderFile(str(Path(weights, CONFIG_FILE)), {"model": table})


def _parse(table: dict[str, Any]) -> tuple[JobConfig, list[Problem]]:
    """Return the configuration that a table describes, and the problems in the table.

    In the configuration, each wrong key has its default value, so that the rules can check the other keys. With more
    than `MOST_PROBLEMS` problems, all keys have their default values.
    """
    # Missing sections are added as {}. Pydantic then builds only the validator of JobConfig.
    complete = _with_kinds({name: {} for name in JobConfig.model_fields} | table, ())
    try:
        return JobConfig.model_validate(complete), []
    except ValidationError as error:
        from titan_launch.config.loading.validation_errors import translate

        problems = translate(error, JobConfig)
        if error.error_count() > MOST_PROBLEMS:
            return JobConfig(), problems
    rest = deepcopy(table)
    for problem in problems:
        _remove(rest, problem.key)
    config, more = _parse(rest) if rest != table else (JobConfig(), [])
    known = {problem.key for problem in problems}  # a removed key that is required is not reported as missing
    return config, problems + [problem for problem in more if problem.key not in known]


def _with_kinds(value: Any, key: KeyPath) -> Any:
    """Return a copy of a value in which every table with several kinds has the key `kind`. A missing `kind` is set to
    the default. Without `kind`, pydantic does not know which keys of the table are valid."""
    if isinstance(value, list):
        return [_with_kinds(item, (*key, index)) for index, item in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    kinds = kinds_of(key)
    tag = {"kind": kinds.kind_of(value)} if kinds else {}
    return tag | {name: _with_kinds(inner, (*key, name)) for name, inner in value.items()}


def _remove(table: dict[str, Any], key: KeyPath) -> None:
    """Remove a wrong key from a table. If a required key is missing, or if `kind` is wrong, remove the whole table
    around this key.

    An array is removed as a whole: without one of its items, the indices of the later items would be wrong.
    """
    is_kind = key[-1] == "kind" and kinds_of(key[:-1]) is not None
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
    """Return the problems that the rules find, except those that may be consequences of the problems in `known`. A
    problem is omitted if one of its keys equals, contains, or is inside of a key of a known problem."""
    wrong = [key for problem in known for key in (problem.key, *problem.also)]
    found = [(problem, (problem.key, *problem.also)) for rule in rules for problem in rule(config)]
    return [p for p, keys in found if not any(a[: len(b)] == b[: len(a)] for a in keys for b in wrong)]
