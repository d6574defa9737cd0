"""Optimizer groups of a model: algorithm, learning rate and weight decay of every parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from titan_launch.config.optimizers import ALGORITHMS, GroupSettings
from titan_launch.config.sections.training import OptimizerConfig, ParamGroup
from titan_launch.core.errors import ConfigError, KeyPath, Problem
from titan_launch.core.terminal import counted
from titan_launch.distributed.dtensor import chunk_sizes
from titan_launch.plan.layout import Layout
from titan_launch.plan.mup import UNSCALED, WidthScales
from titan_launch.plan.param_groups import (
    first_match,
    group_name,
    is_inner_matrix,
    is_undecayed,
    matches_any,
    settings_of,
)
from titan_launch.plan.replica_shards import is_within_matrix
from titan_launch.plan.types import EXPERTS, STACKED_LORA, parent, sharded_dim
from titan_launch.plan.units.rule_assignment import suggestion


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


def check_param_groups(model: nn.Module, config: OptimizerConfig, head: Collection[str] = ()) -> None:
    """Raise ConfigError if `[optimizer]` does not fit the whole model.

    Four problems are possible. Muon is an algorithm for matrices.
    - An entry of `[[optimizer.param_groups]]` applies to no parameter.
    - An entry gives an algorithm for matrices to a parameter that is not a matrix.
    - `optimizer.name` is an algorithm for matrices, and the model has no matrix that the algorithm can update.
    - `optimizer.name` is an algorithm for matrices, and the output layer is unknown.
    """
    paths = trainable_paths(model)
    decisions = {parameter: first_match(config.param_groups, names) for parameter, names in paths.items()}
    problems = list(_unused(config.param_groups, paths.values(), set(decisions.values())))
    stacked = _stacked(model)
    for parameter, index in decisions.items():
        if index is None:
            continue
        algorithm = config.param_groups[index].algorithm
        for_others = None if algorithm is None else ALGORITHMS[algorithm].for_others
        if for_others is not None and parameter.ndim - (parameter in stacked) != 2:
            reason = (
                f"{algorithm} is for matrices, but {paths[parameter][0]} has {parameter.ndim} axes; "
                f'match only matrices, or set "{for_others}"'
            )
            problems.append(Problem(("optimizer", "param_groups", index, "algorithm"), reason, algorithm))
    problems += _without_matrices(model, config, head)
    if problems:
        first: dict[KeyPath, Problem] = {}
        for problem in problems:
            first.setdefault(problem.key, problem)
        raise ConfigError(first.values())


def _without_matrices(model: nn.Module, config: OptimizerConfig, head: Collection[str]) -> Iterator[Problem]:
    """Yield a problem if `optimizer.name` is an algorithm for matrices, and the model has no matrix for it, or its
    output layer is unknown."""
    for_others = ALGORITHMS[config.name].for_others
    if for_others is None:
        return
    if not head and all(group.algorithm is None for group in config.param_groups):
        reason = (
            f"leaves the output layer to {for_others}, but the output layer of your model is unknown; name it in a "
            f'group of its own, as in [[optimizer.param_groups]] match = "output.*", algorithm = "{for_others}"'
        )
        yield Problem(("optimizer", "name"), reason, config.name)
    elif all(group.settings.algorithm != config.name for group in group_parameters(model, config, head)):
        reason = (
            f"the model has no matrix that this algorithm can update (convolutions are updated by {for_others}); "
            f'set "{for_others}"'
        )
        yield Problem(("optimizer", "name"), reason, config.name)


def trainable_paths(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return the paths of every trainable parameter. A shared parameter has several paths."""
    paths: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            paths.setdefault(parameter, []).append(path)
    return paths


def _undecayed_and_inner(model: nn.Module, head: Collection[str]) -> tuple[set[nn.Parameter], set[nn.Parameter]]:
    """Return the parameters that have no weight decay by default (`is_undecayed`), and those that an algorithm for
    matrices updates by default (`is_inner_matrix`).

    Several modules may share a parameter. Such a parameter has no weight decay if `is_undecayed` is True for any of the
    modules. An algorithm for matrices updates the parameter if `is_inner_matrix` is True for all of the modules.
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


def _stacked(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of experts, whose first axis counts the experts."""
    return {p for module in model.modules() if _has_experts(module) for p in module.parameters(recurse=False)}


def check_stacks(model: nn.Module, config: OptimizerConfig, head: Collection[str], layout: Layout) -> None:
    """Raise ConfigError if an algorithm for matrices (Muon) would update experts whose matrices are divided.

    Three features can divide the matrix of an expert. Tensor parallelism always divides it. FSDP2 may divide it if the
    number of experts is not a multiple of the number of shards (see `sharded_dim`). A sharded optimizer may divide it
    if there are more replicas than experts on a rank (see `is_within_matrix`). `model`: the whole model, before it is
    divided over ranks.
    """
    stacked, shards = _stacked(model), layout.parameter_shards // layout.expert
    for group in group_parameters(model, config, head):
        if ALGORITHMS[group.settings.algorithm].for_others is None:
            continue
        for path, parameter in group.parameters.items():
            if parameter not in stacked:
                continue
            experts, others = parameter.shape[0] // layout.expert, parameter.shape[1:]
            of_ranks = set(chunk_sizes(experts, shards))
            divided_ones = [own for own in of_ranks if is_within_matrix((own, *others), layout.optimizer_replicas)]
            if layout.tensor > 1:
                divided = f"parallelism.tensor_parallel_degree = {layout.tensor} divides each expert of {path}"
            elif sharded_dim((experts, *others), shards, is_stacked=True):
                divided = f"FSDP2 divides each expert of {path}: it shards {experts} experts over {shards} ranks"
            elif divided_ones:
                divided = (
                    f"parallelism.shard_optimizer_over_replicas = true divides experts of {path}, because a rank "
                    f"has {counted(divided_ones[0], 'expert')} and there are {layout.replicate} replicas"
                )
            else:
                continue
            algorithm, other = group.settings.algorithm, ALGORITHMS[group.settings.algorithm].for_others
            glob = f'match = "**.{parent(path).rpartition(".")[2]}.*"'
            reason = (
                f"{algorithm} needs whole matrices of experts, but {divided}; change the degrees of [parallelism], or "
                f'add a group for experts: [[optimizer.param_groups]] {glob}, algorithm = "{other}"'
            )
            also: tuple[KeyPath, ...] = (("parallelism", "expert_parallel_degree"), ("optimizer", "param_groups"))
            raise ConfigError([Problem(("optimizer", "name"), reason, config.name, also=also)])


def _unused(
    param_groups: Sequence[ParamGroup], paths: Collection[Sequence[str]], used: Collection[int | None]
) -> Iterator[Problem]:
    for index, group in enumerate(param_groups):
        if index in used:
            continue
        matched = any(matches_any(group, names) for names in paths)
        reason = (
            "every parameter that this glob matches is already in an earlier group"
            if matched
            else f"matches no trainable parameter{suggestion(group.match, [n for names in paths for n in names])}"
        )
        yield Problem(("optimizer", "param_groups", index, "match"), reason, group.match)
