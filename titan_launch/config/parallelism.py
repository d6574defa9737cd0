"""`[parallelism]`: how the ranks are divided."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from titan_launch.config.base import Section


def _positive_or_rest(degree: int) -> int:
    if degree == -1 or degree >= 1:
        return degree
    raise ValueError("must be at least 1, or -1 for the rest of the ranks")


class ParallelismConfig(Section):
    """How the ranks are divided. The degrees multiply to the number of ranks."""

    data_parallel_replicate_degree: Annotated[int, Field(ge=1)] = 1
    """Replicas of the model. With more than one, parameters are sharded within a replica only (HSDP)."""

    data_parallel_shard_degree: Annotated[int, AfterValidator(_positive_or_rest)] = -1
    """Ranks that one replica's parameters are sharded over (FSDP2). -1: the rest of the ranks."""

    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Whether gathered parameters are freed after forward and gathered again for backward. `default`: those of the
    blocks, not those of the head, which backward needs at once. `always`: the head's too. `never`: none."""
