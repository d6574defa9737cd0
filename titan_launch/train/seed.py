"""Seeds and determinism."""

from __future__ import annotations

import os
import random

import numpy as np
import torch


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed what draws during training (dropout, say), per rank; parameters and data have seeds of their own. Generators
    are torch's, Python's and NumPy's, all of which a checkpoint holds.

    `deterministic` forbids kernels whose result depends on timing, and makes torch fail where there is no other.
    """
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, after this
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
