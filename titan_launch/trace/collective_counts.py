"""What ranks exchange that work on the same samples, counted where they call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titan_launch.distributed.mesh import Mesh
from titan_launch.metrics.traffic import TrafficCount
from titan_launch.plan.communication import Exchange, Traffic


@contextmanager
def count_exchanges(mesh: Mesh, count: TrafficCount) -> Iterator[None]:
    """Add to `count` what this rank exchanges along the tensor, context and pipeline axes, until the end of the block.

    Bytes are those of ring algorithms (see `plan.communication`). Collectives over other groups do not count.
    """
    with _Exchanges(mesh, count):
        yield


_SENT_SHARE: dict[str, Callable[[int], Fraction]] = {
    "all_reduce": lambda n: Fraction(2 * (n - 1), n),
    "all_gather_into_tensor": lambda n: Fraction(n - 1),
    "reduce_scatter_tensor": lambda n: Fraction(n - 1, n),
    "all_to_all_single": lambda n: Fraction(n - 1, n),
    "broadcast": lambda n: Fraction(1),
    "send": lambda n: Fraction(1),
}
"""By functional collective, and by what is sent to one rank: what a rank of n sends, as a share of its input."""

_IN_PLACE = {
    "allreduce_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather_into_tensor", 1),
    "allgather_": ("all_gather_into_tensor", 1),
    "_reduce_scatter_base_": ("reduce_scatter_tensor", 1),
    "reduce_scatter_": ("reduce_scatter_tensor", 1),
    "alltoall_base_": ("all_to_all_single", 1),
    "alltoall_": ("all_to_all_single", 1),
    "broadcast_": ("broadcast", 0),
    "send": ("send", 0),
}
"""By operation of a process group: which one of these it is, and which argument is its input."""

_SENDS_NOTHING = ("recv_", "barrier", "wait_tensor", "_wrap_tensor_autograd")


class _Exchanges(TorchDispatchMode):
    """Sees every collective, functional or of a process group."""

    def __init__(self, mesh: Mesh, count: TrafficCount):
        super().__init__()
        axes = {"tensor": mesh.tensor, "context": mesh.context, "pipeline": mesh.pipeline}
        self._axes: dict[str, tuple[str, int]] = {
            axis.get_group().group_name: (name, axis.size()) for name, axis in axes.items() if axis
        }
        self._count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # it comes back as operations on local tensors
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional"):
            self._see(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _see(self, operation: str, args: Sequence[Any]) -> None:
        if operation in _SENDS_NOTHING or (group := _group_of(args)) not in self._axes:
            return
        axis, size = self._axes[group]
        name, index = _IN_PLACE.get(operation, (operation, 0))
        sent = _num_bytes(args[index]) * _SENT_SHARE[name](size)
        counted: dict[str, Any] = {axis: Exchange(1, round(sent))}
        self._count.add(Traffic(**counted))


def _group_of(args: Sequence[Any]) -> str:
    """The name of a collective's group: functional ones are given it, as their last text, the others the group."""
    names = [arg for arg in args if isinstance(arg, str)]
    if names:
        return names[-1]
    group = next(arg for arg in args if isinstance(arg, torch.ScriptObject))  # before it: tensors; after it: the sum
    name: str = dist.ProcessGroup.unbox(group).group_name
    return name


def _num_bytes(given: Tensor | Sequence[Any]) -> int:
    return given.nbytes if isinstance(given, Tensor) else sum(map(_num_bytes, given))
