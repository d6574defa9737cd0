"""Running statistics over ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from tests.distributed import run_ranks
from titan_launch.parallel.batchnorm import pool_running_statistics


def samples() -> torch.Tensor:
    """[rank, token, channel], every rank with another distribution."""
    data = torch.randn(4, 50, 3, generator=torch.Generator().manual_seed(0))
    return data * torch.tensor([1.0, 2.0, 3.0, 4.0])[:, None, None] + torch.tensor([0.0, 5.0, -3.0, 1.0])[:, None, None]


def pooled() -> list[torch.Tensor]:
    model = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0), nn.Linear(3, 5), nn.BatchNorm1d(5))
    model[0](samples()[dist.get_rank()])
    pool_running_statistics(model)
    return [model[0].running_mean, model[0].running_var, model[2].running_mean, model[2].running_var]


def test_pooled_statistics_are_those_of_all_ranks_data_together() -> None:
    ranks = run_ranks(pooled, 4)
    everything = samples().flatten(0, 1)
    # Each rank's running variance is the unbiased one of its own 50 tokens.
    within = samples().var(dim=1).mean(0)
    between = samples().mean(dim=1).var(dim=0, unbiased=False)
    for mean, variance, other_mean, other_variance in ranks:
        torch.testing.assert_close(mean, everything.mean(0))
        torch.testing.assert_close(variance, within + between)
        assert torch.equal(other_mean, torch.zeros(5)) and torch.equal(other_variance, torch.ones(5))
    assert all(torch.equal(a, b) for a, b in zip(ranks[0], ranks[3], strict=True))
