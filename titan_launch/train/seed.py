"""Seeds and determinism."""

from __future__ import annotations

import os
import random

import numpy as np
import torch

from titan_launch.config.parallelism import ParallelismConfig


def random_stream(rank: int, parallelism: ParallelismConfig) -> int:
    """Which stream of random numbers a rank draws from while it trains: its own, but for the ranks that share matrices
    (tensor parallelism). These draw the same, so that a mask over activations that all of them hold is one mask."""
    return rank // parallelism.tensor_parallel_degree


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed what draws during training (dropout, say), per stream; parameters and data have seeds of their own. The
    generators are torch's, Python's and NumPy's, all of which a checkpoint holds.

    `deterministic` forbids kernels whose result depends on timing, and makes torch fail where there is no other.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, after this
        torch.use_deterministic_algorithms(True)
        # By default torch.empty would fill with NaN whatever it allocates, the buffers of FSDP2's collectives included.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cudnn.benchmark = False
