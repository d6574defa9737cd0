import itertools
from collections import Counter

import pytest

from titan_launch.data.loader import SampleOrder


def epoch(order: SampleOrder, number: int = 0) -> list[int]:
    start = number * order.num_samples
    return [order(position) for position in range(start, start + order.num_samples)]


@pytest.mark.parametrize("num_samples", [1, 2, 3, 4, 5, 7, 16, 17, 63, 64, 65, 1000])
def test_every_epoch_visits_every_sample_once(num_samples: int) -> None:
    order = SampleOrder(num_samples, seed=3, shuffle=True)
    for number in range(3):
        assert sorted(epoch(order, number)) == list(range(num_samples))


def test_order_differs_by_epoch_and_seed_and_repeats_otherwise() -> None:
    order = SampleOrder(100, seed=0, shuffle=True)
    assert epoch(order) == epoch(SampleOrder(100, seed=0, shuffle=True))
    assert epoch(order) != epoch(order, 1)
    assert epoch(order) != epoch(SampleOrder(100, seed=1, shuffle=True))
    assert epoch(order) != list(range(100))


def test_the_order_never_changes() -> None:
    assert epoch(SampleOrder(8, seed=0, shuffle=True)) == [5, 2, 4, 3, 0, 6, 7, 1]


def test_without_shuffle_the_order_is_the_sources() -> None:
    order = SampleOrder(5, seed=0, shuffle=False)
    assert [order(position) for position in range(12)] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_all_orders_of_a_small_epoch_are_about_as_likely() -> None:
    seen = Counter(tuple(epoch(SampleOrder(4, seed, shuffle=True))) for seed in range(2400))
    assert set(seen) == set(itertools.permutations(range(4)))
    assert all(60 < count < 145 for count in seen.values())  # 100 expected, standard deviation 10


def test_a_huge_epoch_needs_no_memory() -> None:
    order = SampleOrder(10**9, seed=0, shuffle=True)
    samples = [order(position) for position in range(2000)]
    assert len(set(samples)) == 2000
    assert all(0 <= sample < 10**9 for sample in samples)
    assert sum(samples) / 2000 == pytest.approx(0.5e9, rel=0.05)
