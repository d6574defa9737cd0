"""FSDP2's collectives, counted where it calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from titan_launch.fsdp_state import parameter_groups
from titan_launch.patches import replaced
from titan_launch.plan.traffic import Collectives, Traffic


class TrafficCount:
    """What has been communicated so far."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def take(self) -> Traffic:
        """What was communicated since the last call."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    def add(self, traffic: Traffic) -> None:
        """One more collective, or several."""
        self.traffic += traffic


@contextmanager
def count_collectives(model: nn.Module) -> Iterator[TrafficCount]:
    """Count what a wrapped model communicates on this rank until the end of the block; nothing is left on it then.

    Parameters that units gather, gradients that they reduce, and sharded gradients that replicas sum (HSDP) count, with
    the bytes of the buffers that `titan_launch.plan.traffic.Traffic` names. What is exchanged along other axes
    (activations, keys and values) does not, nor do the target count, clipping, BatchNorm's statistics and metrics.
    Costs nothing beside the collectives; nothing waits for the device.
    """
    count = TrafficCount()
    with ExitStack() as stack:
        for group in parameter_groups(model):
            all_gather = _Counted(group._all_gather_comm, count, _all_gather)
            reduce_scatter = _Counted(group._reduce_scatter_comm, count, _reduce_scatter)
            stack.enter_context(replaced(group, "_all_gather_comm", all_gather))
            stack.enter_context(replaced(group, "_reduce_scatter_comm", reduce_scatter))
            if group._is_hsdp:  # else FSDP2 would call the hook for what no all-reduce has summed
                hook = partial(_count_all_reduce, count, group._all_reduce_hook)
                stack.enter_context(replaced(group, "_all_reduce_hook", hook))
        yield count


class _Counted:
    """FSDP2's own collective, or one that was put in its place, counted."""

    def __init__(self, inner: Any, count: TrafficCount, measure: Callable[[Tensor, Tensor], Traffic]):
        self._inner = inner
        self._count = count
        self._measure = measure
        self.allocate = inner.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._count.add(self._measure(output_tensor, input_tensor))
        return self._inner(output_tensor, input_tensor, *args, **kwargs)


def _all_gather(received: Tensor, sent: Tensor) -> Traffic:
    return Traffic(Collectives(all_gathers=1), all_gather_bytes=received.nbytes)


def _reduce_scatter(received: Tensor, sent: Tensor) -> Traffic:
    return Traffic(Collectives(reduce_scatters=1), reduce_scatter_bytes=sent.nbytes)


def _count_all_reduce(count: TrafficCount, before: Any, reduced: Tensor) -> None:
    """FSDP2 calls this after every all-reduce between replicas, in the stream of the all-reduce."""
    count.add(Traffic(Collectives(all_reduces=1), all_reduce_bytes=reduced.nbytes))
    if before is not None:
        before(reduced)
