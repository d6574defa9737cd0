"""Optimizer groups: the parameters that are updated together, with their algorithm and weight decay. This module does
not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from titan_launch.config.optimizers import ALGORITHMS, GroupSettings, has_master
from titan_launch.config.sections.training import OptimizerConfig, ParamGroup
from titan_launch.core.errors import ConfigError, KeyPath, Problem
from titan_launch.core.terminal import counted
from titan_launch.plan.freezing import matches_any
from titan_launch.plan.layout import Layout
from titan_launch.plan.mup import UNSCALED, Scale, WidthScales
from titan_launch.plan.replica_shards import is_within_matrix
from titan_launch.plan.types import Inventory, TensorInfo, full_name, is_within, parent, sharded_dim
from titan_launch.plan.units.rule_assignment import suggestion

_EMBEDDINGS = {"Embedding", "EmbeddingBag"}


def first_match(groups: Sequence[ParamGroup], paths: Iterable[str]) -> int | None:
    """Return the index of the first group of `[[optimizer.param_groups]]` that matches any path of a parameter; None if
    no group matches."""
    paths = list(paths)
    return next((i for i, group in enumerate(groups) if matches_any(group.match, paths)), None)


def is_undecayed(name: str, num_axes: int, classes: Iterable[str]) -> bool:
    """Return True if a parameter has no weight decay by default: a vector, a bias, or a parameter of a norm or an
    embedding.

    `name`: name of the parameter within the `nn.Module` that owns it (`weight`). `num_axes`: number of axes of the
    parameter, without the axis of experts if it is stacked. `classes`: names of the module's class and its base
    classes, without packages (`LayerNorm`).
    """
    is_norm_or_embedding = any("Norm" in cls or cls in _EMBEDDINGS for cls in classes)
    return num_axes < 2 or name.endswith("bias") or is_norm_or_embedding


def is_inner_matrix(name: str, num_axes: int, classes: Iterable[str], path: str, head: Iterable[str]) -> bool:
    """Return True if Muon updates a parameter by default: a matrix that belongs to no norm, embedding or output layer.
    `path`: path of the `nn.Module` that owns the parameter. `head`: `Inventory.head`. The other arguments are those of
    `is_undecayed`."""
    in_head = any(is_within(path, module) for module in head)
    return num_axes == 2 and not is_undecayed(name, num_axes, classes) and not in_head


def settings_of(
    config: OptimizerConfig, index: int | None, undecayed: bool, inner_matrix: bool, scale: Scale
) -> GroupSettings:
    """Return the optimizer settings of a parameter.

    `index`: result of `first_match`. `undecayed`: True if `is_undecayed` is True for any module that has the parameter.
    `inner_matrix`: True if `is_inner_matrix` is True for all modules that have the parameter. `scale`: the parameter's
    factors for the width of the model.
    """
    algorithm = config.name if inner_matrix else ALGORITHMS[config.name].for_others or config.name
    lr_factor, decay = 1.0, None
    if index is not None:
        group = config.param_groups[index]
        algorithm = group.algorithm or algorithm
        lr_factor = group.lr_factor
        decay = group.weight_decay
    row = ALGORITHMS[algorithm]
    if decay is None and undecayed:
        decay = 0.0
    elif decay is None:
        # `optimizer.weight_decay` is only for algorithms with the same kind of weight decay as `optimizer.name`.
        is_alike = row.decay == ALGORITHMS[config.name].decay
        decay = config.weight_decay if config.weight_decay is not None and is_alike else row.weight_decay
    return GroupSettings(algorithm, lr_factor * scale.lr * row.lr_factor(config), decay * scale.weight_decay)


def group_name(index: int | None, settings: GroupSettings, scale: Scale) -> str:
    """Return the name of an optimizer group: `default, weight decay 0.1`, or `default, Muon, weight decay 0.1`."""
    first = "default" if index is None else f"param_groups.{index}"
    algorithm = "" if settings.algorithm == "AdamW" else f", {settings.algorithm}"
    width = "" if scale.lr == 1 else f", learning rate x {scale.lr:g}"
    return f"{first}{algorithm}{width}, weight decay {settings.weight_decay:g}"


def is_mixed(config: OptimizerConfig, storage_dtypes: Iterable[str]) -> bool:
    """Return True if parameters with these storage dtypes need an optimizer of this package. PyTorch's optimizers
    support only one dtype for parameters and state, one rounding mode, and no master weights."""
    dtypes = set(storage_dtypes)
    in_other_dtype = config.state_dtype is not None and dtypes != {config.state_dtype}
    return in_other_dtype or config.rounding == "stochastic" or has_master(config, *dtypes)


class Trained(NamedTuple):
    """A trained parameter with its optimizer settings."""

    info: TensorInfo
    paths: list[str]
    """All full names of the parameter. The first one is its key in the result of `trained_parameters`."""

    entry: int | None
    """Index of its entry in `[[optimizer.param_groups]]`: result of `first_match`."""

    settings: GroupSettings
    group: str
    """Name of the parameter's group (`group_name`)."""


