"""The batches of a run: the stream that it trains on, and those it is validated on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack

from titan_launch.config.architectures import images_taken
from titan_launch.config.job import JobConfig
from titan_launch.data.context_shard import SequencePart, part_of
from titan_launch.data.loader import Loader, SampleOrder, build_train_loader, build_validation_loader
from titan_launch.data.sources import SampleSource, build_source
from titan_launch.data.tokenizers import Tokenizer
from titan_launch.distributed.process_group import Ranks
from titan_launch.plan.layout import Layout
from titan_launch.train.step import Microbatch


class TrainBatches:
    """This rank's microbatches, without end, from a position in the data that can be moved.

    for microbatch in batches: ...
    batches.move_to(position)
    """

    def __init__(self, build: Callable[[int], Loader], position: int):
        """`build` makes a loader that begins at a position, in samples over all ranks."""
        self._build = build
        self._begin(position)

    def __iter__(self) -> Iterator[Microbatch]:
        return self

    def __next__(self) -> Microbatch:
        return next(self._batches)

    def move_to(self, position: int) -> None:
        """Go on from another position; data workers are started anew."""
        self.close()
        self._begin(position)

    def close(self) -> None:
        """End the data workers."""
        self._loader.close()

    def _begin(self, position: int) -> None:
        self._loader = self._build(position)
        self._batches = iter(self._loader)


def build_train_source(config: JobConfig, tokenizer: Tokenizer, part: SequencePart | None) -> SampleSource:
    """The samples to train on. `part`: the tokens of each that this rank has."""
    source = build_source(config.data, tokenizer, config.training.seq_len, ("data",), images_taken(config.model))
    return part_of(source, part)


def build_validation_source(config: JobConfig, tokenizer: Tokenizer, part: SequencePart | None) -> SampleSource | None:
    """Return the samples to validate on, or None without validation. `part`: the tokens of each that this rank has."""
    validation = config.validation
    if not validation.freq or validation.data is None:
        return None
    key = ("validation", "data")
    source = build_source(validation.data, tokenizer, config.training.seq_len, key, images_taken(config.model))
    return part_of(source, part)


def build_train_batches(
    config: JobConfig, source: SampleSource, layout: Layout, ranks: Ranks, position: int, stack: ExitStack
) -> TrainBatches:
    """This rank's microbatches, from a position in the data on."""

    def build_loader(start: int) -> Loader:
        return build_train_loader(
            source,
            sample_order(config, len(source)),
            layout,
            layout.data_rank(ranks.rank),
            start=start,
            num_workers=config.data.num_workers,
            pin_memory=ranks.device.type == "cuda",
        )

    batches = TrainBatches(build_loader, position)
    stack.callback(batches.close)
    return batches


def sample_order(config: JobConfig, epoch_size: int) -> SampleOrder:
    """The order in which the run goes through its data."""
    return SampleOrder(epoch_size, config.training.seed, config.data.shuffle)


def build_validation_batches(
    config: JobConfig, source: SampleSource | None, layout: Layout, ranks: Ranks, stack: ExitStack
) -> Iterable[Microbatch] | None:
    """Return this rank's batches of the validation source, or None where there is none."""
    if source is None:
        return None
    validation = config.validation
    assert validation.data is not None
    loader = build_validation_loader(
        source,
        local_batch_size=validation.local_batch_size,
        dp_rank=layout.data_rank(ranks.rank),
        dp_size=layout.data_parallel,
        max_samples=validation.max_samples,
        num_workers=validation.data.num_workers,
        pin_memory=ranks.device.type == "cuda",
    )
    stack.callback(loader.close)
    return loader
