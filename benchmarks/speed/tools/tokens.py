"""Random sequences for the tools without a source of synthetic data."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.speed.jobs import Job


def random_sequences(job: Job, rank: int) -> Tensor:
    """Return all training data of a rank, int64 `[sequences, seq_len + 1]`. Ranks have different data."""
    generator = torch.Generator().manual_seed(rank)
    number = job.steps * job.microbatches * job.local_sequences
    return torch.randint(0, 256, (number, job.seq_len + 1), generator=generator)
