"""One rank of a large group that does not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def imagined_ranks(world_size: int) -> Iterator[None]:
    """Be rank 0 of so many until the end of the block; collectives return at once and change nothing.

    Rank 0 holds the most: the first shard is never the smaller one. Raises RuntimeError in a process that has a process
    group already, since FSDP2 and the mesh would take that one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend `fake`

    if dist.is_initialized():
        raise RuntimeError("a trace makes a process group of its own: run it in another process, or before this one's")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
