"""Gradients summed between replicas while backward goes on, on a CPU.

On a GPU FSDP2's all-reduces run on a stream of their own. gloo has none: FSDP2 waits for each, although gloo's threads
could do it alone. Here they are begun, and waited for when backward ends.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_launch.distributed.torch_private import replace_replica_groups, replica_groups, sharded_parameters


def overlap_all_reduces(model: nn.Module) -> None:
    """Let backward go on while a unit's gradients are summed between the replicas (HSDP) of a model on a CPU, which is
    wrapped already and only sums. On an untested release of PyTorch FSDP2 waits for each."""
    begun = _Begun()
    replace_replica_groups(model, lambda group, unit: _Replicas(group, sharded_parameters(unit), begun))


def forget_all_reduces(model: nn.Module) -> None:
    """Wait for none of those that a backward has begun which an error has ended: nobody wants its gradients."""
    for group in replica_groups(model):
        if isinstance(group, _Replicas):
            group.begun.forget()


class _Begun:
    """All-reduces that nothing has waited for yet."""

    def __init__(self) -> None:
        self._works: list[dist.Work] = []
        self._waiting: set[int] = set()

    def add(self, work: dist.Work) -> None:
        """Wait for it when the backward ends that runs: the inner one, where one runs in another."""
        self._works.append(work)
        backward = torch._C._current_graph_task_id()
        if backward not in self._waiting:
            self._waiting.add(backward)
            torch.autograd.Variable._execution_engine.queue_callback(self.wait)

    def wait(self) -> None:
        """For all of them."""
        while self._works:
            self._works.pop(0).wait()
        self._waiting.clear()

    def forget(self) -> None:
        """Them all."""
        self._works.clear()
        self._waiting.clear()


class _Replicas:
    """The group over which FSDP2 sums the gradients of a unit, as far as it needs one. Equal to the true one, under
    which PyTorch finds what it says of it in errors."""

    def __init__(self, group: dist.ProcessGroup, parameters: list[nn.Parameter], begun: _Begun):
        self._group = group
        self._parameters = parameters
        self.begun = begun

    def __eq__(self, other: object) -> bool:
        return self._group == (other._group if isinstance(other, _Replicas) else other)

    def __hash__(self) -> int:
        return hash(self._group)

    def size(self) -> int:
        """The replicas."""
        return self._group.size()

    def allreduce(self, tensors: list[Tensor], options: dist.AllreduceOptions) -> None:
        """Sum over the replicas, in place: complete when backward is, or before this returns."""
        work = self._group.allreduce(tensors, options)
        if self._is_read_at_once(tensors[0]):
            self.begun.wait()
            work.wait()
        else:
            self.begun.add(work)

    def _is_read_at_once(self, reduced: Tensor) -> bool:
        """Whether the sum becomes more than the gradient itself: it is cast to the dtype of the parameters, added to
        what earlier microbatches have left, or shown to hooks. Nor is there an end of backward to wait for in a
        pipeline's reduction."""
        return (
            reduced.dtype != self._parameters[0].dtype
            or any(parameter.grad is not None for parameter in self._parameters)
            or any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in self._parameters)
            or torch._C._current_graph_task_id() == -1
        )
