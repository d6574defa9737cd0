"""`[lr_scheduler]`: the learning rate as a function of the step."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from titan_launch.config.base import Section


class _Schedule(Section):
    """The keys that every schedule has."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises linearly to its peak. If warm-up and decay take more than
    `training.steps`, warm-up is clipped to `training.steps` and the decay to the steps after warm-up. A log line says
    so."""


class _Decaying(_Schedule):
    """The keys of the schedules that decay."""

    min_lr_factor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The learning rate after the last step, as a fraction of the peak."""


class WarmupStableDecay(_Decaying):
    """Warm-up, a plateau, and a decay at the end."""

    kind: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    """Shape of the schedule."""

    decay_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of `training.steps` at the end over which the rate falls. 0: it stays at its peak."""

    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the fall. `sqrt` is the 1 - sqrt(t) of arXiv:2405.18392."""


class Cosine(_Decaying):
    """Warm-up, then half a cosine down to the end."""

    kind: Literal["cosine"]
    """Shape of the schedule."""


class Linear(_Decaying):
    """Warm-up, then a straight line down to the end."""

    kind: Literal["linear"]
    """Shape of the schedule."""


class Constant(_Schedule):
    """Warm-up, then the peak until the last step."""

    kind: Literal["constant"]
    """Shape of the schedule."""


SchedulerConfig = Annotated[WarmupStableDecay | Cosine | Linear | Constant, Field(discriminator="kind")]
