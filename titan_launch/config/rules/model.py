"""Rules across sections for the model and its arguments."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.tables import changed_keys
from titan_launch.config.sections.model import HUGGINGFACE
from titan_launch.config.sections.section import Section, Table, is_import_string
from titan_launch.core.errors import KeyPath, Problem, format_key, scalars
from titan_launch.models.architectures import (
    ALL_IN_ARGS,
    ARCHITECTURES,
    known_args,
    resolve_args,
    unknown_flavor,
    unknown_model,
)
from titan_launch.models.huggingface import args as huggingface

_NAME, _FLAVOR, _ARGS = ("model", "name"), ("model", "flavor"), ("model", "args")


def model_exists(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `model.name` is neither a known model nor a valid import string."""
    name = config.model.name
    if ":" in name:
        if not is_import_string(name):
            yield Problem(_NAME, "must have the form package.module:factory for a model of your own", name)
    elif name not in (*ARCHITECTURES, HUGGINGFACE):
        yield Problem(_NAME, unknown_model(name), name)


def flavor_exists(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `model.flavor` is neither a row of the model's size table nor `none`."""
    name, flavor = config.model.name, config.model.flavor
    if name in ARCHITECTURES and flavor not in (ALL_IN_ARGS, *ARCHITECTURES[name].flavors):
        yield Problem(_FLAVOR, unknown_flavor(name, flavor), flavor, also=(_NAME,))


def huggingface_has_a_config(config: JobConfig) -> Iterator[Problem]:
    """For `model.name = "huggingface"`, report a problem if `model.args` has no `model_type`, for refused arguments (at
    most 10), and if `transformers` lacks the class. (Usually, the `config.json` in `model.path` has `model_type`.)"""
    model = config.model
    if model.name != HUGGINGFACE:
        return
    if "model_type" not in model.args:
        folder, name = (model.weights, "weights") if model.path is None else (model.path, "path")
        if folder is None:
            reason = "needs model.path, the folder with the config.json of the class"
            yield Problem(_NAME, reason, model.name, also=(("model", "path"), _ARGS))
        else:
            reason = "its config.json has no model_type, which names the class's configuration; name another folder"
            yield Problem(("model", name), reason, folder)
    else:
        problems = list(islice(huggingface.refused(model.args), _MOST_SHOWN))
        yield from (Problem((*_ARGS, *path), reason, value) for path, reason, value in problems)
        kind = model.args["model_type"]
        missing = huggingface.missing_in_transformers(model.args) if isinstance(kind, str) else None
        if missing is not None:
            yield Problem((*_ARGS, "model_type"), missing, kind, also=(_NAME,))


_MOST_SHOWN = 10
"""Largest number of refused arguments of a class of `transformers` that one error lists."""


def model_args_are_valid(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each wrong value of a model argument. If all values are valid, report a problem for each
    contradiction between arguments."""
    try:
        args = resolve_args(config.model.name, config.model.flavor, config.model.args)
    except ValidationError as error:
        from titan_launch.config.loading.validation_errors import translate

        yield from translate(error, ARCHITECTURES[config.model.name].args, _ARGS)
    except KeyError:  # an unknown name or flavor (other rules report it); a factory checks its own arguments
        pass
    else:
        for fields, reason in args.problems():
            yield args_problem(config, fields, reason)


def model_args_have_an_effect(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each argument of the job that has no effect because of a different argument."""
    args = known_args(config.model)
    for name, reason in args.unused() if args is not None else ():
        if _value_at(config.model.args, tuple(name.split("."))) is not None:
            yield args_problem(config, (name,), reason)


def sequences_have_positions(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if sequences are longer than a model's table of positions."""
    args, seq_len = known_args(config.model), config.training.seq_len
    limit = args.longest_sequence() if args is not None else None
    if limit is not None and seq_len > limit[1]:
        name, longest = limit
        reason = f"exceeds the model's {longest} positions; set at most {longest}, or a larger model.args.{name}"
        yield Problem(("training", "seq_len"), reason, seq_len, also=(_NAME, _FLAVOR, (*_ARGS, name)))


def tables_can_be_recorded(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each argument in a table, such as `[model.args]`, that JSON cannot represent, because the
    run folder stores the configuration as `config.json`."""
    values = (bool, int, float, str, *((type(None),) if config.model.name == HUGGINGFACE else ()))
    for key, value in (pair for place, table in _tables(config) for pair in scalars(table, place)):
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(key, "must be a finite number, because the run stores its configuration as JSON", value)
        elif not isinstance(value, values):
            yield Problem(
                key, "must be a string, a number or a bool, because the run stores its configuration as JSON", value
            )


def _tables(value: object, key: KeyPath = ()) -> Iterator[tuple[KeyPath, Table]]:
    """Yield (key, table) for each free-form table inside `value`, such as `[model.args]`. The schema does not list the
    keys of such a table. `key`: path of `value`."""
    if isinstance(value, dict):
        yield key, value
    elif isinstance(value, Section):
        for name in type(value).model_fields:
            yield from _tables(getattr(value, name), (*key, name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _tables(item, (*key, index))


def weights_are_of_the_model(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the folder `model.weights` cannot be read or holds a different model. Also report a problem
    for each model argument that differs from the argument in the folder (exceptions: see `ModelConfig.weights`).
    (A missing folder is not a problem here, because a run that resumes may not need the folder. A new run reports a
    missing folder when it reads the weights.)"""
    model, key = config.model, ("model", "weights")
    args = known_args(model)
    if model.weights is None or args is None or not os.path.exists(model.weights):
        return
    from titan_launch.config.loading.provenance import toml_value
    from titan_launch.models.huggingface.config_json import differences, read_folder_config
    from titan_launch.models.huggingface.files import WeightsError

    try:
        folder = read_folder_config(model.weights)
        if folder.name != model.name:
            reason = f"holds the weights of {folder.name}, not of {model.name}; name another folder, or set model.name"
            yield Problem(key, reason, model.weights, also=(_NAME,))
            return
        for argument, own, theirs in differences(args, folder):
            values = f"{argument} is {toml_value(own)} in this job, and {toml_value(theirs)} in {model.weights}"
            reason = f"{values}; remove the key from the job"
            yield args_problem(config, (argument,), reason, also=(key,))
    except WeightsError as error:
        yield Problem(key, str(error), model.weights)


def adapter_is_of_the_job(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the folder `lora.adapter` is missing, has a key that is not supported, or differs from
    `[lora]` in rank or scale. If the job does not set `lora.dropout`, the dropout must be equal, too. (If the run
    folder exists, `lora.adapter` is not checked, because a run that resumes does not read it. The start of a new run
    checks the tensors in the folder, and the ranks and scales of single modules.)"""
    lora, key = config.lora, ("lora", "adapter")
    if lora.adapter is None or not lora.targets or config.job.run_folder.exists():
        return
    from titan_launch.models.huggingface.adapter_config import read_config
    from titan_launch.models.huggingface.files import WeightsError

    try:
        for reason in read_config(Path(lora.adapter)).differences(lora):
            yield Problem(key, reason, lora.adapter, also=(("lora", "targets"),))
    except WeightsError as error:
        yield Problem(key, str(error), lora.adapter)


def adapter_rules_have_an_effect(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each rule of `[lora]` that sets neither `rank` nor `alpha`."""
    for index, rule in enumerate(config.lora.rules if config.lora.targets else ()):
        if rule.rank is None and rule.alpha is None:
            yield Problem(("lora", "rules", index), "has no effect without rank or alpha; set one of them")


def parameters_are_unfrozen_in_the_run(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each entry of `training.unfreeze` whose parameters would be unfrozen only after the last
    step."""
    training = config.training
    for index, row in enumerate(training.unfreeze):
        if training.steps is not None and row.after_step >= training.steps:
            key: KeyPath = ("training", "unfreeze", index, "after_step")
            last = f"the last step, {training.steps} ({format_key(training.length_key)})"
            remedy = "set a smaller number, or remove this entry and set training.frozen or training.trainable"
            reason = f"unfreezes the parameters only after {last}; {remedy}"
            yield Problem(key, reason, row.after_step, also=(training.length_key,))


def settings_of_frozen_parameters_have_an_effect(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each setting for frozen parameters in a job that freezes no parameter. (Models that are not
    of this package are not checked, because they may freeze parameters themselves.)"""
    training = config.training
    if training.trainable is not None or training.frozen or config.lora.targets or not config.model.is_of_package:
        return
    reason = (
        "applies only to parameters that are never trained, but this job trains all parameters; set training.frozen, "
        "or remove this key"
    )
    for name in ("precision.frozen_storage_dtype", "batchnorm.of_frozen"):
        for key, value in changed_keys(config, name):
            yield Problem(key, reason, value, also=(("training", "frozen"), ("training", "trainable")))


MODEL_RULES = (
    model_exists,
    flavor_exists,
    huggingface_has_a_config,
    model_args_are_valid,
    model_args_have_an_effect,
    sequences_have_positions,
    tables_can_be_recorded,
    weights_are_of_the_model,
    adapter_rules_have_an_effect,
    adapter_is_of_the_job,
    parameters_are_unfrozen_in_the_run,
    settings_of_frozen_parameters_have_an_effect,
)


def args_problem(config: JobConfig, fields: tuple[str, ...], reason: str, also: tuple[KeyPath, ...] = ()) -> Problem:
    """Return a problem of the model arguments `fields`, such as `dim` or `experts.top_k`. The key of the problem is the
    first of these arguments that the job sets. If the job sets none of these arguments, the key is `model.flavor`,
    which sets the values of all arguments."""
    paths = [tuple(field.split(".")) for field in fields]
    found = ((path, _value_at(config.model.args, path)) for path in paths)
    path, value = next((pair for pair in found if pair[1] is not None), (None, config.model.flavor))
    key = _FLAVOR if path is None else (*_ARGS, *path)
    return Problem(key, reason, value, also=(_NAME, _FLAVOR, *((*_ARGS, *path) for path in paths), *also))


def _value_at(table: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        table = table.get(name) if isinstance(table, dict) else None
    return table
