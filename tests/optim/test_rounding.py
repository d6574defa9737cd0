"""Rounding to bfloat16: unbiased, and a function of what it is told alone."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_launch.optim.rounding import Draw, round_to


def rounded(values: Tensor, name: str = "w", step: int = 1, seed: int = 0, offsets: tuple[int, ...] = (0, 0)) -> Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_to(target, values.clone(), Draw(seed, name, torch.tensor(float(step)), offsets))
    return target.float()


def test_the_mean_is_right_and_values_are_the_neighbours() -> None:
    """Of 1 and -3 and a small number, each a fraction of the way to the next bfloat16."""
    for base, unit in ((1.0, 2**-7), (-3.0, -(2**-6)), (2.0**-60, 2.0**-67)):
        for fraction in (0.1, 0.5, 0.97):
            results = rounded(torch.full((300, 400), base + fraction * unit))
            assert set(results.unique().tolist()) == {base, base + unit}
            share = (results == base + unit).double().mean().item()
            assert abs(share - fraction) < 0.006  # 4 standard deviations of 120,000 draws


def test_what_bfloat16_has_is_kept() -> None:
    values = torch.tensor([[0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 3.0e38]]).bfloat16().float()
    for step in range(20):
        assert torch.equal(rounded(values, step=step), values)
    assert rounded(torch.tensor([[torch.nan]])).isnan().all()


def test_every_name_step_seed_and_element_has_its_own_numbers() -> None:
    shape = (64, 64)
    draws = [
        Draw(seed, name, torch.tensor(step), (0, 0)).bits(shape).flatten()
        for seed in (0, 1)
        for name in ("layers.0.weight/parameter", "layers.1.weight/parameter")
        for step in (1.0, 2.0)
    ]
    bits = torch.stack(draws).double()
    assert bits.min() >= 0 and bits.max() < 2**16
    assert torch.corrcoef(bits).fill_diagonal_(0).abs().max() < 0.06  # 4096 draws each
    neighbours = torch.stack([bits[0].view(shape)[:-1].flatten(), bits[0].view(shape)[1:].flatten()])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 0.06
    assert abs(bits.mean() / 2**16 - 0.5) < 0.005


def test_a_part_draws_what_the_whole_draws_there() -> None:
    values = torch.linspace(1, 2, 7 * 5 * 3).view(7, 5, 3)
    whole = rounded(values, offsets=(0, 0, 0))
    part = rounded(values[2:6, 1:3], offsets=(2, 1, 0))
    assert torch.equal(part, whole[2:6, 1:3])
    assert rounded(torch.tensor(1.001), offsets=()).shape == ()
