"""Gradient accumulation modes: when the gradients of a step's microbatches are communicated.

All modes give the same gradient: each microbatch's loss is already divided by the step's global number of targets, and
FSDP2 only sums. The modes differ in the number of collectives and in the memory for gradients between microbatches. The
table is for one FSDP2 unit with P parameters, S ranks in a shard group, N microbatches and fp32 reduction:

    mode                  reduce-scatters  all-reduces (HSDP)  gradients held between microbatches
    immediate                   N                 N             sharded, 4 P / S bytes
    deferred                    1                 1             unsharded, 4 P bytes on every rank
    deferred_all_reduce         N                 1             sharded, 4 P / S bytes
"""

from __future__ import annotations

from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.optim.replica_shards import ReplicaShards


class AccumulationStrategy(Protocol):
    """A gradient accumulation mode. The training step calls `begin_microbatch` before each forward."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Set which collectives the next backward runs. `is_last`: True for the step's last microbatch."""


class Immediate:
    """FSDP2's default: a reduce-scatter, and an all-reduce between replicas, after every microbatch."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Do nothing."""


class Deferred:
    """Gradients are communicated only after the last microbatch. Until then every rank sums unsharded gradients."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Enable reduce-scatter and all-reduce for the last microbatch only."""
        _root(model).set_requires_gradient_sync(is_last)


class DeferredAllReduce:
    """A reduce-scatter after every microbatch, but an all-reduce between replicas only after the last one."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Enable the all-reduce for the last microbatch only."""
        _root(model).set_requires_all_reduce(is_last)


class KeepParamsUnsharded:
    """A wrapper around a gradient accumulation mode. It keeps parameters unsharded until the step's last backward, as
    in ZeRO-2.

    The FSDP2 units must not reshard after forward. `ModelPlan` sets this for each unit.
    """

    def __init__(self, inner: AccumulationStrategy):
        self._inner = inner

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Enable resharding after backward for the last microbatch only."""
        self._inner.begin_microbatch(model, is_last)
        _root(model).set_reshard_after_backward(is_last)


class ExchangedAsReduced:
    """A wrapper around a gradient accumulation mode. It lets gradients leave for the exchange between the replicas
    during the step's last backward, if the optimizer is sharded over them."""

    def __init__(self, inner: AccumulationStrategy, replicas: ReplicaShards):
        self._inner = inner
        self._replicas = replicas

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Enable the exchange for the last microbatch only."""
        self._inner.begin_microbatch(model, is_last)
        self._replicas.begin_microbatch(is_last)


def _root(model: nn.Module) -> FSDPModule:
    assert isinstance(model, FSDPModule), "parallel.apply must wrap the model before training"
    return model


STRATEGIES: dict[str, type[AccumulationStrategy]] = {
    "immediate": Immediate,
    "deferred": Deferred,
    "deferred_all_reduce": DeferredAllReduce,
}


def build_strategy(config: GradientAccumulationConfig, replicas: ReplicaShards | None = None) -> AccumulationStrategy:
    """Return the strategy of `[gradient_accumulation]`. `replicas`: the exchange of an optimizer that is sharded over
    replicas."""
    strategy: AccumulationStrategy = STRATEGIES[config.mode]()
    if config.keep_params_unsharded:
        strategy = KeepParamsUnsharded(strategy)
    return strategy if replicas is None else ExchangedAsReduced(strategy, replicas)
