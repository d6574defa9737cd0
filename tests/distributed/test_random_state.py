"""Seeds and the deterministic mode."""

from __future__ import annotations

import random

import numpy as np
import torch

from tests.distributed import run_ranks
from titan_launch.distributed.random_state import seed_everything


def seeded(deterministic: bool) -> tuple[bool, bool, list[float], list[float]]:
    """Seed all generators twice. Return whether only deterministic kernels are allowed, whether `torch.empty` fills
    memory then, and what the generators draw after each seeding."""
    draws = []
    for _ in range(2):
        seed_everything(7, deterministic)
        draws.append([torch.rand(()).item(), random.random(), np.random.rand()])
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    fills_memory = is_deterministic and bool(torch.empty(1024).isnan().all())
    return is_deterministic, fills_memory, draws[0], draws[1]


def test_the_deterministic_mode_is_on_only_when_configured() -> None:
    for deterministic in (False, True):
        (result,) = run_ranks(seeded, 1, deterministic)
        is_deterministic, fills_memory, first_draws, second_draws = result
        assert is_deterministic is deterministic
        assert not fills_memory
        assert first_draws == second_draws
