"""`[gradient_accumulation]`: when the gradients of a step's microbatches are communicated."""

from __future__ import annotations

from typing import Literal

from titan_launch.config.base import Section


class GradientAccumulationConfig(Section):
    """When the gradients of a step's microbatches are communicated. The number of microbatches follows from
    `training.global_batch_size`; the loss and its gradient are the same in every mode."""

    mode: Literal["immediate", "deferred", "deferred_all_reduce", "auto"] = "immediate"
    """`immediate`: reduce-scatter after every microbatch; only sharded gradients are held. `deferred`: only after the
    last; least traffic, but every rank holds the full gradients (4 bytes per parameter, however many ranks there are).
    `deferred_all_reduce` (HSDP only): reduce-scatter within the replica after every microbatch, all-reduce between the
    replicas after the last; sharded gradients are held. `auto`: of these, the one that communicates least among those
    whose predicted memory fits (`plan` shows which and why); a run records what was chosen, and keeps it on resume."""

    keep_params_unsharded: bool | None = None
    """Gather the parameters once a step instead of twice a microbatch, and hold them whole (`param_dtype`) until the
    last backward, like ZeRO-2. Default: no; with `mode = "auto"`, if that fits."""
