"""Loaders of batches. For data with an index, the samples of a step do not depend on the number of ranks, microbatches
or workers.

Checkpoints then save only the run's position in the order of samples, one integer, so a run can resume with another
world size. The state of torchdata's loader would not allow this, because it describes the workers of one rank. This
state is saved only for data without an index (`StreamLoader`).
"""

from __future__ import annotations

import atexit
import itertools
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.core.errors import UserError
from titan_launch.core.signals import ignore_stop_signals
from titan_launch.data.order import Order
from titan_launch.data.sources import Batch, Sample, SampleSource, StreamSource, read_batch
from titan_launch.data.sources.stream import Reader
from titan_launch.plan.layout import Layout


class Loader:
    """Iterable over the batches of one rank, each of `local_batch_size` samples.

    Worker processes stay alive between iterations, until `close`. Call `close`, or use the loader as a context manager.
    """

    def __init__(self, data: Any, workers: Workers, **options: Any):
        """`data`, `options`: the data set and further arguments of torchdata's `StatefulDataLoader`."""
        with warnings.catch_warnings():
            # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates. The user cannot change that.
            warnings.filterwarnings("ignore", message="'set_vital' is deprecated")
            self._loader = StatefulDataLoader(
                data,
                num_workers=workers.number,
                pin_memory=workers.pin_memory,
                persistent_workers=workers.number > 0,
                # Fork shares the source's memory. Fork is not safe on macOS, and not the default from Python 3.14 on.
                multiprocessing_context="fork" if workers.number and sys.platform == "linux" else None,
                worker_init_fn=_ignore_stop_signals,
                # With the default generator, starting an iteration would change the random numbers of dropout.
                generator=torch.Generator(),
                **options,
            )
        # At exit, multiprocessing sends SIGTERM to its children and waits for them. Workers ignore SIGTERM, so this
        # call must end the workers first.
        atexit.register(self.close)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches. Raises UserError if a sample cannot be read, such as a damaged image."""
        for batch in self._loader:
            if isinstance(batch, UserError):
                raise batch
            yield batch if isinstance(batch, Batch) else batch.unpacked()

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


class Workers(NamedTuple):
    """The processes that read batches."""

    number: int = 0
    """Number of processes; 0: the main process reads the batches."""

    pin_memory: bool = False
    """True: batches are in page-locked memory, so the host does not wait for their copies to a GPU."""


NO_WORKERS = Workers()


def build_train_loader(
    source: SampleSource, order: Order, layout: Layout, dp_rank: int, *, start: int, workers: Workers = NO_WORKERS
) -> Loader:
    """Return an endless loader of the microbatches of data-parallel rank `dp_rank`.

    `start`: number of samples that the run has consumed. Step k (from 0) takes the `global_batch_size` positions that
    begin at `start + k * global_batch_size`. Its first microbatch takes the first of these positions, in rank order.
    The next microbatch takes the next positions. So the samples of a step do not depend on the number of ranks or
    microbatches.
    """
    return _indexed_loader(partial(_read_positions, source, order), _TrainBatches(layout, dp_rank, start), workers)


def samples_of_step(order: Order, layout: Layout, position: int) -> list[list[list[int]]]:
    """Return the sample indices of the step that begins at `position`: result[data-parallel rank][microbatch]."""
    ranks = (_TrainBatches(layout, rank, position) for rank in range(layout.data_parallel))
    return [[list(map(order, batch)) for batch in itertools.islice(rank, layout.num_microbatches)] for rank in ranks]


def build_validation_loader(
    source: SampleSource,
    *,
    local_batch_size: int,
    dp_rank: int,
    dp_size: int,
    parts: Sequence[range] | None = None,
    workers: Workers = NO_WORKERS,
) -> Loader:
    """Return a loader of the samples in `parts`, in order. Each sample is on exactly one of the `dp_size` ranks.

    `parts`: ranges of sample indices; default: all samples. All samples of a batch are of one part. Every rank yields
    `num_validation_batches` batches for each part, all of the same shape. Padding samples, whose targets are all
    `IGNORED_TARGET`, fill the last batches of a part. Every iteration starts with the first sample.
    """
    batches = _ValidationBatches(parts or [range(len(source))], local_batch_size, dp_rank, dp_size)
    return _indexed_loader(partial(_read_indices, source), batches, workers)


def num_validation_batches(part: range, local_batch_size: int, dp_size: int) -> int:
    """Return the number of batches of each rank for the samples in a part."""
    return -(-len(part) // (local_batch_size * dp_size))


_LONGEST_CLOSE = 5.0
"""Longest time in seconds that `FetchedAhead.close` waits."""


class FetchedAhead(Iterator[Batch]):
    """An endless iterator over batches from worker processes. A thread unpacks the batches while the training loop
    computes.

    Use this class only with worker processes. Without worker processes, the training loop itself must read the batches,
    because a user's source or transform may change the random generators that the loop also uses.
    """

    def __init__(self, batches: Iterable[Batch], num_ahead: int):
        """`num_ahead`: number of batches to fetch ahead of their use, such as the microbatches of a step."""
        self._batches = iter(batches)
        self._num_ahead = num_ahead
        self._thread = ThreadPoolExecutor(1, "data")
        self._ahead: deque[Future[Batch]] = deque()

    def __next__(self) -> Batch:
        # The first batch starts the workers. The main thread must start them, because PyTorch installs its handler of
        # SIGCHLD, which reports a worker that died, only in the main thread.
        batch = self._ahead.popleft().result() if self._ahead else next(self._batches)
        while len(self._ahead) < self._num_ahead:
            self._ahead.append(self._thread.submit(next, self._batches))
        return batch

    def close(self) -> None:
        """Stop fetching. Wait at most _LONGEST_CLOSE for the batch that a worker is fetching, because the worker may
        wait for a disk."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        # `wait` does not count a cancelled future as done, so it would wait for this future until the timeout.
        wait([future for future in self._ahead if not future.cancelled()], timeout=_LONGEST_CLOSE)


