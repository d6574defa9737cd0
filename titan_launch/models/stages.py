"""A model cut into pipeline stages: each is the whole model with nothing in the place of what the others hold.

So module paths, and with them the names in checkpoints and the initial values, are those of the whole model, and the
model file stays that of a plain model.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn


class PassThrough(nn.Module):
    """In the place of a module that another stage holds."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """The first input as it is."""
        return x


def cut(model: nn.Module, stages: Sequence[Collection[str]], others: Collection[str]) -> tuple[nn.Module, ...]:
    """Take out of a model what is on `others`, in place, and return its stages: modules that share what is left.

    `stages`, `others`: paths of the modules of the model's chain; together they are all of it. With one stage, that is
    the model itself. Modules outside of the chain, which have no parameters, are on every stage.
    """
    pipeline_order = {path for stage in stages for path in stage} | set(others)
    views = [_view(model, set(stage), pipeline_order) for stage in stages] if len(stages) > 1 else [model]
    for path in others:
        model.set_submodule(path, PassThrough())
    return tuple(views)


def _view(module: nn.Module, kept: Collection[str], pipeline_order: Collection[str], path: str = "") -> nn.Module:
    """The module without what is not kept; itself, where nothing is inside of it that could be cut off."""
    if path in pipeline_order:
        return module if path in kept else PassThrough()
    if not any(other.startswith(f"{path}.") or not path for other in pipeline_order):
        return module
    view = copy.copy(module)
    for name, value in vars(module).items():
        if isinstance(value, dict) and "hook" in name:
            vars(view)[name] = value.copy()
    vars(view)["_modules"] = {
        name: None if child is None else _view(child, kept, pipeline_order, f"{path}.{name}" if path else name)
        for name, child in module._modules.items()
    }
    return view
