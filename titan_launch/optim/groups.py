"""Which parameters have which learning rate and weight decay."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from torch import nn

from titan_launch.config.optimizer import OptimizerConfig, ParamGroup
from titan_launch.errors import ConfigError, Problem, did_you_mean
from titan_launch.plan.param_groups import first_match, group_name, is_undecayed, matches_any, settings_of


def build_param_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The groups that a `torch.optim` optimizer takes: each trainable parameter in one of them.

    The first of `[[optimizer.param_groups]]` whose glob matches a path of the parameter decides; a shared parameter
    has several paths, and is in one group all the same. Beside the settings, a group has its `lr_factor` and a `name`.
    Raises ConfigError for every one of `param_groups` that decides nothing.
    """
    paths = _trainable_paths(model)
    decisions = {parameter: first_match(config.param_groups, names) for parameter, names in paths.items()}
    problems = list(_unused(config.param_groups, paths.values(), set(decisions.values())))
    if problems:
        raise ConfigError(problems)
    undecayed = _undecayed(model)
    groups: dict[str, dict[str, Any]] = {}
    for parameter, index in decisions.items():
        settings = settings_of(config, index, parameter in undecayed)
        name = group_name(index, settings)
        groups.setdefault(name, {"name": name, "params": [], **settings})["params"].append(parameter)
    return list(groups.values())


def _trainable_paths(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Every trainable parameter with its paths: one, or several where it is shared."""
    paths: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            paths.setdefault(parameter, []).append(path)
    return paths


def _undecayed(model: nn.Module) -> set[nn.Parameter]:
    """Parameters without weight decay by default; the weight that an output layer shares with an embedding too."""
    return {
        parameter
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and is_undecayed(name, parameter.ndim, [cls.__name__ for cls in type(module).__mro__])
    }


def _unused(
    param_groups: Sequence[ParamGroup], paths: Collection[Sequence[str]], used: Collection[int | None]
) -> Iterator[Problem]:
    for index, group in enumerate(param_groups):
        if index in used:
            continue
        matched = any(matches_any(group, names) for names in paths)
        reason = (
            "every parameter it matches is already in an earlier group"
            if matched
            else f"matches no trainable parameter{did_you_mean(group.match, [n for names in paths for n in names])}"
        )
        yield Problem(("optimizer", "param_groups", index, "match"), reason, group.match)
