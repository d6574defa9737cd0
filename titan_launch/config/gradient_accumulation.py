"""`[gradient_accumulation]`: when the gradients of a step's microbatches are communicated."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Section


class GradientAccumulationConfig(Section):
    """When the gradients of a step's microbatches are communicated. The number of microbatches follows from
    `training.global_batch_size`; the loss and its gradient are the same in every mode."""

    mode: Literal["immediate", "deferred", "deferred_all_reduce"] = "immediate"
    """`immediate`: reduce-scatter after every microbatch; only sharded gradients are held. `deferred`: only after the
    last; least traffic, but every rank holds the full gradients (4 bytes per parameter, however many ranks there are).
    `deferred_all_reduce` (HSDP only): reduce-scatter within the replica after every microbatch, all-reduce between the
    replicas after the last; sharded gradients are held."""

    keep_params_unsharded: bool = False
    """Gather the parameters once a step instead of twice a microbatch, and hold them whole (`param_dtype`) until the
    last backward, like ZeRO-2."""
