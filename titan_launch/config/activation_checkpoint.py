"""`[activation_checkpoint]`: activations that are computed again in backward instead of kept."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.base import Array, Section


class ActivationCheckpointConfig(Section):
    """Activations of the model's blocks that are computed again in backward instead of kept: less memory for more time.
    Losses, gradients and running statistics stay the same, bit for bit, where nothing is compiled."""

    mode: Literal["none", "full", "selective", "memory_budget", "auto"] = "none"
    """`none`: everything that backward needs is kept. `full`: of each block only its inputs are kept; one forward more
    per step. `selective`: as `selective_ac_option` says. `memory_budget`: the compiler chooses what is kept, within
    `memory_budget`. `auto`: of `none`, `selective` (`"op"`) and `full`, the one with the shortest predicted step among
    those whose predicted memory fits; see `gradient_accumulation.mode`."""

    selective_ac_option: Literal["op"] | Annotated[int, Field(ge=1)] = "op"
    """For `mode = "selective"`. `"op"`: of each block the results of costly operations (attention, convolutions, every
    second matrix product) are kept too, and the cheap ones are computed again. A number k: every k-th block is computed
    again, the others are kept."""

    modules: Array[str] = ()
    """Globs of the modules that are computed again in place of the blocks, such as `["layers.*.feed_forward"]`; of
    modules within others that match, the outer ones. Default: the blocks."""

    memory_budget: Annotated[float, Field(gt=0, le=1)] = 0.5
    """For `mode = "memory_budget"`: the share that may be kept of what a compiled graph would keep for backward: 1 is
    all of it, near 0 nothing but the graph's inputs. The cheapest operations that bring it there are computed again."""
