import itertools
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from titan_launch.data.loader import Workers, build_train_loader
from titan_launch.data.order import MixtureOrder, Order, SampleOrder, block_size
from titan_launch.data.sources import SampleSource
from titan_launch.data.sources.mixture import MixtureSource
from titan_launch.plan.layout import Layout


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


def test_the_order_is_fixed() -> None:
    assert epoch(SampleOrder(8, seed=0, shuffle=True)) == [5, 2, 4, 3, 0, 6, 7, 1]


def test_without_shuffle_the_order_is_that_of_the_source() -> None:
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


# Every run of the tests has the same examples.
repeatable = settings(derandomize=True, deadline=None, database=None)
few = settings(repeatable, max_examples=4, phases=[Phase.generate])

sizes = st.integers(1, 300)
seeds = st.integers(0, 2**32 - 1)
weights = st.one_of(st.integers(1, 50), st.floats(0.01, 100)).map(lambda weight: Fraction(str(weight)))


def named(orders: Sequence[SampleOrder]) -> dict[str, SampleOrder]:
    return {str(index): order for index, order in enumerate(orders)}


@st.composite
def mixtures(draw: st.DrawFn, after: int = 0) -> MixtureOrder:
    """Return a mixture of one to four sources, whose weights change up to twice. Later weights may be 0."""
    number = draw(st.integers(1, 4))
    orders = [SampleOrder(draw(sizes), draw(seeds), draw(st.booleans())) for _ in range(number)]
    starts = draw(st.lists(st.integers(1, 400), max_size=2, unique=True))
    some = st.lists(st.one_of(st.just(Fraction(0)), weights), min_size=number, max_size=number).filter(any)
    return MixtureOrder(named(orders), [(start, draw(some)) for start in [0, *sorted(starts)]], draw(seeds))


@repeatable
@given(sizes, seeds, st.integers(0, 5))
def test_every_epoch_of_any_size_is_a_permutation(num_samples: int, seed: int, number: int) -> None:
    assert sorted(epoch(SampleOrder(num_samples, seed, shuffle=True), number)) == list(range(num_samples))


def sources_of(order: MixtureOrder, stop: int) -> list[list[int]]:
    """Return the samples that each source gives before `stop`, in order."""
    offsets = [0, *itertools.accumulate(one.num_samples for one in order.sources.values())]
    taken: list[list[int]] = [[] for _ in order.sources.values()]
    for index in map(order, range(stop)):
        source = max(i for i, offset in enumerate(offsets[:-1]) if offset <= index)
        taken[source].append(index - offsets[source])
    return taken


@repeatable
@given(mixtures(), st.integers(0, 700))
def test_a_mixture_reads_every_source_in_the_order_that_it_has_alone(order: MixtureOrder, stop: int) -> None:
    taken = sources_of(order, stop)
    assert taken == [[alone(i) for i in range(len(t))] for alone, t in zip(order.sources.values(), taken, strict=True)]
    assert order.consumed(stop) == tuple(map(len, taken))


@repeatable
@given(st.lists(weights, min_size=1, max_size=5), seeds, st.integers(0, 10**12))
def test_shares_after_whole_blocks_are_exact(given_weights: list[Fraction], seed: int, blocks: int) -> None:
    order = MixtureOrder(named([SampleOrder(10, 0, True)] * len(given_weights)), [(0, given_weights)], seed)
    size = block_size(given_weights)
    before, after = order.consumed(blocks * size), order.consumed((blocks + 1) * size)
    assert sum(before) == blocks * size
    for weight, count, later in zip(given_weights, before, after, strict=True):
        assert abs(count - weight / sum(given_weights) * blocks * size) < 1
        assert later >= count


