"""Optimizer groups of a model: algorithm, learning rate and weight decay of every parameter."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch import nn

from titan_launch.config.optimizers import GroupSettings
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.plan.mup import UNSCALED, WidthScales
from titan_launch.plan.param_groups import first_match, group_name, is_inner_matrix, is_undecayed, settings_of
from titan_launch.plan.types import EXPERTS, STACKED_LORA


class Group(NamedTuple):
    """Parameters with the same settings."""

    name: str
    settings: GroupSettings
    parameters: dict[str, nn.Parameter]
    """Parameters by path. A shared parameter is listed under its first path."""


def group_parameters(
    model: nn.Module, config: OptimizerConfig, head: Collection[str] = (), scales: WidthScales = UNSCALED
) -> list[Group]:
    """Return the trainable parameters of a model, or of a pipeline stage, in groups of equal settings.

    The first entry of `[[optimizer.param_groups]]` whose glob matches a path of a parameter decides its settings. A
    shared parameter has several paths, but only one group. `head`: paths of the modules that run last. `scales`: how
    the settings of a parameter depend on the width of the model.
    """
    undecayed, inner = _undecayed_and_inner(model, head)
    groups: dict[str, Group] = {}
    for parameter, names in trainable_paths(model).items():
        index = first_match(config.param_groups, names)
        scale = scales.of(names[0])
        settings = settings_of(config, index, parameter in undecayed, parameter in inner, scale)
        name = group_name(index, settings, scale)
        groups.setdefault(name, Group(name, settings, {})).parameters[names[0]] = parameter
    return list(groups.values())


def trainable_paths(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the paths of every trainable parameter. A shared parameter has several paths."""
    paths: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            paths.setdefault(parameter, []).append(path)
    return paths


def _undecayed_and_inner(model: nn.Module, head: Collection[str]) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Return two sets: the parameters that have no weight decay by default (`is_undecayed`), and the parameters that an
    algorithm for matrices updates by default (`is_inner_matrix`).

    A parameter that several modules share has no weight decay if `is_undecayed` is True for any of the modules. An
    algorithm for matrices updates the parameter if `is_inner_matrix` is True for all of the modules.
    """
    undecayed, inner, others = set[nn.Parameter](), set[nn.Parameter](), set[nn.Parameter]()
    for path, module in model.named_modules(remove_duplicate=False):
        classes = [cls.__name__ for cls in type(module).__mro__]
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            num_axes = parameter.ndim - _has_experts(module)  # stacked parameters: the axes of one expert
            if is_undecayed(name, num_axes, classes):
                undecayed.add(parameter)
            (inner if is_inner_matrix(name, num_axes, classes, path, head) else others).add(parameter)
    return undecayed, inner - others


def _has_experts(module: nn.Module) -> bool:
    return any(f"{cls.__module__}.{cls.__qualname__}" in (EXPERTS, STACKED_LORA) for cls in type(module).__mro__)
