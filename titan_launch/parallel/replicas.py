"""Gradients summed between replicas while backward goes on, on a CPU.

On a GPU FSDP2's all-reduces run on a stream of their own. gloo has none: FSDP2 waits for each, although gloo's threads
could do it alone. Here they are begun, and waited for when backward ends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from titan_launch.fsdp_state import parameter_groups


def overlap_all_reduces(model: nn.Module) -> None:
    """Let backward go on while a unit's gradients are summed between the replicas (HSDP) of a model on a CPU, which is
    wrapped already."""
    backward = _Backward()
    for unit in parameter_groups(model):
        info: Any = unit.mesh_info
        info.replicate_process_group = _Replicas(info.replicate_process_group, unit, backward)


class _Backward:
    """What the backward that runs has begun and not waited for."""

    def __init__(self) -> None:
        self._graph = -1
        self._begun: list[dist.Work] = []

    def add(self, work: dist.Work) -> None:
        """Wait for it when backward ends."""
        graph = torch._C._current_graph_task_id()
        if graph != self._graph:
            self._graph = graph
            self._begun.clear()  # of a backward that an error has ended, nobody wants the gradients
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)
        self._begun.append(work)

    def wait(self) -> None:
        """For all of it."""
        while self._begun:
            self._begun.pop(0).wait()
        self._graph = -1


class _Replicas:
    """The group over which FSDP2 sums the gradients of a unit, as far as it needs one. Equal to the true one, under
    which PyTorch finds what it says of it in errors."""

    def __init__(self, group: dist.ProcessGroup, unit: FSDPParamGroup, backward: _Backward):
        self._group = group
        self._unit = unit
        self._backward = backward

    def __eq__(self, other: object) -> bool:
        return self._group == (other._group if isinstance(other, _Replicas) else other)

    def __hash__(self) -> int:
        return hash(self._group)

    def size(self) -> int:
        """The replicas."""
        return self._group.size()

    def rank(self) -> int:
        """This one."""
        return self._group.rank()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> None:
        """Sum over the replicas, in place: complete when backward is, or before this returns."""
        work = self._group.allreduce(tensors, options)
        if self._is_read_at_once(tensors[0]):
            self._backward.wait()
            work.wait()
        else:
            self._backward.add(work)

    def _is_read_at_once(self, reduced: Tensor) -> bool:
        """Whether the sum becomes more than the gradient itself: it is cast to the dtype of the parameters, or added to
        what earlier microbatches have left. Nor is there an end of backward to wait for in a pipeline's reduction."""
        return (
            reduced.dtype != self._unit._orig_dtype
            or any(parameter.sharded_param.grad is not None for parameter in self._unit.fsdp_params)
            or torch._C._current_graph_task_id() == -1
        )
