"""Random sequences, for the tools that have no source of them themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.speed.jobs import Job


def random_sequences(job: Job, rank: int) -> Tensor:
    """All that a rank trains on, int64 `[sequences, seq_len + 1]`; other ones on every rank."""
    generator = torch.Generator().manual_seed(rank)
    number = job.steps * job.microbatches * job.local_sequences
    return torch.randint(0, 256, (number, job.seq_len + 1), generator=generator)
