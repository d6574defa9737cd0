"""Seeds and determinism."""

from __future__ import annotations

import os

import torch


def seed_everything(seed: int, deterministic: bool) -> None:
    """Seed what draws during training (dropout, say), per rank; parameters and data have seeds of their own.

    `deterministic` forbids kernels whose result depends on timing, and makes torch fail where there is no other.
    """
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts, after this
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
