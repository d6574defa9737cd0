"""A process group of any size that needs only one process, for traces and dry runs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from titan_launch.core.patches import loggers_silenced, replaced
from titan_launch.distributed.torch_private import clear_mesh_caches


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Run the `with` block as rank `rank` of `world_size`. Collectives return at once, and their results have no data
    of other ranks.

    The default is rank 0, which has the largest shards. Raises RuntimeError if this process already has a process
    group, because FSDP2 and the mesh would use that group.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # this import registers the backend `fake`

    if dist.is_initialized():
        raise RuntimeError(
            "this process has a process group, but a trace creates its own; trace in another process, or before "
            "init_process_group"
        )
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            for name in (name for name in _WITHOUT_VOTE if hasattr(PipelineStage, name)):
                stack.enter_context(replaced(PipelineStage, name, _WITHOUT_VOTE[name]))
            yield
    finally:
        dist.destroy_process_group()
        clear_mesh_caches()  # cached entries refer to this group, but would match later meshes


_WITHOUT_VOTE = {
    "_warmup_forward_vote": lambda *_, **__: torch.tensor([1], dtype=torch.int32),
    "_warmup_backward_result": lambda *_, **__: torch.tensor([1], dtype=torch.int32),
    "_get_init_p2p_neighbors_ops": lambda _: [],
}
"""Replacements for the methods by which pipeline stages communicate before the first step. A trace has no other rank
that could answer.

From torch 2.13 on, the stages vote whether each stage knows the shapes that it sends (the first two methods). In older
releases, the stages open their connections (the last method).
"""


@contextmanager
def sends_held() -> Iterator[None]:
    """Until the `with` block ends, let the work object of a send keep the sent tensors alive, as with gloo.

    PyTorch's schedules of several stages per rank keep the work objects of all sends until the end of the step. Work
    objects of NCCL keep no tensors: the allocator frees a sent tensor when the other rank has received it. Outside of
    this block, a trace assumes that the other rank receives the tensor at once.
    """
    send = dist.ProcessGroup.send

    def held(group: dist.ProcessGroup, tensors: list[Tensor], *args: Any) -> SimpleNamespace:
        return SimpleNamespace(wait=send(group, tensors, *args).wait, tensors=tensors)

    with replaced(dist.ProcessGroup, "send", held):
        yield


@contextmanager
def silence() -> Iterator[None]:
    """Drop Python's warnings and the logs of three modules (`names`) until the `with` block ends. The user loses no
    information: a run shows the same warnings, and PyTorch raises each error that it logs."""
    names = ("torch._subclasses.fake_tensor", "torch.distributed.tensor._redistribute", "titan_launch.parallel")
    with loggers_silenced(*names), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