@repeatable
@given(mixtures(), weights, weights, st.integers(0, 700))
def test_later_weights_and_further_sources_do_not_change_earlier_positions(
    order: MixtureOrder, one: Fraction, other: Fraction, start: int
) -> None:
    stages = [(first, [*given_weights, Fraction(0)]) for first, given_weights in order.stages if first < start]
    last = stages[-1][1] if stages else [one] * (len(order.sources) + 1)
    changed = MixtureOrder(
        named([*order.sources.values(), SampleOrder(7, 0, True)]), [*stages, (start, [*(last[:-1]), other])], order.seed
    )
    assert [changed(position) for position in range(start)] == [order(position) for position in range(start)]
    assert changed.consumed(start)[:-1] == order.consumed(start)


def test_one_source_in_a_mixture_has_its_own_order() -> None:
    alone = SampleOrder(23, seed=5, shuffle=True)
    mixed = MixtureOrder(named([alone]), [(0, [Fraction(3)]), (17, [Fraction(1)])], seed=5)
    assert [mixed(position) for position in range(200)] == [alone(position) for position in range(200)]


class Counting:
    """A source whose sample i is (i, -i). With `batched` it reads whole batches."""

    num_classes = 1

    def __init__(self, num_samples: int, start: int):
        self._samples = torch.arange(start, start + num_samples)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self._samples[index], -self._samples[index]


class CountingBatches(Counting):
    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        samples = self._samples[torch.tensor(indices)]
        return samples, -samples


@st.composite
def streams(draw: st.DrawFn) -> tuple[Order, SampleSource]:
    """Return the order of a source or of a mixture, and the source, whose sample i is i."""
    if draw(st.booleans()):
        order = SampleOrder(draw(sizes), draw(seeds), draw(st.booleans()))
        return order, Counting(order.num_samples, 0)
    mixture, sources, start = draw(mixtures()), {}, 0
    for index, alone in enumerate(mixture.sources.values()):
        kind = draw(st.sampled_from([Counting, CountingBatches]))
        sources[str(index)] = kind(alone.num_samples, start)
        start += alone.num_samples
    return mixture, MixtureSource(sources, ("data", "sources"))


@st.composite
def layouts(draw: st.DrawFn, global_batch_size: int) -> Layout:
    """Return a division of a global batch over ranks and microbatches."""
    divisors = [n for n in range(1, global_batch_size + 1) if global_batch_size % n == 0]
    ranks = draw(st.sampled_from(divisors))
    local = draw(st.sampled_from([n for n in divisors if global_batch_size // ranks % n == 0]))
    return Layout(1, ranks, local_batch_size=local, num_microbatches=global_batch_size // ranks // local)


def read(stream: tuple[Order, SampleSource], layout: Layout, start: int, steps: int, workers: int) -> list[list[int]]:
    """Return the samples of each step, over all ranks, in the order of their positions."""
    order, source = stream
    read_samples: list[list[list[int]]] = [[] for _ in range(steps)]
    for rank in range(layout.data_parallel):
        with build_train_loader(source, order, layout, rank, start=start, workers=Workers(workers)) as loader:
            microbatches = iter(loader)
            for step in read_samples:
                step.append([next(microbatches)[0].tolist() for _ in range(layout.num_microbatches)])
    return [[i for parts in zip(*step, strict=True) for part in parts for i in part] for step in read_samples]


def check_resume(data: st.DataObject, batch_sizes: Sequence[int], workers: int) -> None:
    stream, batch = data.draw(streams()), data.draw(st.sampled_from(batch_sizes))
    done, steps = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5))
    uninterrupted = [stream[0](position) for position in range((done + steps) * batch)]
    resumed = read(stream, data.draw(layouts(batch)), done * batch, steps, workers)
    assert list(itertools.chain(*resumed)) == uninterrupted[done * batch :]


@repeatable
@given(st.data())
def test_a_resumed_stream_is_the_uninterrupted_one_on_any_layout(data: st.DataObject) -> None:
    check_resume(data, [1, 2, 3, 4, 6, 12], workers=0)


@few
@given(st.data(), st.integers(1, 2))
def test_a_resumed_stream_is_the_uninterrupted_one_with_workers(data: st.DataObject, workers: int) -> None:
    check_resume(data, [2, 4], workers)
