"""Seeds and the deterministic mode."""

from __future__ import annotations

import random

import numpy as np
import torch

from tests.distributed import run_ranks
from titan_launch.train.seed import seed_everything


def seeded(deterministic: bool) -> tuple[bool, list[float], list[float]]:
    """Whether only deterministic kernels are allowed, and what all generators draw under one seed, twice."""
    draws = []
    for _ in range(2):
        seed_everything(7, deterministic)
        draws.append([torch.rand(()).item(), random.random(), np.random.rand()])
    return torch.are_deterministic_algorithms_enabled(), draws[0], draws[1]


def test_the_deterministic_mode_is_torchs_and_only_when_asked_for() -> None:
    for deterministic in (False, True):
        (result,) = run_ranks(seeded, 1, deterministic)
        assert result[0] is deterministic
        assert result[1] == result[2]
