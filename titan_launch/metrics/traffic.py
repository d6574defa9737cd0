"""FSDP2's collectives, counted where it calls them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from titan_launch.plan.traffic import Collectives, Traffic
from titan_launch.torch_private import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, collectives_watched, parameter_groups


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

    def see(kind: str, output: Tensor, sent: Tensor) -> None:
        count.add(_traffic_of(kind, output, sent))

    with ExitStack() as stack:
        for group in parameter_groups(model):
            stack.enter_context(collectives_watched(group, see))
        yield count


def _traffic_of(kind: str, output: Tensor, sent: Tensor) -> Traffic:
    """Return one collective with the bytes of the larger of its buffers."""
    return {
        ALL_GATHER: Traffic(Collectives(all_gathers=1), all_gather_bytes=output.nbytes),
        REDUCE_SCATTER: Traffic(Collectives(reduce_scatters=1), reduce_scatter_bytes=sent.nbytes),
        ALL_REDUCE: Traffic(Collectives(all_reduces=1), all_reduce_bytes=output.nbytes),
    }[kind]
