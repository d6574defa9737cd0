"""A model without some of its blocks."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from titan_launch.plan.types import parent

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def remove_blocks(model: nn.Module, removed: Iterable[str]) -> None:
    """Take blocks out of the containers they are in, in place. Those that stay keep their names: a container has gaps.

    Raises ValueError for a block that is not in a container, which a model would miss.
    """
    for path in removed:
        container = model.get_submodule(parent(path))
        if not isinstance(container, _CONTAINERS):
            raise ValueError(f"{path} is an attribute of a {type(container).__name__}")
        delattr(container, path.rpartition(".")[2])
