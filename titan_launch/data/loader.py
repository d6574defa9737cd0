"""Order of samples, and loaders of batches. The order does not depend on the number of ranks or workers.

A run's position in the stream of samples is one integer: the number of samples consumed so far. Checkpoints save only
this integer, so a run can resume with another world size. The state of torchdata's loader is not used, because it
describes the workers of one rank.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.core.signals import ignore_stop_signals
from titan_launch.data.sources import AugmentedSource, SampleSource
from titan_launch.plan.layout import Layout

# Four rounds make a Feistel network indistinguishable from a random permutation of a large domain (Luby and Rackoff
# 1988). The small domain of a tiny data set needs more rounds.
_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Function from a position in an endless stream of epochs to a sample index. An epoch contains each sample once.

    The order is a pure function of (`seed`, epoch, index): any rank can look up any position without state. A shuffled
    epoch is a keyed permutation of [0, n), computed per index. The permutation is a Feistel network over the next power
    of 4. A result outside [0, n) is permuted again until it lies inside ("cycle walking"; Black and Rogaway, "Ciphers
    with Arbitrary Finite Domains", 2002). The domain is smaller than 4n, so this takes less than 4 rounds on average.
    """

    num_samples: int
    """Number of samples in an epoch, at least 1."""

    seed: int
    shuffle: bool
    """False: every epoch has the order of the source."""

    def __call__(self, position: int) -> int:
        """Return the index of the sample at `position` (0, 1, 2, ...) of the stream."""
        epoch, index = divmod(position, self.num_samples)
        return self._permute(index, f"{self.seed}/{epoch}") if self.shuffle else index

    def _permute(self, index: int, key: str) -> int:
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        while True:
            index = _feistel(index, half_bits, key)
            if index < self.num_samples:
                return index


def _feistel(value: int, half_bits: int, key: str) -> int:
    """Return the image of `value` under the permutation of [0, 4 ** `half_bits`) that `key` selects."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for step in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{step}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right


class Loader:
    """Iterable over the batches of one rank. A batch is (inputs, targets), both `[local_batch_size, ...]`.

    Worker processes stay alive between iterations, until `close`. Call `close`, or use the loader as a context manager.
    """

    def __init__(self, source: Any, batches: Iterable[list[int]], *, num_workers: int, pin_memory: bool):
        self._loader = _build_data_loader(source, batches, num_workers, pin_memory)
        # At exit, multiprocessing sends SIGTERM to its children and waits for them. Workers ignore SIGTERM, so
        # this call must end them before.
        atexit.register(self.close)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (tuple(batch) for batch in self._loader)  # collation returns a list

    def close(self) -> None:
        """End the worker processes and wait for them. Further calls do nothing."""
        atexit.unregister(self.close)
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is None or not self._loader.num_workers:
            return
        # torch has no public method for this. Deleting the last reference to the iterator has the same effect, but the
        # traceback of an exception may hold another reference.
        iterator._shutdown_workers()
        for worker in iterator._workers:
            worker.kill()
            worker.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def build_train_loader(
    source: SampleSource,
    order: SampleOrder,
    layout: Layout,
    dp_rank: int,
    *,
    start: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """Return an endless loader of the microbatches of data-parallel rank `dp_rank`.

    `start`: number of samples that the run has consumed. Step k (from 0) takes the `global_batch_size` positions that
    begin at `start + k * global_batch_size`. Its first microbatch takes the first of these positions, in rank order.
    The next microbatch takes the next positions. So the samples of a step do not depend on ranks and microbatches.
    """
    batches: Iterable[list[int]] = _TrainBatches(order, layout, dp_rank, start)
    samples: Any = source
    if isinstance(source, AugmentedSource):
        samples, batches = _AtPositions(source, order), _TrainBatches(operator.index, layout, dp_rank, start)
    return Loader(samples, batches, num_workers=num_workers, pin_memory=pin_memory)


def samples_of_step(order: SampleOrder, layout: Layout, position: int) -> list[list[list[int]]]:
    """Return the sample indices of the step that begins at `position`: result[data-parallel rank][microbatch]."""
    ranks = (_TrainBatches(order, layout, rank, position) for rank in range(layout.data_parallel))
    return [list(itertools.islice(batches, layout.num_microbatches)) for batches in ranks]


def build_validation_loader(
    source: SampleSource,
    *,
    local_batch_size: int,
    dp_rank: int,
    dp_size: int,
    max_samples: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """Return a loader of the first `max_samples` samples, each on exactly one of the `dp_size` ranks, in order.

    If `max_samples` is None or larger than the source, the loader reads all samples. Every rank yields the same number
    of batches of the same shape. Padding samples, whose targets are all `IGNORED_TARGET`, fill the last batches. Every
    iteration starts with the first sample.
    """
    num_samples = min(len(source), max_samples) if max_samples is not None else len(source)
    batches = _ValidationBatches(num_samples, local_batch_size, dp_rank, dp_size)
    return Loader(_Padded(source, num_samples), batches, num_workers=num_workers, pin_memory=pin_memory)


@dataclass(frozen=True)
class _AtPositions:
    """The samples of an augmented source by their position in the stream."""

    source: AugmentedSource
    order: Callable[[int], int]

    def __getitem__(self, position: int) -> tuple[Tensor, Tensor]:
        return self.source.at(self.order(position), position)


@dataclass(frozen=True)
class _TrainBatches:
    """Iterable over the sample indices of each microbatch of one rank; over positions, if `order` is the identity."""

    order: Callable[[int], int]
    layout: Layout
    dp_rank: int
    start: int

    def __iter__(self) -> Iterator[list[int]]:
        local = self.layout.local_batch_size
        for step_start in itertools.count(self.start, self.layout.global_batch_size):
            for microbatch in range(self.layout.num_microbatches):
                first = step_start + (microbatch * self.layout.data_parallel + self.dp_rank) * local
                yield [self.order(position) for position in range(first, first + local)]


@dataclass(frozen=True)
class _ValidationBatches:
    """Iterable over the sample indices of each batch of one rank. Indices from `num_samples` on are padding."""

    num_samples: int
    local_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        local = self.local_batch_size
        for start in range(0, self.num_samples, local * self.dp_size):
            first = start + self.dp_rank * local
            yield list(range(first, first + local))


@dataclass(frozen=True)
class _Padded:
    """The first `num_samples` samples of `source`, followed by padding: samples without valid targets."""

    source: SampleSource
    num_samples: int

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.source[min(index, self.num_samples - 1)]
        return inputs, targets if index < self.num_samples else torch.full_like(targets, IGNORED_TARGET)


def _build_data_loader(source: Any, batches: Iterable[list[int]], num_workers: int, pin_memory: bool) -> Any:
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates. The user cannot change that.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            source,
            batch_sampler=batches,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            # Fork shares the source's memory. Fork is not safe on macOS, and not the default from Python 3.14 on.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            worker_init_fn=_ignore_stop_signals,
            # With the default generator, starting an iteration would change the random numbers of dropout.
            generator=torch.Generator(),
            snapshot_every_n_steps=None,  # its state is not used
        )


def _ignore_stop_signals(worker_id: int) -> None:
    """Ignore stop signals in a worker process. The main process ends its workers.

    Ctrl-C, torchrun and Slurm signal the whole process group. If a worker died from the signal, the main process would
    fail before it writes its last checkpoint. If the main process dies, its workers end within seconds.
    """
    ignore_stop_signals()
