"""The gradient accumulation modes: a table that accumulation, rules, `auto`, traffic and the replay of a step read. No
torch.

A mode is a row of `ACCUMULATION_MODES`. To add one, add the row, and describe it in the docstring of
`GradientAccumulationConfig.mode` and in docs/how_to/gradient_accumulation.md; tests compare both with the table.

All modes give the same gradient: each microbatch's loss is already divided by the step's global number of targets, and
FSDP2 only sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class AccumulationMode:
    """When the gradients of a step's microbatches are communicated: after every microbatch, or after the last one."""

    reduce_scatters_each: bool
    """Reduce-scatter after every microbatch. Otherwise every rank sums unsharded gradients until the last one."""

    all_reduces_each: bool
    """All-reduce between the replicas (HSDP) after every microbatch."""

    @property
    def defers(self) -> bool:
        """True if gradients of several microbatches are summed before all of their communication, in the reduce
        dtype."""
        return not (self.reduce_scatters_each and self.all_reduces_each)

    @property
    def needs_all_reduces(self) -> bool:
        """True if the mode differs from `immediate` only where replicas all-reduce."""
        return self.reduce_scatters_each and not self.all_reduces_each


ACCUMULATION_MODES: Mapping[str, AccumulationMode] = {
    "immediate": AccumulationMode(reduce_scatters_each=True, all_reduces_each=True),
    "deferred_all_reduce": AccumulationMode(reduce_scatters_each=True, all_reduces_each=False),
    "deferred": AccumulationMode(reduce_scatters_each=False, all_reduces_each=False),
}
"""The modes by name. Later ones send less."""
