"""Gradient accumulation: which collectives FSDP2 runs in each microbatch of a step."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.optim.replica_shards import ReplicaShards


class Accumulation:
    """The choice of FSDP2's collectives for each microbatch, by `[gradient_accumulation]`. The training step calls
    `begin_microbatch` before each microbatch (in a pipeline, before each backward). If the section keeps parameters
    unsharded until the step's last backward, as in ZeRO-2, FSDP2 units do not reshard after forward; `ModelPlan` sets
    this for each unit."""

    def __init__(self, config: GradientAccumulationConfig, replicas: ReplicaShards | None = None):
        """`replicas`: the exchange of gradients between the replicas, if the optimizer is sharded over them; else None.
        The exchange begins during the step's last backward."""
        self._mode, self._keeps_parameters = config.row, bool(config.keep_params_unsharded)
        self._replicas = replicas

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Set which collectives the next backward runs. `is_last`: True for the step's last microbatch."""
        assert isinstance(model, FSDPModule), "parallel.apply must wrap the model before training"
        if self._mode.defers:
            model.set_requires_gradient_sync(is_last or self._mode.reduce_scatters_each)
            model.set_requires_all_reduce(is_last or self._mode.all_reduces_each)
        if self._keeps_parameters:
            model.set_reshard_after_backward(is_last)
        if self._replicas is not None:
            self._replicas.begin_microbatch(is_last)
