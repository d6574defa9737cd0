"""`[lr_scheduler]`: the learning rate as a function of the step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.base import Section


class _Schedule(Section):
    """The keys that every schedule has."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly to its peak."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate after the last step, as a fraction of the peak."""


class WarmupStableDecay(_Schedule):
    """Warm-up, a plateau, and a decay at the end."""

    kind: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    """Shape of the schedule."""

    decay_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of `training.steps` at the end over which the rate falls. 0: it stays at its peak."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the fall. `sqrt` is the 1 - sqrt(t) of arXiv:2405.18392."""


class Cosine(_Schedule):
    """Warm-up, then half a cosine down to the end."""

    kind: Literal["cosine"]
    """Shape of the schedule."""


class Linear(_Schedule):
    """Warm-up, then a straight line down to the end."""

    kind: Literal["linear"]
    """Shape of the schedule."""


SchedulerConfig = Annotated[WarmupStableDecay | Cosine | Linear, Field(discriminator="kind")]
