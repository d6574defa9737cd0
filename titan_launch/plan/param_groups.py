"""Which parameters the optimizer updates together: by their paths, and by whether they decay. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from titan_launch.config.optimizer import OptimizerConfig, ParamGroup
from titan_launch.globs import matches

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


def settings_of(config: OptimizerConfig, index: int | None, undecayed: bool) -> dict[str, float]:
    """Learning-rate factor and weight decay of the parameters with the same first match and the same default decay."""
    default_decay = 0.0 if undecayed else config.weight_decay
    if index is None:
        return {"lr_factor": 1.0, "weight_decay": default_decay}
    group = config.param_groups[index]
    decay = default_decay if group.weight_decay is None else group.weight_decay
    return {"lr_factor": group.lr_factor, "weight_decay": decay}


def group_name(index: int | None, settings: dict[str, float]) -> str:
    """What a group is called: `default, weight decay 0.1`."""
    return f"{'default' if index is None else f'param_groups.{index}'}, weight decay {settings['weight_decay']:g}"
