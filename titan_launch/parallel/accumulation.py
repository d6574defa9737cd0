"""Gradient accumulation modes: when the gradients of a step's microbatches are communicated.

All modes give the same gradient, because each microbatch's loss is already divided by the step's global number of
targets, and FSDP2 only sums. The modes differ in communication after each microbatch and in the memory of gradients
between microbatches. With P parameters, S ranks in a shard group, N microbatches and fp32 reduction, per unit:

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


class AccumulationStrategy(Protocol):
    """A gradient accumulation mode. It is called before each microbatch's forward."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Set the communication of the next backward in all FSDP2 units. `is_last`: the step's last microbatch."""


class Immediate:
    """The mode with a reduce-scatter, and an all-reduce between replicas, after every microbatch: FSDP2's default."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Do nothing."""


class Deferred:
    """The mode without gradient communication before the last microbatch. Unsharded gradients add up on every rank."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Enable reduce-scatter and all-reduce for the last microbatch only."""
        _root(model).set_requires_gradient_sync(is_last)


class DeferredAllReduce:
    """The mode with a reduce-scatter after every microbatch, and one all-reduce between replicas after the last."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Enable the all-reduce for the last microbatch only."""
        _root(model).set_requires_all_reduce(is_last)


class KeepParamsUnsharded:
    """A wrapper of another mode: parameters stay unsharded until the step's last backward, as in ZeRO-2.

    The units must not reshard after forward either; the plan of the units sets that.
    """

    def __init__(self, inner: AccumulationStrategy):
        self._inner = inner

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Enable resharding after backward for the last microbatch only."""
        self._inner.begin_microbatch(model, is_last)
        _root(model).set_reshard_after_backward(is_last)


def _root(model: nn.Module) -> FSDPModule:
    assert isinstance(model, FSDPModule), "the model is wrapped by parallel.apply before it is trained"
    return model


STRATEGIES: dict[str, type[AccumulationStrategy]] = {
    "immediate": Immediate,
    "deferred": Deferred,
    "deferred_all_reduce": DeferredAllReduce,
}


def build_strategy(config: GradientAccumulationConfig) -> AccumulationStrategy:
    """Return the strategy of `[gradient_accumulation]`."""
    strategy = STRATEGIES[config.mode]()
    return KeepParamsUnsharded(strategy) if config.keep_params_unsharded else strategy
