"""The data of a run: its samples, its training batches and its validation batches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from torch import Tensor

from titan_launch.config.architectures import images_taken
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.data import DataSource
from titan_launch.core.errors import KeyPath
from titan_launch.data.loader import Loader, SampleOrder, build_train_loader, build_validation_loader
from titan_launch.data.sources import Batch, SampleSource, build_source
from titan_launch.data.tokenizers import build_tokenizer
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.process_group import Ranks
from titan_launch.parallel.context_parallel import SequencePart, part_of, sequence_part
from titan_launch.plan.layout import Layout


class TrainBatches:
    """An endless iterator over this rank's microbatches, whose position in the data can be moved.

    for microbatch in batches: ...
    batches.move_to(position)
    """

    def __init__(self, build: Callable[[int], Loader], position: int):
        """`build` returns a loader that begins at a position. The position is counted in samples over all ranks."""
        self._build = build
        self._begin(position)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._batches)

    def move_to(self, position: int) -> None:
        """Continue at another position, with new data workers."""
        self.close()
        self._begin(position)

    def close(self) -> None:
        """End the data workers."""
        self._loader.close()

    def _begin(self, position: int) -> None:
        self._loader = self._build(position)
        self._batches = iter(self._loader)


@dataclass(frozen=True)
class RunData:
    """The data sources of a run. With context parallelism, each sample is this rank's part of a sequence."""

    train: SampleSource
    validation: SampleSource | None
    """The samples to validate on; None without validation."""

    sequence_part: SequencePart | None
    """This rank's part of every sequence; None without context parallelism."""

    local_batch_size: int
    """Number of samples of a microbatch on this rank."""

    @property
    def sources(self) -> dict[str, SampleSource]:
        """The data sources by section of the job file, `data` and `validation.data`."""
        return {"data": self.train} | ({} if self.validation is None else {"validation.data": self.validation})

    @property
    def num_classes(self) -> int:
        """Number of classes; for tokens, the vocabulary size."""
        return max(source.num_classes for source in self.sources.values())

    def meta_inputs(self) -> Tensor:
        """Return the inputs of one microbatch on this rank, on the meta device. Reads one sample."""
        inputs = self.train[0][0]
        return inputs.to("meta").expand(self.local_batch_size, *inputs.shape)


def build_data(config: JobConfig, mesh: Mesh) -> RunData:
    """Open the data to train on and to validate on. Raises ConfigError for data that cannot be read."""
    tokenizer, part = build_tokenizer(config.tokenizer), sequence_part(mesh.context, config.parallelism)

    def build(data: DataSource, key: KeyPath) -> SampleSource:
        source = build_source(data, tokenizer, config.training.seq_len, key, images_taken(config.model))
        return part_of(source, part)

    train, validation = build(config.data, ("data",)), None
    if config.validation.freq and config.validation.data is not None:
        validation = build(config.validation.data, ("validation", "data"))
    return RunData(train, validation, part, mesh.layout.local_batch_size)


def build_train_batches(
    config: JobConfig, source: SampleSource, layout: Layout, ranks: Ranks, position: int, stack: ExitStack
) -> TrainBatches:
    """Return this rank's microbatches, from a position in the data. Closing `stack` ends the data workers."""

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
    """Return the order in which the run reads its samples."""
    return SampleOrder(epoch_size, config.training.seed, config.data.shuffle)


def build_validation_batches(
    config: JobConfig, source: SampleSource | None, layout: Layout, ranks: Ranks, stack: ExitStack
) -> Iterable[Batch] | None:
    """Return this rank's batches of the validation source; None if the run has no validation source. Closing `stack`
    ends the data workers."""
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
