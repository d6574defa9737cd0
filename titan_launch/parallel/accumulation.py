"""When the gradients of a step's microbatches are communicated.

Every strategy gives the same gradient: each microbatch's loss is already divided by the step's global number of
targets, and FSDP2 only sums. They differ in what is communicated after each microbatch, and in what is held until the
last one. P parameters, S ranks in a shard group, N microbatches, fp32 reduction:

    mode                  reduce-scatters  all-reduces (HSDP)  gradients held between microbatches
    immediate                   N                 N             sharded, 4 P / S bytes
    deferred                    1                 1             whole, 4 P bytes on every rank
    deferred_all_reduce         N                 1             sharded, 4 P / S bytes
"""

from __future__ import annotations

from typing import Protocol

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_launch.config.sections.training import GradientAccumulationConfig


class AccumulationStrategy(Protocol):
    """Told before each microbatch's forward whether it is the step's last."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Set what FSDP2 communicates in the backward to come. The setters used recurse into all units."""


class Immediate:
    """Reduce-scatter, and all-reduce between replicas, after every microbatch: FSDP2's own behaviour."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Nothing to set."""


class Deferred:
    """No gradient communication before the last microbatch; the whole gradients are summed on every rank."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Switch reduce-scatter, and with it all-reduce, on for the last microbatch only."""
        _root(model).set_requires_gradient_sync(is_last)


class DeferredAllReduce:
    """Reduce-scatter after every microbatch, all-reduce between the replicas (HSDP) after the last."""

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Switch the all-reduce on for the last microbatch only."""
        _root(model).set_requires_all_reduce(is_last)


class KeepParamsUnsharded:
    """Around another strategy: parameters stay gathered until the step's last backward, like ZeRO-2.

    The units must not reshard after forward either, which is decided where they are planned.
    """

    def __init__(self, inner: AccumulationStrategy):
        self._inner = inner

    def begin_microbatch(self, model: nn.Module, is_last: bool) -> None:
        """Free the parameters after the last backward only."""
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
    """The strategy that `[gradient_accumulation]` asks for."""
    strategy = STRATEGIES[config.mode]()
    return KeepParamsUnsharded(strategy) if config.keep_params_unsharded else strategy
