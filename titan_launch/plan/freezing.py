"""Frozen parameters: the step from which each parameter of a model is trained. This module does not import torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from titan_launch.config.sections.training import TrainingConfig
from titan_launch.core.errors import ConfigError, KeyPath, Problem
from titan_launch.core.globs import matches
from titan_launch.plan.types import Inventory, TensorInfo, full_name
from titan_launch.plan.units.rule_assignment import suggestion

ADAPTER = "lora"
"""Name of the submodule that is the adapter of a module. In `Experts`, the submodule is a container with an adapter for
each weight."""


def is_adapter(name: str) -> bool:
    """Return True if a parameter with the full name `name` belongs to an adapter. Only the name is checked."""
    return ADAPTER in name.split(".")[-3:-1]


@dataclass(frozen=True)
class Freezing:
    """The settings of `[training]` that freeze parameters. If the model has adapters, the parameters outside of the
    adapters are frozen, unless `training.trainable` or `training.unfreeze` names them."""

    training: TrainingConfig
    has_adapters: bool = False

    def trained_from(self, names: Sequence[str], requires_grad: bool) -> int | None:
        """Return the number of steps after which a parameter is trained: 0 if it is always trained, None if never.
        `names`: all full names of the parameter. `requires_grad`: the parameter's own setting in the model."""
        training = self.training
        steps = [row.after_step for row in training.unfreeze if matches_any(row.match, names)]
        if steps:
            return min(steps)
        if self.has_adapters and any(map(is_adapter, names)):
            return 0
        if training.trainable is not None:
            return 0 if any(matches_any(glob, names) for glob in training.trainable) else None
        is_frozen = self.has_adapters or any(matches_any(glob, names) for glob in training.frozen)
        return 0 if requires_grad and not is_frozen else None

    def check(self, parameters: Mapping[str, int | None]) -> None:
        """Raise ConfigError for globs that match no parameter, and if no parameter is trained in the first step.
        `parameters`: the results of `trained_from` by full name."""
        training = self.training
        globs = dict[KeyPath, str]()
        globs |= {("training", "trainable", index): glob for index, glob in enumerate(training.trainable or ())}
        globs |= {("training", "frozen", index): glob for index, glob in enumerate(training.frozen)}
        globs |= {("training", "unfreeze", index, "match"): row.match for index, row in enumerate(training.unfreeze)}
        problems = [
            Problem(key, f"matches no parameter{suggestion(glob, parameters)}", glob)
            for key, glob in globs.items()
            if not matches_any(glob, parameters)
        ]
        if not problems and all(first != 0 for first in parameters.values()):
            problems.append(self._nothing_trained())
        if problems:
            raise ConfigError(problems)

    def _nothing_trained(self) -> Problem:
        training = self.training
        reason = "leaves no parameter to train in the first step"
        also: tuple[KeyPath, ...] = (("training", "unfreeze"),)
        if training.trainable is not None:
            remedy = "name more parameters"
            remedy += ", or name fewer parameters in training.unfreeze" if training.unfreeze else ""
            return Problem(("training", "trainable"), f"{reason}; {remedy}", training.trainable, also)
        if training.frozen:
            remedy = "name fewer parameters" + (", here or in training.unfreeze" if training.unfreeze else "")
            return Problem(("training", "frozen"), f"{reason}; {remedy}", training.frozen, also)
        if training.unfreeze:
            return Problem(("training", "unfreeze"), f"{reason}; name fewer parameters")
        reason = "all parameters of the model have requires_grad = False; name parameters in training.trainable"
        return Problem(("model", "name"), reason)


def freeze(inventory: Inventory, training: TrainingConfig, has_adapters: bool = False) -> Inventory:
    """Return the inventory with `requires_grad` and `trained_from` of its parameters as `[training]` sets them. Raises
    ConfigError as `Freezing.check` does."""
    freezing, names = Freezing(training, has_adapters), defaultdict[str, list[str]](list)
    for name, info in inventory.parameters.items():
        names[info.tied_to or name].append(name)
    decisions = {
        name: freezing.trained_from(names[info.tied_to or name], info.requires_grad)
        for name, info in inventory.parameters.items()
    }
    freezing.check(decisions)

    def decided(path: str, info: TensorInfo) -> TensorInfo:
        step = decisions[full_name(path, info.name)]
        return replace(info, requires_grad=step is not None, trained_from=step or 0)

    modules = (
        replace(module, parameters=tuple(decided(module.path, info) for info in module.parameters))
        for module in inventory.modules
    )
    return replace(inventory, modules=tuple(modules))


def matches_any(glob: str, names: Iterable[str]) -> bool:
    """Return True if a glob matches one of the full names of a parameter."""
    return any(matches(glob, name) for name in names)
