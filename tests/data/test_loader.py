import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.data import loader as loaders
from titan_launch.data.loader import FetchedAhead, Loader, Workers, build_train_loader, build_validation_loader
from titan_launch.data.order import SampleOrder
from titan_launch.plan.layout import Layout

NUM_SAMPLES = 23
GLOBAL_BATCH = 8


class Numbers:
    """Sample i is an "image" filled with i, and the class i."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((2, 3), float(index)), torch.tensor(index)


def layout(dp: int, local: int) -> Layout:
    return Layout(replicate=1, shard=dp, local_batch_size=local, num_microbatches=GLOBAL_BATCH // (dp * local))


def train_loader(split: Layout, rank: int, start: int = 0, num_workers: int = 0) -> Loader:
    order = SampleOrder(NUM_SAMPLES, seed=1, shuffle=True)
    return build_train_loader(Numbers(), order, split, rank, start=start, workers=Workers(num_workers))


def global_batches(split: Layout, steps: int, start: int = 0, num_workers: int = 0) -> list[list[list[int]]]:
    """Return the samples of each step and rank."""
    by_rank = []
    for rank in range(split.data_parallel):
        with train_loader(split, rank, start, num_workers) as loader:
            n = split.num_microbatches
            microbatches = [batch.targets.tolist() for batch in itertools.islice(loader, steps * n)]
        by_rank.append([list(itertools.chain(*microbatches[k * n : (k + 1) * n])) for k in range(steps)])
    return [list(step) for step in zip(*by_rank, strict=True)]


def as_sets(batches: list[list[list[int]]]) -> list[list[int]]:
    return [sorted(itertools.chain(*ranks)) for ranks in batches]


def expected(steps: int, start: int = 0) -> list[list[int]]:
    order = SampleOrder(NUM_SAMPLES, seed=1, shuffle=True)
    return [sorted(order(start + k * GLOBAL_BATCH + j) for j in range(GLOBAL_BATCH)) for k in range(steps)]


@pytest.mark.parametrize(("dp", "local"), [(1, 8), (1, 2), (2, 4), (2, 1), (4, 2), (4, 1)])
def test_global_batches_do_not_depend_on_ranks_and_local_batch_size(dp: int, local: int) -> None:
    # 7 steps of 8 cross the ends of two epochs of 23
    assert as_sets(global_batches(layout(dp, local), steps=7)) == expected(7)


@pytest.mark.parametrize("done", [1, 2, 5])
@pytest.mark.parametrize(("dp", "local"), [(1, 4), (4, 2)])
def test_resume_goes_on_with_the_same_batches_on_any_world_size(done: int, dp: int, local: int) -> None:
    whole = as_sets(global_batches(layout(2, 2), steps=8))
    rest = as_sets(global_batches(layout(dp, local), steps=8 - done, start=done * GLOBAL_BATCH))
    assert rest == whole[done:]


def test_resume_works_from_any_number_of_samples() -> None:
    assert as_sets(global_batches(layout(2, 2), steps=3, start=5)) == expected(3, start=5)


def test_ranks_share_no_sample_within_an_epoch() -> None:
    batches = global_batches(layout(4, 2), steps=2)
    seen = list(itertools.chain(*itertools.chain(*batches)))
    assert len(set(seen)) == len(seen) == 16


def test_workers_do_not_change_the_batches() -> None:
    split = layout(2, 2)
    assert global_batches(split, steps=5, num_workers=2) == global_batches(split, steps=5)


class Wide(Numbers):
    """The same with large images, and classes of a small dtype."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((1 << 18,), float(index)), torch.tensor(index, dtype=torch.int32)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_large_batches_arrive_unchanged_and_integers_are_widened(num_workers: int) -> None:
    order = SampleOrder(NUM_SAMPLES, seed=1, shuffle=False)
    with build_train_loader(Wide(), order, layout(1, 4), 0, start=0, workers=Workers(num_workers)) as loader:
        inputs, targets, _ = next(iter(loader))
    assert torch.equal(inputs, torch.arange(4.0)[:, None].expand(4, 1 << 18))
    assert torch.equal(targets, torch.arange(4)) and targets.dtype == torch.int64


