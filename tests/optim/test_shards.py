"""Stochastic rounding to bfloat16 is unbiased and depends on its arguments only."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_launch.config.optimizers import alike
from titan_launch.optim.shards import RandomBits, _mix, random_bits, round_stochastically


def rounded(values: Tensor, name: str = "w", step: int = 1, seed: int = 0, offsets: tuple[int, ...] = (0, 0)) -> Tensor:
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_stochastically(
        [RandomBits(seed, name, torch.tensor(float(step)), values.shape, offsets)], [target], [values.clone()]
    )
    return target.float()


def bits(shape: tuple[int, ...], name: str = "w", step: float = 1.0, seed: int = 0) -> Tensor:
    size = torch.Size(shape)
    return random_bits([RandomBits(seed, name, torch.tensor(step), size, (0,) * len(size))]).view(size)


def test_stochastic_rounding_is_unbiased_between_the_two_nearest_bfloat16_values() -> None:
    """The values are 1, -3 and a small number, each plus a fraction of the distance to the next bfloat16."""
    for base, unit in ((1.0, 2**-7), (-3.0, -(2**-6)), (2.0**-60, 2.0**-67)):
        for fraction in (0.1, 0.5, 0.97):
            results = rounded(torch.full((300, 400), base + fraction * unit))
            assert set(results.unique().tolist()) == {base, base + unit}
            share = (results == base + unit).double().mean().item()
            assert abs(share - fraction) < 0.006  # 4 standard deviations of 120,000 draws


def test_stochastic_rounding_does_not_change_bfloat16_values() -> None:
    values = torch.tensor([[0.0, -0.0, 1.0, -2.5, torch.inf, -torch.inf, 3.0e38]]).bfloat16().float()
    for step in range(20):
        assert torch.equal(rounded(values, step=step), values)
        nans = torch.tensor([[0x7FC00000, 0x7FFFFFFF, 0x7F800001, -1]], dtype=torch.int32)  # the second is CUDA's
        assert rounded(nans.view(torch.float32), step=step).isnan().all()


def test_every_name_step_seed_and_element_has_its_own_random_number() -> None:
    shape = (64, 64)
    draws = [
        bits(shape, name, step, seed).flatten()
        for seed in (0, 1)
        for name in ("layers.0.weight/parameter", "layers.1.weight/parameter")
        for step in (1.0, 2.0)
    ]
    drawn = torch.stack(draws).double()
    assert drawn.min() >= 0 and drawn.max() < 2**16
    assert torch.corrcoef(drawn).fill_diagonal_(0).abs().max() < 0.06  # 4096 draws each
    neighbours = torch.stack([drawn[0].view(shape)[:-1].flatten(), drawn[0].view(shape)[1:].flatten()])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 0.06
    assert abs(drawn.mean() / 2**16 - 0.5) < 0.005


def test_the_hash_is_the_published_one() -> None:
    """Python's integers do not overflow."""
    words = [0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x9E3779B9, 0x12345678, 0xDEADBEEF]
    expected = []
    for word in words:
        word = (word ^ word >> 16) * 0x21F0AAAD % 2**32
        word = (word ^ word >> 15) * 0x735A2D97 % 2**32
        expected.append(word ^ word >> 15)
    mixed = _mix(torch.tensor(words).to(torch.int32))  # the same 32 bits, with a sign
    assert [word % 2**32 for word in mixed.tolist()] == expected


def test_every_bit_of_step_and_index_changes_every_bit() -> None:
    """Each output bit changes in half of the cases."""
    draws = torch.stack([bits((32, 32), step=float(step)) for step in range(64)])
    drawn = torch.stack([draws >> bit & 1 for bit in range(16)]).bool()
    for axis, size in enumerate(draws.shape, start=1):
        for flipped in (1 << bit for bit in range(size.bit_length() - 1)):
            changed = drawn ^ drawn.index_select(axis, torch.arange(size) ^ flipped)
            shares = changed.sum((1, 2, 3)) / draws.numel()
            assert (shares - 0.5).abs().max() < 0.02, (axis, flipped, shares)
    assert (drawn[:, 1:, :-1] ^ drawn[:, :-1, 1:]).double().mean() > 0.49  # the next step does not shift the index


def test_a_shard_draws_the_same_random_numbers_as_the_full_tensor() -> None:
    values = torch.linspace(1, 2, 7 * 5 * 3).view(7, 5, 3)
    whole = rounded(values, offsets=(0, 0, 0))
    part = rounded(values[2:6, 1:3], offsets=(2, 1, 0))
    assert torch.equal(part, whole[2:6, 1:3])
    assert rounded(torch.tensor(1.001), offsets=()).shape == ()


def test_tensors_that_are_rounded_together_draw_as_alone() -> None:
    shapes = [(5, 4), (2, 4), (3,), (), (7, 4), (0, 4), (6,), (2, 3, 5), (4, 3, 5), ()]
    draws = [
        RandomBits(0, f"w{index}", torch.tensor(3.0), torch.Size(shape), (index, 1, 2)[: len(shape)])
        for index, shape in enumerate(shapes)
    ]
    parts = alike(draws, lambda draw: draw.inner)
    assert len(parts) == 4
    for part in parts:
        assert torch.equal(random_bits(part), torch.cat([random_bits([draw]) for draw in part]))
