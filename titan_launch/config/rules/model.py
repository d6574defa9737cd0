"""Rules across sections for the model and its arguments. Part of `titan_launch.config.rules`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from titan_launch.config.architectures import ARCHITECTURES, resolve_args
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import KeyPath, Problem, did_you_mean, format_key

_NAME, _FLAVOR, _ARGS = ("model", "name"), ("model", "flavor"), ("model", "args")


def model_exists(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `model.name` is neither a model of this package nor a valid import string."""
    name = config.model.name
    if ":" in name:
        module, _, factory = name.partition(":")
        if not all(part.isidentifier() for part in [*module.split("."), *factory.split(".")]):
            yield Problem(_NAME, "must have the form package.module:factory for a model of your own", name)
    elif name not in ARCHITECTURES:
        known = ", ".join(f'"{known}"' for known in ARCHITECTURES)
        hint = did_you_mean(name, ARCHITECTURES)
        yield Problem(_NAME, f"unknown model; must be {known}, or package.module:factory for your own{hint}", name)


def flavor_exists(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `model.flavor` is not a row of the model's size table."""
    name, flavor = config.model.name, config.model.flavor
    if name in ARCHITECTURES and flavor not in ARCHITECTURES[name].flavors:
        flavors = ARCHITECTURES[name].flavors
        reason = f"unknown flavor; {name} has {', '.join(flavors)}{did_you_mean(flavor, flavors)}"
        yield Problem(_FLAVOR, reason, flavor, also=(_NAME,))


def factory_has_no_flavor(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `model.flavor` is set with a factory, which has no size table. (The default value is
    accepted, because the `config.json` of a run contains every key.)"""
    if ":" in config.model.name:
        reason = f"{config.model.name} has no flavors; remove this key, and set arguments in [model.args]"
        for _, flavor in config.model.changed("flavor"):
            yield Problem(_FLAVOR, reason, flavor, also=(_NAME,))


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


def factory_args_can_be_recorded(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each factory argument that JSON cannot represent, because the run folder stores the
    configuration as `config.json`."""
    for key, value in _leaves(config.model.args, _ARGS):
        if isinstance(value, float) and not math.isfinite(value):
            yield Problem(key, "must be a finite number, because the run stores its configuration as JSON", value)
        elif not isinstance(value, (bool, int, float, str)):
            yield Problem(
                key, "must be a string, a number or a bool, because the run stores its configuration as JSON", value
            )


def own_loss_is_whole(config: JobConfig) -> Iterator[Problem]:
    """Report `model.loss` with a model of this package, and with options that divide or replace the loss."""
    loss, key = config.model.loss, ("model", "loss")
    if loss is None:
        return
    if config.model.name in ARCHITECTURES:
        reason = f"{config.model.name} returns logits and computes no loss; remove this key"
        yield Problem(key, reason, loss, also=(_NAME,))
    parallelism = config.parallelism
    obstacles: tuple[tuple[KeyPath, bool], ...] = (
        (("parallelism", "tensor_parallel_degree"), parallelism.tensor_parallel_degree > 1),
        (("parallelism", "pipeline_parallel_degree"), parallelism.pipeline_parallel_degree > 1),
        (("parallelism", "context_parallel_degree"), parallelism.context_parallel_degree > 1),
        (("training", "loss_chunks"), config.training.loss_chunks > 1),
        (("compile", "components"), config.compile.enable and "loss" in config.compile.components),
    )
    for other, is_set in obstacles:
        if is_set:
            reason = f"cannot be used with {format_key(other)}, for which the launcher computes the loss; remove either"
            yield Problem(key, reason, loss, also=(other,))


MODEL_RULES = (
    model_exists,
    flavor_exists,
    factory_has_no_flavor,
    model_args_are_valid,
    factory_args_can_be_recorded,
    own_loss_is_whole,
)
"""The rules of this file."""


def args_problem(config: JobConfig, fields: tuple[str, ...], reason: str, also: tuple[KeyPath, ...] = ()) -> Problem:
    """Return a problem of the model arguments `fields`. The key of the problem is the first of these arguments that the
    job sets. If the job sets none of them, the key is `model.flavor`, which sets the values of all arguments."""
    given = config.model.args
    name = next((field for field in fields if field in given), None)
    key, value = (_FLAVOR, config.model.flavor) if name is None else ((*_ARGS, name), given[name])
    return Problem(key, reason, value, also=(_NAME, _FLAVOR, *((*_ARGS, field) for field in fields), *also))


def _leaves(value: Any, key: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Yield the scalar values in a free-form table, with their paths."""
    if isinstance(value, (dict, list)):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, (*key, name))
    else:
        yield key, value