def copied_ahead(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield the batches of a step on the device.

    On CUDA, a separate stream copies each batch from pinned memory while the previous batch is computed. The first
    batch of a step is copied while the previous step is computed, because the host does not wait for the device.
    """
    if device.type != "cuda":
        yield from (batch.to(device) for batch in batches)
        return
    stream = _copy_stream(device)

    def start_copy(batch: Batch) -> tuple[Batch, torch.cuda.Event]:
        with torch.cuda.stream(stream):
            return batch.to(device), stream.record_event()

    copies = map(start_copy, batches)
    ahead = next(copies, None)
    while ahead is not None:
        (batch, is_copied), ahead = ahead, next(copies, None)
        compute = torch.cuda.current_stream(device)
        compute.wait_event(is_copied)
        for tensor in batch:
            if tensor is not None:
                tensor.record_stream(compute)  # the allocator does not reuse the memory before `compute` has read it
        yield batch


@lru_cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True)
class _TrainBatches:
    """Iterable over the positions of each microbatch of one rank."""

    layout: Layout
    dp_rank: int
    start: int

    def __iter__(self) -> Iterator[range]:
        local = self.layout.local_batch_size
        for step_start in itertools.count(self.start, self.layout.global_batch_size):
            for microbatch in range(self.layout.num_microbatches):
                first = step_start + (microbatch * self.layout.data_parallel + self.dp_rank) * local
                yield range(first, first + local)


_PADDING = -1
"""Index of padding: a sample without valid targets."""


@dataclass(frozen=True)
class _ValidationBatches:
    """Iterable over the sample indices of each batch of one rank."""

    parts: Sequence[range]
    local_batch_size: int
    dp_rank: int
    dp_size: int

    def __iter__(self) -> Iterator[list[int]]:
        local = self.local_batch_size
        for part in self.parts:
            for batch in range(num_validation_batches(part, local, self.dp_size)):
                first = (batch * self.dp_size + self.dp_rank) * local
                indices = part[first : first + local]
                yield [*indices, *[_PADDING] * (local - len(indices))]


@dataclass(frozen=True)
class _Reader:
    """A data set of torchdata's loader, which passes each item of its `batch_sampler` to `__getitems__`."""

    read: Callable[[Sequence[int]], Sample]
    """Function of the positions or indices of some samples. It returns the tensors of a batch of these samples."""

    def __getitems__(self, numbers: Sequence[int]) -> Sample | UserError:
        """Return a batch, or a UserError in its place. If this method raised the error, PyTorch would add the traceback
        of the worker process to the error's text."""
        try:
            return self.read(numbers)
        except UserError as error:
            return UserError(str(error))  # a ConfigError cannot be pickled


def _read_positions(source: SampleSource, order: Order, positions: Sequence[int]) -> Sample:
    """Return the samples at positions of the stream. The workers convert positions to indices."""
    return read_batch(source, list(map(order, positions)), positions)


def _read_indices(source: SampleSource, indices: Sequence[int]) -> Sample:
    """Return samples by their indices. The index `_PADDING` gives a sample without valid targets."""
    inputs, targets, *documents = read_batch(source, [max(index, 0) for index in indices])
    if _PADDING in indices:
        targets = targets.clone()
        targets[torch.tensor(indices) == _PADDING] = IGNORED_TARGET
    return inputs, targets, *documents


_SENT_BY_VALUE = 1 << 20
"""Largest batch in bytes that a worker sends through its pipe. A larger batch is sent in shared memory."""


class _Packed:
    """The tensors of a batch on their way from a reader to the training loop.

    Small batches are sent by value, as NumPy arrays. Shared memory costs the receiver several system calls for each
    tensor: for a batch of 8 x 2,048 tokens, it takes five times as long as NumPy arrays.
    """

    def __init__(self, tensors: Sample):
        by_value = get_worker_info() is not None and sum(tensor.nbytes for tensor in tensors) <= _SENT_BY_VALUE
        self._parts: list[Any] = [tensor.numpy() if by_value else tensor for tensor in tensors]

    def unpacked(self) -> Batch:
        """Return the batch. Token ids and classes are int64, as models and losses expect them."""
        inputs, targets, *documents = map(torch.as_tensor, self._parts)
        return Batch(inputs if inputs.is_floating_point() else inputs.long(), targets.long(), *documents)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory. PyTorch's loader calls this method."""
        return Batch._make(None if tensor is None else tensor.pin_memory() for tensor in self.unpacked())


def _packed(batch: Sample | UserError) -> _Packed | UserError:
    return batch if isinstance(batch, UserError) else _Packed(batch)


class StreamLoader(Loader):
    """Iterable over the batches of one part of a stream. Its state is the state of torchdata's loader, which JSON can
    represent."""

    def __init__(self, source: StreamSource, part: int, parts: int, batch_size: int, workers: Workers):
        """`part`: number of the part, from 0 to `parts` - 1."""
        super().__init__(
            _StreamPart(source, part, parts),
            workers,
            batch_size=batch_size,
            collate_fn=_stacked,
            snapshot_every_n_steps=1,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration continue after the position in `state`."""
        self._loader.load_state_dict(state)


class _StreamPart(IterableDataset[Any]):
    """One part of a stream, in the form that torchdata's loader takes."""

    def __init__(self, source: StreamSource, part: int, parts: int):
        self._source, self._part, self._parts = source, part, parts

    def __iter__(self) -> Iterator[Sample | UserError]:
        return _ErrorsAsSamples(self._source.open_part(self._part, self._parts))


class _ErrorsAsSamples(Iterator[Sample | UserError]):
    """A reader of a stream that returns a UserError in place of a sample that cannot be read (`_Reader.__getitems__`
    has the reason)."""

    def __init__(self, reader: Reader):
        self._reader = reader
        self.state_dict, self.load_state_dict = reader.state_dict, reader.load_state_dict

    def __next__(self) -> Sample | UserError:
        try:
            return next(self._reader)
        except UserError as error:
            return UserError(str(error))


def _stacked(samples: list[Sample | UserError]) -> _Packed | UserError:
    error = next((sample for sample in samples if isinstance(sample, UserError)), None)
    return error or _Packed(tuple(map(torch.stack, zip(*samples, strict=True))))


def _indexed_loader(
    read: Callable[[Sequence[int]], Sample], batches: Iterable[Sequence[int]], workers: Workers
) -> Loader:
    """Return a loader of batches. `read`: see `_Reader`. `batches`: the argument of `read` for each batch."""
    return Loader(
        _Reader(read),
        workers,
        batch_sampler=batches,
        collate_fn=_packed,
        snapshot_every_n_steps=None,  # nothing reads the state of this loader
    )


def _ignore_stop_signals(worker_id: int) -> None:
    """Ignore stop signals in a worker process. The main process ends its workers.

    Ctrl-C, torchrun and Slurm signal the whole process group. If a worker died from the signal, the main process would
    fail before it writes its last checkpoint. If the main process dies, its workers end within seconds.
    """
    ignore_stop_signals()
