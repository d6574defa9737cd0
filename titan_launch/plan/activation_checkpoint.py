"""The modules that activation checkpointing recomputes in backward. No torch."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.core.errors import KeyPath, config_error
from titan_launch.plan.types import Inventory, outermost
from titan_launch.plan.units.rule_assignment import matched_modules

_MODE: KeyPath = ("activation_checkpoint", "mode")
_MODULES: KeyPath = ("activation_checkpoint", "modules")


def checkpointed_modules(inventory: Inventory, config: ActivationCheckpointConfig) -> tuple[str, ...]:
    """Return the paths of the checkpointed modules; of nested modules, only the outer ones.

    Raises ConfigError if the mode needs modules and there are none, and for every glob that matches nothing.
    """
    if not checkpoints_modules(config):
        return ()
    candidates = (
        outermost(matched_modules(inventory, config.modules, _MODULES))
        if config.modules
        else _blocks(inventory, config)
    )
    option = selection(config)
    every = 1 if option is None or option == "op" else option
    if every > len(candidates):
        what = "the model has" if not config.modules else "activation_checkpoint.modules matches"
        them = "blocks" if not config.modules else "modules"
        reason = f"{what} {len(candidates)} {them}, so this would checkpoint none of them; set at most that number"
        raise config_error(("activation_checkpoint", "selective_ac_option"), reason, every)
    return candidates[every - 1 :: every]


def checkpoints_modules(config: ActivationCheckpointConfig) -> bool:
    """Return whether modules are checkpointed. (With a memory budget, the compiler chooses operations.)"""
    if config.mode == "auto":
        raise ValueError("activation_checkpoint.mode is still `auto`: resolve `auto` first (plan.auto_mode)")
    return config.mode not in ("none", "memory_budget")


def selection(config: ActivationCheckpointConfig) -> Literal["op"] | int | None:
    """Return the option of `mode = "selective"`; None in the other modes."""
    return config.selective_ac_option if config.mode == "selective" else None


def _blocks(inventory: Inventory, config: ActivationCheckpointConfig) -> tuple[str, ...]:
    if not inventory.blocks:
        reason = (
            "works on blocks, and the model's blocks are unknown; name them in model.blocks, or name modules in "
            "activation_checkpoint.modules"
        )
        raise config_error(_MODE, reason, config.mode, also=(("model", "blocks"), _MODULES))
    return outermost(inventory.blocks)
