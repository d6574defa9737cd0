"""Optimizer groups: the parameters that are updated together, with their algorithm and weight decay. This module does
not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan_launch.config.optimizers import ALGORITHMS, GroupSettings, has_master
from titan_launch.config.sections.training import OptimizerConfig, ParamGroup
from titan_launch.core.globs import matches
from titan_launch.plan.mup import Scale
from titan_launch.plan.types import is_within

_EMBEDDINGS = {"Embedding", "EmbeddingBag"}


def first_match(groups: Sequence[ParamGroup], paths: Iterable[str]) -> int | None:
    """Return the index of the first group of `[[optimizer.param_groups]]` that matches any path of a parameter; None if
    no group matches."""
    paths = list(paths)
    return next((i for i, group in enumerate(groups) if matches_any(group, paths)), None)


def matches_any(group: ParamGroup, paths: Iterable[str]) -> bool:
    """Return True if a group's glob matches one of the paths."""
    return any(matches(group.match, path) for path in paths)


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