def trained_parameters(
    inventory: Inventory, config: OptimizerConfig, scales: WidthScales = UNSCALED
) -> dict[str, Trained]:
    """Return the trained parameters of a model, or of a pipeline stage, by full name. A shared parameter has several
    full names, and is listed under the first one. `optim.groups.group_parameters` makes the same groups."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    undecayed, others = set[str](), set[str]()
    for module in inventory.modules:
        classes = [name.rpartition(".")[2] for name in module.classes]
        for info in module.parameters:
            name, num_axes = info.tied_to or full_name(module.path, info.name), len(info.shape) - info.is_stacked
            paths[name].append(full_name(module.path, info.name))
            if is_undecayed(info.name, num_axes, classes):
                undecayed.add(name)
            if not is_inner_matrix(info.name, num_axes, classes, module.path, inventory.head):
                others.add(name)
    found = {}
    for name, own in paths.items():
        if inventory.parameters[own[0]].requires_grad:
            index, scale = first_match(config.param_groups, own), scales.of(own[0])
            settings = settings_of(config, index, name in undecayed, name not in others, scale)
            group = group_name(index, settings, scale)
            found[own[0]] = Trained(inventory.parameters[own[0]], own, index, settings, group)
    return found


def check_param_groups(inventory: Inventory, config: OptimizerConfig) -> None:
    """Raise ConfigError if `[optimizer]` does not fit the whole model.

    Four problems are possible. Muon is an algorithm for matrices.
    - An entry of `[[optimizer.param_groups]]` applies to no parameter.
    - An entry gives an algorithm for matrices to a parameter that is not a matrix.
    - `optimizer.name` is an algorithm for matrices, and the model has no matrix that the algorithm can update.
    - `optimizer.name` is an algorithm for matrices, the output layer is unknown, and no entry sets an algorithm.
    """
    trained = list(trained_parameters(inventory, config).values())
    problems = list(_unused(config.param_groups, trained))
    for info, paths, index, *_ in trained:
        algorithm = None if index is None else config.param_groups[index].algorithm
        for_others = None if algorithm is None else ALGORITHMS[algorithm].for_others
        if index is not None and for_others is not None and len(info.shape) - info.is_stacked != 2:
            axes = "1 axis" if len(info.shape) == 1 else f"{len(info.shape)} axes"
            reason = (
                f'{algorithm} is for matrices, but {paths[0]} has {axes}; match only matrices, or set "{for_others}"'
            )
            problems.append(Problem(("optimizer", "param_groups", index, "algorithm"), reason, algorithm))
    problems += _without_matrices(inventory, config, trained)
    if problems:
        first: dict[KeyPath, Problem] = {}
        for problem in problems:
            first.setdefault(problem.key, problem)
        raise ConfigError(first.values())


def _unused(param_groups: Sequence[ParamGroup], trained: Collection[Trained]) -> Iterator[Problem]:
    used = {parameter.entry for parameter in trained}
    for index, group in enumerate(param_groups):
        if index in used:
            continue
        matched = any(matches_any(group.match, parameter.paths) for parameter in trained)
        reason = (
            "every parameter that this glob matches is already in an earlier group; put the narrower group first"
            if matched
            else f"matches no trainable parameter{suggestion(group.match, [n for p in trained for n in p.paths])}"
        )
        yield Problem(("optimizer", "param_groups", index, "match"), reason, group.match)


def _without_matrices(inventory: Inventory, config: OptimizerConfig, trained: Collection[Trained]) -> Iterator[Problem]:
    """Yield a problem if `optimizer.name` is an algorithm for matrices, and the model has no matrix for it, or its
    output layer is unknown and no parameter group sets an algorithm."""
    for_others = ALGORITHMS[config.name].for_others
    if for_others is None:
        return
    if not inventory.head and all(group.algorithm is None for group in config.param_groups):
        reason = (
            f"leaves the output layer to {for_others}, but the output layer of your model is unknown; name it in a "
            f'group of its own, as in [[optimizer.param_groups]] match = "output.*", algorithm = "{for_others}"'
        )
        yield Problem(("optimizer", "name"), reason, config.name)
    elif all(parameter.settings.algorithm != config.name for parameter in trained):
        reason = (
            "the model has no matrix that this algorithm can update (frozen matrices, convolutions, and matrices of "
            f'groups with another algorithm do not count); set "{for_others}"'
        )
        yield Problem(("optimizer", "name"), reason, config.name)


def matrix_stacks(inventory: Inventory, config: OptimizerConfig) -> list[Trained]:
    """Return the stacked parameters (experts) that an algorithm for matrices (Muon) updates. `inventory`: the whole
    model, before it is divided over ranks."""
    trained = trained_parameters(inventory, config).values()
    return [one for one in trained if one.info.is_stacked and ALGORITHMS[one.settings.algorithm].for_others is not None]


def check_stacks(stacks: Iterable[Trained], config: OptimizerConfig, layout: Layout) -> None:
    """Raise ConfigError if an algorithm for matrices would update experts whose matrices are divided. `stacks`: result
    of `matrix_stacks`.

    Three features can divide the matrix of an expert. Tensor parallelism always divides it. FSDP2 may divide it if the
    number of experts is not a multiple of the number of shards (see `sharded_dim`). A sharded optimizer may divide it
    if there are more replicas than experts on a rank (see `is_within_matrix`).
    """
    shards = layout.parameter_shards // layout.expert
    for info, (path, *_), index, settings, _ in stacks:
        experts, others = info.shape[0] // layout.expert, info.shape[1:]
        of_rank = -(-experts // shards)  # the last ranks may have fewer
        divided_ones = [
            own for own in (of_rank, experts % of_rank) if is_within_matrix((own, *others), layout.optimizer_replicas)
        ]
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
        other = ALGORITHMS[settings.algorithm].for_others
        glob = f'match = "**.{parent(path).rpartition(".")[2]}.*"'
        reason = (
            f"{settings.algorithm} needs whole matrices of experts, but {divided}; change the degrees of "
            f'[parallelism], or put a group for experts first: [[optimizer.param_groups]] {glob}, algorithm = "{other}"'
        )
        of_group = None if index is None else config.param_groups[index].algorithm
        key: KeyPath = ("optimizer", "name")
        if index is not None and of_group is not None:
            key = ("optimizer", "param_groups", index, "algorithm")
        also: tuple[KeyPath, ...] = (("parallelism", "expert_parallel_degree"), ("optimizer", "param_groups"))
        raise ConfigError([Problem(key, reason, of_group or config.name, also=also)])
