"""Division of a model into pipeline stages.

Each stage is the model's module tree, or a shallow copy of the tree if a rank has several stages. Pass-through modules
replace the modules of other stages. So module paths, names in checkpoints and initial values are those of the whole
model. Model files need no code for stages.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from torch import nn

from titan_launch.plan.types import full_name


class PassThrough(nn.Module):
    """Replacement for a module that another stage holds. The forward returns the first input unchanged."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


def cut(model: nn.Module, stages: Sequence[Collection[str]], others: Collection[str]) -> tuple[nn.Module, ...]:
    """Return one module for each stage of this rank. Also replace the modules of other ranks in `model` by pass-through
    modules, in place.

    `stages`: the paths of the modules of each stage of this rank. `others`: the paths of the modules of other ranks.
    `stages` and `others` together contain the whole pipeline order. Modules outside of the pipeline order have no
    parameters, and are on every stage. The results share their modules with `model`; a single stage is `model` itself.
    """
    pipeline_order = {path for stage in stages for path in stage} | set(others)
    views = [_view(model, set(stage), pipeline_order) for stage in stages] if len(stages) > 1 else [model]
    for path in others:
        model.set_submodule(path, PassThrough())
    return tuple(views)


def _view(module: nn.Module, kept: Collection[str], pipeline_order: Collection[str], path: str = "") -> nn.Module:
    """Return a copy of a module tree, in which pass-through modules replace the modules of `pipeline_order` that are
    not `kept`. A module that is kept, or has no modules of `pipeline_order`, is returned itself. `path`: the module's
    path in the model."""
    if path in pipeline_order:
        return module if path in kept else PassThrough()
    if not any(other.startswith(f"{path}.") or not path for other in pipeline_order):
        return module
    view = copy.copy(module)
    for name, value in vars(module).items():  # hooks that FSDP2 adds to one stage must not run in the others
        if isinstance(value, dict) and "hook" in name:
            vars(view)[name] = value.copy()
    vars(view)["_modules"] = {
        name: None if child is None else _view(child, kept, pipeline_order, full_name(path, name))
        for name, child in module._modules.items()
    }
    return view
