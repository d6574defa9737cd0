"""Which blocks are computed again in backward. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.errors import config_error
from titan_launch.plan.types import outermost


def chosen_blocks(blocks: Sequence[str], config: ActivationCheckpointConfig) -> tuple[str, ...]:
    """Paths of the blocks that `[activation_checkpoint]` chooses among all; of blocks within blocks the outer ones.

    Raises ConfigError where there are none although the mode wants some.
    """
    if config.mode == "auto":
        raise ValueError("the mode is not decided yet: resolve `auto` first (plan.resolution)")
    if config.mode == "none":
        return ()
    if not blocks:
        reason = "works on blocks, and none of the model's are known; name them in model.blocks"
        raise config_error(("activation_checkpoint", "mode"), reason, config.mode, also=(("model", "blocks"),))
    outer = outermost(blocks)
    option = selection(config)
    every = 1 if option is None or option == "op" else option
    if every > len(outer):
        reason = f"the model has {len(outer)} blocks, so this would compute none of them again; set at most that"
        raise config_error(("activation_checkpoint", "selective_ac_option"), reason, every)
    return outer[every - 1 :: every]


def selection(config: ActivationCheckpointConfig) -> Literal["op"] | int | None:
    """What `mode = "selective"` selects by; None in the other modes."""
    return config.selective_ac_option if config.mode == "selective" else None
