"""A model divided into pipeline stages. Each stage is the model with pass-through modules for those of other stages.

So module paths, names in checkpoints and initial values are those of the whole model, and model files know nothing of
stages.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn


class PassThrough(nn.Module):
    """Replacement of a module that another stage holds."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the first input."""
        return x


def cut(model: nn.Module, stages: Sequence[Collection[str]], others: Collection[str]) -> tuple[nn.Module, ...]:
    """Replace the modules `others` of a model in place, and return the stages, which share the remaining modules.

    `stages`, `others`: paths of modules, together the whole pipeline order. A single stage is the model itself. Modules
    outside of the pipeline order have no parameters, and are on every stage.
    """
    pipeline_order = {path for stage in stages for path in stage} | set(others)
    views = [_view(model, set(stage), pipeline_order) for stage in stages] if len(stages) > 1 else [model]
    for path in others:
        model.set_submodule(path, PassThrough())
    return tuple(views)


def _view(module: nn.Module, kept: Collection[str], pipeline_order: Collection[str], path: str = "") -> nn.Module:
    """Return a copy of a module without the modules that are not `kept`; the module itself if it loses none."""
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
