"""Which modules are computed again in backward. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.errors import ConfigError, KeyPath, Problem, config_error, did_you_mean
from titan_launch.globs import matches
from titan_launch.plan.types import Inventory, outermost

_MODE: KeyPath = ("activation_checkpoint", "mode")
_MODULES: KeyPath = ("activation_checkpoint", "modules")


def recomputed_modules(inventory: Inventory, config: ActivationCheckpointConfig) -> tuple[str, ...]:
    """Paths of the modules that `[activation_checkpoint]` has computed again; of modules within modules the outer ones.

    Raises ConfigError where there are none although the mode wants some, and for every glob that matches nothing.
    """
    if not recomputes_modules(config):
        return ()
    candidates = _matched(inventory, config.modules) if config.modules else _blocks(inventory, config)
    option = selection(config)
    every = 1 if option is None or option == "op" else option
    if every > len(candidates):
        what = "the model has" if not config.modules else "activation_checkpoint.modules matches"
        them = "blocks" if not config.modules else "modules"
        reason = f"{what} {len(candidates)} {them}, so this would compute none of them again; set at most that"
        raise config_error(("activation_checkpoint", "selective_ac_option"), reason, every)
    return candidates[every - 1 :: every]


def recomputes_modules(config: ActivationCheckpointConfig) -> bool:
    """Whether modules are computed again. (Under a memory budget the compiler chooses operations.)"""
    if config.mode == "auto":
        raise ValueError("the mode is not decided yet: resolve `auto` first (plan.resolution)")
    return config.mode not in ("none", "memory_budget")


def selection(config: ActivationCheckpointConfig) -> Literal["op"] | int | None:
    """What `mode = "selective"` selects by; None in the other modes."""
    return config.selective_ac_option if config.mode == "selective" else None


def _blocks(inventory: Inventory, config: ActivationCheckpointConfig) -> tuple[str, ...]:
    if not inventory.blocks:
        reason = (
            "works on blocks, and none of the model's are known; name them in model.blocks, or others in "
            "activation_checkpoint.modules"
        )
        raise config_error(_MODE, reason, config.mode, also=(("model", "blocks"), _MODULES))
    return outermost(inventory.blocks)


def _matched(inventory: Inventory, patterns: Sequence[str]) -> tuple[str, ...]:
    """A module with several parents, which is matched under any of its paths, stands under the first."""
    problems = list(_unused(inventory, patterns))
    if problems:
        raise ConfigError(problems)
    matched = {
        module.same_as or module.path
        for module in inventory.modules
        if module.path and module.has_forward and any(matches(pattern, module.path) for pattern in patterns)
    }
    return outermost([module.path for module in inventory.modules if module.path in matched])


def _unused(inventory: Inventory, patterns: Sequence[str]) -> Iterator[Problem]:
    runnable = [module.path for module in inventory.modules if module.path and module.has_forward]
    for index, pattern in enumerate(patterns):
        if any(matches(pattern, path) for path in runnable):
            continue
        container = next((m.path for m in inventory.modules if m.path and matches(pattern, m.path)), None)
        reason = (
            f"matches no module of the model{did_you_mean(pattern, runnable)}"
            if container is None
            else f'matches only {container}, a container without a forward; did you mean "{container}.*"?'
        )
        yield Problem((*_MODULES, index), reason, pattern)
