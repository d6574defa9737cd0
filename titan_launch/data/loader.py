"""From samples to batches: every rank, world size and number of workers sees one and the same stream.

The stream is the order's positions 0, 1, 2, ...; a run's place in it is a single integer, the number of samples it has
consumed. That cursor is saved with the training state and is all that a resume needs, also on another world size. The
data loader has a state of its own, but that one describes workers of one rank, so it is not used.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.core.signals import ignore_stop_signals
from titan_launch.data.sources import SampleSource
from titan_launch.plan.layout import Layout

# Four rounds make a Feistel network indistinguishable from a random permutation of a large domain (Luby and Rackoff
# 1988); small domains, which a tiny data set has, want more.
_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Which sample stands at a position of an endless stream: epoch after epoch, every sample once in each.

    A pure function of (`seed`, epoch, index) without memory: any rank can ask for any position at any time, and the
    position alone is all there is to save. Shuffled epochs use a keyed permutation of [0, n) that is computed point by
    point: a Feistel network over the next larger power of 4, and what lands outside is sent through again until it
    lands inside ("cycle walking"; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The domain is less
    than 4n, so that takes fewer than four passes on average.
    """

    num_samples: int
    """Samples in an epoch, at least 1."""

    seed: int
    shuffle: bool
    """Otherwise every epoch is in the order of the source."""

    def __call__(self, position: int) -> int:
        """The sample, from 0 to `num_samples` - 1, at `position` (0, 1, 2, ...) of the stream."""
        epoch, index = divmod(position, self.num_samples)
        return self._permute(index, f"{self.seed}/{epoch}") if self.shuffle else index

    def _permute(self, index: int, key: str) -> int:
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        while True:
            index = _feistel(index, half_bits, key)
            if index < self.num_samples:
                return index


def _feistel(value: int, half_bits: int, key: str) -> int:
    """A permutation of [0, 4 ** `half_bits`), chosen by `key`."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for step in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{step}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right


class Loader:
    """Iterable over the batches (inputs `[local_batch_size, ...]`, targets `[local_batch_size, ...]`) of one rank.

    Close it, or use it as a context manager: worker processes live until then, from one iteration to the next.
    """

    def __init__(self, source: Any, batches: Iterable[list[int]], *, num_workers: int, pin_memory: bool):
        self._loader = _build_data_loader(source, batches, num_workers, pin_memory)
        # Workers outlast the signals with which multiprocessing ends forgotten children, and it then waits for them
        # forever; this runs before.
        atexit.register(self.close)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (tuple(batch) for batch in self._loader)  # collation makes lists of pairs

    def close(self) -> None:
        """End the worker processes and wait for them. More than once does no harm."""
        atexit.unregister(self.close)
        iterator, self._loader._iterator = self._loader._iterator, None
        if iterator is None or not self._loader.num_workers:
            return
        # There is no public way; dropping the last reference has the same effect, but an exception's traceback may hold
        # another one.
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
    """The microbatches of data-parallel rank `dp_rank`, without end, from position `start` of the stream.

    `start` is the number of samples that the run has left behind so far. Step k takes the positions from
    `start + k * global_batch_size` on; its first microbatch spreads over the ranks in order, then its second, and so
    on. The samples of a step are therefore the same for any split of `global_batch_size`.
    """
    batches = _TrainBatches(order, layout, dp_rank, start)
    return Loader(source, batches, num_workers=num_workers, pin_memory=pin_memory)


def samples_of_step(order: SampleOrder, layout: Layout, position: int) -> list[list[list[int]]]:
    """The samples of the step that begins at `position`: of every data-parallel rank, its microbatches."""
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
    """The first `max_samples` samples (all, if None or fewer), each exactly once over the `dp_size` ranks, in order.

    Every rank yields the same number of batches, all of the same shape: what is missing at the end is filled with
    samples whose targets are all `IGNORED_TARGET`. Every iteration starts at the first sample.
    """
    num_samples = min(len(source), max_samples) if max_samples is not None else len(source)
    batches = _ValidationBatches(num_samples, local_batch_size, dp_rank, dp_size)
    return Loader(_Padded(source, num_samples), batches, num_workers=num_workers, pin_memory=pin_memory)


@dataclass(frozen=True)
class _TrainBatches:
    """The samples of each microbatch of one rank."""

    order: SampleOrder
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
    """The samples of each batch of one rank, in order; those from `num_samples` on are padding."""

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
    """The first `num_samples` samples of `source`, and behind them any number without targets."""

    source: SampleSource
    num_samples: int

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.source[min(index, self.num_samples - 1)]
        return inputs, targets if index < self.num_samples else torch.full_like(targets, IGNORED_TARGET)


def _build_data_loader(source: Any, batches: Iterable[list[int]], num_workers: int, pin_memory: bool) -> Any:
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates: nothing a user can do about it.
        warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
        return StatefulDataLoader(
            source,
            batch_sampler=batches,
            num_workers=num_workers,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            # Fork shares the source's memory. It is not safe on macOS, and not the default from Python 3.14 on.
            multiprocessing_context="fork" if num_workers and sys.platform == "linux" else None,
            worker_init_fn=_ignore_stop_signals,
            # Its own, or starting an iteration would advance the generator that dropout draws from.
            generator=torch.Generator(),
            snapshot_every_n_steps=None,  # its state is not used
        )


def _ignore_stop_signals(worker_id: int) -> None:
    """Leave it to the main process to end this one.

    Ctrl-C, torchrun and Slurm signal the whole process group. A worker that died of that would take down the main
    process before it has written its last checkpoint. (A worker whose main process is gone ends by itself within
    seconds.)
    """
    ignore_stop_signals()
