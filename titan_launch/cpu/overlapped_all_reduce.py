"""All-reduces of gradients between replicas (HSDP) that overlap with backward on a CPU.

The file replaces FSDP2's all-reduce. On a GPU, that all-reduce runs on a separate stream, but on a CPU it blocks
backward. gloo has no streams, but its threads can all-reduce while backward continues. With this file, FSDP2's call
starts the all-reduce, and the end of backward waits for it. If FSDP2 reads the sum at once, the call itself waits; for
example, if earlier microbatches have left gradients (`_is_read_at_once`). Gradients are bitwise equal to those of
FSDP2's own all-reduce (tests/cpu/test_overlapped_all_reduce.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.distributed.torch_private import replace_replica_groups, roots, sharded_parameters


def overlap_all_reduces(model: nn.Module) -> None:
    """Let backward continue while the gradients of a unit are all-reduced between the replicas of a wrapped model.

    Without replicas nothing changes. On an untested release of PyTorch, FSDP2's blocking all-reduce stays.
    """
    for root in roots(model):  # each pipeline stage has its own backward
        replace_replica_groups(root, partial(_OverlappingGroup, _PendingAllReduces()))


class _PendingAllReduces:
    """The pending all-reduces of a model or of a pipeline stage."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []
        self._backwards: set[int] = set()

    def add(self, work: dist.Work) -> None:
        """Let the end of the running backward wait for `work`. If backwards are nested, the innermost one waits."""
        self._works.append(work)
        backward = torch._C._current_graph_task_id()
        if backward not in self._backwards:
            self._backwards.add(backward)
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)

    def wait(self) -> None:
        while self._works:
            self._works.pop(0).wait()
        self._backwards.clear()

    def discard(self) -> None:
        self._works.clear()
        self._backwards.clear()


class _OverlappingGroup:
    """Stand-in for the process group of a unit's replicas, with the methods that FSDP2 calls.

    PyTorch has dicts whose keys are process groups. So the stand-in has the hash of the replaced group, and compares
    equal to this group.
    """

    def __init__(self, pending: _PendingAllReduces, group: dist.ProcessGroup, unit: Any):
        """`group`: the process group over which FSDP2 all-reduces the gradients of `unit`, an FSDP2 parameter group."""
        self._pending = pending
        self._group = group
        self._parameters = sharded_parameters(unit)

    def __eq__(self, other: object) -> bool:
        return self._group == (other._group if isinstance(other, _OverlappingGroup) else other)

    def __hash__(self) -> int:
        return hash(self._group)

    def size(self) -> int:
        return self._group.size()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> None:
        work = self._group.allreduce(tensors, options)
        if self._is_read_at_once(tensors[0]):
            self._pending.wait()
            work.wait()
        else:
            self._pending.add(work)

    def discard(self) -> None:
        """Drop the pending all-reduces. `torch_private.discard_all_reduces` calls this method."""
        self._pending.discard()

    def _is_read_at_once(self, reduced: Tensor) -> bool:
        """Return True if FSDP2 reads the sum before backward ends, or if no backward runs.

        FSDP2 reads the sum in three cases: its dtype is not that of the trained parameters, earlier microbatches have
        left gradients, or parameters have hooks. A pipeline reduces its gradients outside of backward.
        """
        return (
            reduced.dtype != next(parameter.dtype for parameter in self._parameters if parameter.requires_grad)
            or any(parameter.grad is not None for parameter in self._parameters)
            or any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self._parameters)
            or torch._C._current_graph_task_id() == -1
        )
