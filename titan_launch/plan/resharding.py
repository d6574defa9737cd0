"""Which units free their parameters after forward. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.parallelism import ParallelismConfig


@dataclass(frozen=True)
class Resharding:
    """Whether units free their parameters after forward (`reshard_after_forward`)."""

    blocks: bool
    """The blocks, and units inside a block."""

    late: bool
    """Units that backward needs first: the last block, the head, and those that reach over several blocks."""


def plan_resharding(parallelism: ParallelismConfig, accumulation: GradientAccumulationConfig) -> Resharding:
    """What `[parallelism]` and `[gradient_accumulation]` say of it."""
    if accumulation.mode == "auto" and accumulation.keep_params_unsharded is None:
        raise ValueError("whether parameters are kept is not decided yet: resolve `auto` first (plan.resolution)")
    choice = parallelism.fsdp_reshard_after_forward
    if accumulation.keep_params_unsharded or choice == "never":
        return Resharding(blocks=False, late=False)
    return Resharding(blocks=True, late=choice == "always")