def test_batches_are_stacked_samples() -> None:
    with train_loader(layout(2, 4), rank=1) as loader:
        inputs, targets, _ = next(iter(loader))
    assert inputs.shape == (4, 2, 3)
    assert targets.shape == (4,)
    assert torch.equal(inputs[:, 0, 0], targets.float())


def validation_batches(dp: int, local: int, max_samples: int | None, num_workers: int = 0) -> list[list[Tensor]]:
    by_rank = []
    for rank in range(dp):
        with build_validation_loader(
            Numbers(),
            local_batch_size=local,
            dp_rank=rank,
            dp_size=dp,
            parts=[range(min(NUM_SAMPLES, max_samples or NUM_SAMPLES))],
            workers=Workers(num_workers),
        ) as loader:
            first = [batch.targets for batch in loader]
            assert [batch.targets.tolist() for batch in loader] == [targets.tolist() for targets in first]
        by_rank.append(first)
    return by_rank


@pytest.mark.parametrize(("dp", "local"), [(1, 4), (2, 3), (4, 8), (3, 1)])
@pytest.mark.parametrize("max_samples", [None, 1, 10, 23, 99])
def test_validation_takes_every_sample_once_on_equally_many_equal_batches(
    dp: int, local: int, max_samples: int | None
) -> None:
    by_rank = validation_batches(dp, local, max_samples)
    assert len({len(batches) for batches in by_rank}) == 1
    assert all(targets.shape == (local,) for batches in by_rank for targets in batches)
    in_order = torch.cat([targets for batches in zip(*by_rank, strict=True) for targets in batches])
    num_samples = min(NUM_SAMPLES, max_samples or NUM_SAMPLES)
    assert in_order[:num_samples].tolist() == list(range(num_samples))
    assert (in_order[num_samples:] == IGNORED_TARGET).all()
    assert len(in_order) - num_samples < dp * local


def test_validation_repeats_with_workers() -> None:
    with_workers = validation_batches(2, 3, 10, num_workers=1)
    without = validation_batches(2, 3, 10)
    assert [[t.tolist() for t in rank] for rank in with_workers] == [[t.tolist() for t in rank] for rank in without]


def test_loading_draws_nothing_from_the_global_generator() -> None:
    before = torch.get_rng_state()
    with train_loader(layout(1, 8), rank=0) as loader:
        next(iter(loader))
    assert torch.equal(torch.get_rng_state(), before)


def test_building_a_loader_warns_about_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_loader(layout(1, 8), rank=0).close()


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid}


def start_workers(loader: Loader) -> tuple[set[int], Iterator[tuple[Tensor, Tensor]]]:
    before = children()
    batches = iter(loader)
    next(batches)
    return children() - before, batches


def test_closing_ends_the_workers() -> None:
    loader = train_loader(layout(1, 2), rank=0, num_workers=2)
    workers, batches = start_workers(loader)
    assert len(workers) == 2
    loader.close()
    assert not workers & children()
    loader.close()
    del batches


def test_workers_survive_signals_to_the_process_group() -> None:
    with train_loader(layout(1, 2), rank=0, num_workers=1) as loader:
        workers, batches = start_workers(loader)
        for worker in workers:
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        rest = [batch.targets.tolist() for batch in itertools.islice(batches, 11)]
    order = SampleOrder(NUM_SAMPLES, seed=1, shuffle=True)
    assert list(itertools.chain(*rest)) == [order(position) for position in range(2, 24)]


def test_an_unclosed_loader_lets_the_interpreter_exit_silently() -> None:
    script = """
        from tests.data.test_loader import layout, train_loader
        batches = iter(train_loader(layout(1, 2), rank=0, num_workers=1))
        next(batches)
    """
    ended = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.timeout(60)
def test_closing_waits_only_for_the_batch_that_is_being_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "_LONGEST_CLOSE", 120.0)
    is_read = threading.Event()

    def batches() -> Iterator[Any]:
        yield 0
        is_read.wait()
        yield from itertools.count(1)

    ahead = FetchedAhead(batches(), num_ahead=3)
    assert next(ahead) == 0  # now the first of three batches is being fetched
    threading.Timer(0.2, is_read.set).start()
    ahead.close()
    assert is_read.is_set()
