"""`[batchnorm]`: what the statistics of BatchNorm layers are taken over."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Section


class BatchNormConfig(Section):
    """What the statistics of BatchNorm layers are taken over. Without effect on a model that has none."""

    statistics: Literal["local", "synchronized"] = "local"
    """`local`: each rank normalizes its microbatch by that microbatch's own mean and variance. `synchronized`: by those
    of all data-parallel ranks' microbatches together, so that N ranks train as one with N times the batch; one small
    all-gather per layer in forward, and one all-reduce in backward."""

    momentum_per: Literal["microbatch", "step"] = "microbatch"
    """What a layer's `momentum`, the weight of new statistics in the running ones, is meant for. `step`: the
    microbatches of a step together have that weight, however many there are."""
