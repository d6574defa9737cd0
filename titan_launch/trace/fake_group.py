"""A process group with one real rank, of any size, for traces and dry runs without output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from titan_launch.core.patches import replaced


@contextmanager
def fake_process_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Be a rank of so many until the end of the block; collectives return at once and change nothing.

    Of the ranks that share parameters the first holds the most: its shard is never the smaller one. Raises
    RuntimeError in a process that has a process group already, since FSDP2 and the mesh would take that one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend `fake`

    if dist.is_initialized():
        raise RuntimeError("a trace makes a process group of its own: run it in another process, or before this one's")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            for name in (name for name in _WITHOUT_VOTE if hasattr(PipelineStage, name)):
                stack.enter_context(replaced(PipelineStage, name, _WITHOUT_VOTE[name]))
            yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it has groups of this one, and takes another mesh of the same ranks for the same


_WITHOUT_VOTE = {
    "_warmup_forward_vote": lambda *_, **__: torch.tensor([1], dtype=torch.int32),
    "_warmup_backward_result": lambda *_, **__: torch.tensor([1], dtype=torch.int32),
    "_get_init_p2p_neighbors_ops": lambda _: [],
}
"""What the stages of a pipeline do before their first step, and nobody answers: from torch 2.13 on they ask each other
whether all know the shapes of what they send (the first two; all do), before that they open their connections."""


_TALKATIVE = ("torch._subclasses.fake_tensor", "torch.distributed.tensor._redistribute", "titan_launch.parallel")


@contextmanager
def silence() -> Iterator[None]:
    """Without warnings and logs: a run prints its own, and an error that PyTorch logs as it raises it is reported."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
