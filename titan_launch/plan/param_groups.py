"""Which parameters the optimizer updates together, by what algorithm, and what it keeps for them. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan_launch.config.optimizers import ALGORITHMS, GroupSettings, has_master
from titan_launch.config.sections.training import OptimizerConfig, ParamGroup
from titan_launch.core.globs import matches
from titan_launch.plan.types import is_within

_EMBEDDINGS = {"Embedding", "EmbeddingBag"}


def first_match(groups: Sequence[ParamGroup], paths: Iterable[str]) -> int | None:
    """The index of the first of `[[optimizer.param_groups]]` that matches a path of a parameter; None: none does."""
    paths = list(paths)
    return next((i for i, group in enumerate(groups) if matches_any(group, paths)), None)


def matches_any(group: ParamGroup, paths: Iterable[str]) -> bool:
    """Whether a group's glob matches one of the paths."""
    return any(matches(group.match, path) for path in paths)


def is_undecayed(name: str, num_axes: int, classes: Iterable[str]) -> bool:
    """Whether a parameter has no weight decay by default: a vector, a bias, or one of a norm or an embedding.

    `name`: within its module, of whose class and bases `classes` are the names, without their modules.
    """
    is_norm_or_embedding = any("Norm" in cls or cls in _EMBEDDINGS for cls in classes)
    return num_axes < 2 or name.endswith("bias") or is_norm_or_embedding


def is_inner_matrix(name: str, num_axes: int, classes: Iterable[str], path: str, head: Iterable[str]) -> bool:
    """Whether Muon updates a parameter by default: a matrix within the model, neither of a norm nor of an embedding,
    nor of the output layer. `path`: of its module; `head`: of the modules that run last."""
    in_head = any(is_within(path, module) for module in head)
    return num_axes == 2 and not is_undecayed(name, num_axes, classes) and not in_head


def settings_of(config: OptimizerConfig, index: int | None, undecayed: bool, inner_matrix: bool) -> GroupSettings:
    """The settings of a parameter whose first match is `index`.

    `undecayed`: as `is_undecayed` says, of any module that has it; `inner_matrix`: as `is_inner_matrix` says, of all.
    """
    algorithm = config.name if inner_matrix else ALGORITHMS[config.name].for_others or config.name
    lr_factor, decay = 1.0, None
    if index is not None:
        group = config.param_groups[index]
        algorithm = group.algorithm or algorithm
        lr_factor = group.lr_factor
        decay = group.weight_decay
    if decay is None:
        decay = 0.0 if undecayed else _weight_decay(config, algorithm)
    return GroupSettings(algorithm, lr_factor * ALGORITHMS[algorithm].lr_factor(config), decay)


def _weight_decay(config: OptimizerConfig, algorithm: str) -> float:
    """The weight decay of an algorithm: the job's if `optimizer.name` decays in the same way, else the default."""
    row = ALGORITHMS[algorithm]
    if config.weight_decay is not None and row.decay == ALGORITHMS[config.name].decay:
        return config.weight_decay
    return row.weight_decay


def group_name(index: int | None, settings: GroupSettings) -> str:
    """What a group is called: `default, weight decay 0.1`, or `default, Muon, weight decay 0.1`."""
    first = "default" if index is None else f"param_groups.{index}"
    algorithm = "" if settings.algorithm == "AdamW" else f", {settings.algorithm}"
    return f"{first}{algorithm}, weight decay {settings.weight_decay:g}"


def is_mixed(config: OptimizerConfig, storage_dtypes: Iterable[str]) -> bool:
    """Whether this package updates parameters that are stored in these dtypes although PyTorch implements their
    algorithm. PyTorch's implementations know one dtype, one rounding and no masters."""
    dtypes = set(storage_dtypes)
    in_other_dtype = config.state_dtype is not None and dtypes != {config.state_dtype}
    return in_other_dtype or config.rounding == "stochastic" or has_master(config, *dtypes)
