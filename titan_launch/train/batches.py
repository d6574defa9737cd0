"""The data of a run: its samples, its training batches and its validation batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from titan_launch.checkpoint.state import Progress, SizedPart, Values
from titan_launch.config.job import JobConfig
from titan_launch.config.rules import STEP_RULES
from titan_launch.config.rules.data import NO_EPOCHS_OF_A_STREAM
from titan_launch.config.sections.data import DataSource, MixtureData, separates_documents
from titan_launch.config.sections.loss import ANSWERS, PAIRS, RATED
from titan_launch.core.errors import ConfigError, KeyPath, RunError, config_error
from titan_launch.core.json_files import parse_json
from titan_launch.data.epochs import steps_of
from titan_launch.data.loader import (
    FetchedAhead,
    Loader,
    StreamLoader,
    Workers,
    build_train_loader,
    build_validation_loader,
    num_validation_batches,
)
from titan_launch.data.order import MixtureOrder, Order, SampleOrder
from titan_launch.data.sources import Batch, MixtureSource, SampleSource, StreamSource, build_source
from titan_launch.data.sources.mixture import single_sources
from titan_launch.data.tokenizers import Tokenizer, build_tokenizer
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.architectures import images_taken
from titan_launch.parallel.context_parallel import SequencePart, part_of, part_of_batch
from titan_launch.plan.job import with_values
from titan_launch.plan.layout import Layout


class TrainBatches:
    """An endless iterator over this rank's microbatches. `move_to` changes its position in the data."""

    def __init__(self, build: Callable[[int], Loader], position: int, num_ahead: int):
        """`build` returns a loader that begins at a position. The position is counted in samples over all ranks.
        `num_ahead`: number of microbatches to fetch ahead of their use; 0 without data workers."""
        self._build = build
        self._num_ahead = num_ahead
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
        if isinstance(self._batches, FetchedAhead):
            self._batches.close()
        self._loader.close()

    def _begin(self, position: int) -> None:
        self._loader = self._build(position)
        self._batches = FetchedAhead(self._loader, self._num_ahead) if self._num_ahead else iter(self._loader)


_MOST_VALUES = 20_000_000
"""Largest number of values in the state of a stream. The state may hold the samples of a shuffle buffer."""


class StreamBatches(SizedPart):
    """An endless iterator over this rank's microbatches of a stream, and a part of the training state.

    The state is that of torchdata's loader: plain data, saved as JSON for each data-parallel rank. A resume needs the
    same numbers of data-parallel ranks and of workers. Ranks of tensor, context or pipeline parallelism that read the
    same data have the same state.
    """

    def __init__(self, source: StreamSource, layout: Layout, dp_rank: int, part: SequencePart | None, workers: Workers):
        """`part`: this rank's part of the tokens of every sequence; None without context parallelism."""
        self._loader = StreamLoader(source, dp_rank, layout.data_parallel, layout.local_batch_size, workers)
        self._division = _division(layout.data_parallel, workers.number)
        self._key = f"{layout.data_parallel}x{workers.number}.{dp_rank}"
        self._part = part
        self._batches: Iterator[Batch] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._batches is None:
            self._batches = iter(self._loader)
        return part_of_batch(next(self._batches), self._part)

    def close(self) -> None:
        """End the data workers."""
        self._loader.close()

    def state_dict(self) -> Values:
        """Return the position after the last batch. Raises RunError if the position is not plain data."""
        try:
            text = json.dumps(self._loader.state_dict(), allow_nan=False)
        except (TypeError, ValueError) as error:
            form = "return only dicts, lists, strings, finite numbers and None"
            reason = "state_dict() of the stream that data.kind names returned a value that cannot be saved as JSON"
            raise RunError(f"{reason} ({error}); {form}") from None
        return {self._key: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)}

    def targets(self, shapes: Mapping[str, tuple[int, ...]]) -> Values:
        """Return tensors into which a checkpoint with these shapes is read. Raises ConfigError if the checkpoint has
        the positions of another number of data-parallel ranks or workers."""
        if shapes and self._key not in shapes:
            saved, _, workers = next(iter(shapes)).partition(".")[0].partition("x")
            raise config_error(
                ("data", "kind"),
                f"the checkpoint has the positions of a stream on {_division(saved, workers)}, and this run "
                f"has {self._division}; resume with the same numbers as the checkpoint, or load a "
                "step (--checkpoint.load=1000) and begin the stream again with "
                "--checkpoint.exclude_from_loading='[\"data\"]'",
            )
        return {key: torch.empty(shape, dtype=torch.uint8) for key, shape in shapes.items() if key == self._key}

    def load_state_dict(self, state: Values) -> None:
        """Continue after a saved position. If the iterator has already started, as after a rollback, the position is
        ignored, because a stream cannot go back. Raises ValueError for a position that is not a JSON object."""
        if self._key in state and self._batches is None:
            saved: Any = parse_json(state[self._key].numpy().tobytes(), _MOST_VALUES)
            if not isinstance(saved, dict):
                raise ValueError("the position in the stream is not a JSON object")
            self._loader.load_state_dict(saved)


def _division(num_ranks: int | str, num_workers: int | str) -> str:
    ranks, workers = ("s" * (str(number) != "1") for number in (num_ranks, num_workers))
    return f"{num_ranks} data-parallel rank{ranks} with {num_workers} worker{workers} each"


@dataclass(frozen=True)
class ValidationBatches:
    """An iterable over this rank's batches of the validation data. Each batch comes with the name of its source, which
    is "" if the data is not a mixture."""

    loader: Loader
    names: Sequence[str]
    """For each batch of the loader, the name of its source."""

    def __iter__(self) -> Iterator[tuple[str, Batch]]:
        return zip(self.names, self.loader, strict=True)


@dataclass(frozen=True)
class RunBatches:
    """The training and validation batches of a rank."""

    order: Order
    """The order of the training samples."""

    train: TrainBatches | StreamBatches
    """An endless iterator over this rank's microbatches."""

    validation: ValidationBatches | None
    """None if the run has no validation source."""

    @property
    def indexed(self) -> TrainBatches | None:
        """The training batches if their samples have indices; None for a stream."""
        return self.train if isinstance(self.train, TrainBatches) else None


@dataclass(frozen=True)
class RunData:
    """The data sources of a run. A sample of text is a whole sequence of tokens, even with context parallelism."""

    train: SampleSource
    order: Order
    """The order in which the run reads the samples of `train`."""

    validation: SampleSource | None
    """None without validation."""

    validation_parts: Mapping[str, range]
    """Samples to validate on: a range of indices in `validation` for each source, by name. Empty without validation."""

    sequence_part: SequencePart | None
    """This rank's part of the tokens of every sequence; None without context parallelism."""

    layout: Layout
    tokenizer: Tokenizer

    @property
    def sources(self) -> dict[str, SampleSource]:
        """The data sources by section of the job file, such as `data`, `validation.data`, or `data.sources.0` in a
        mixture."""
        sections = {"data": self.train} | ({} if self.validation is None else {"validation.data": self.validation})
        return {
            f"{section}.sources.{index}" if name else section: source
            for section, whole in sections.items()
            for index, (name, source) in enumerate(single_sources(whole).items())
        }

    @property
    def num_classes(self) -> int:
        """Number of classes; for tokens, the vocabulary size."""
        return max(source.num_classes for source in self.sources.values())

    def describe(self, num_samples: int) -> list[tuple[str, str]]:
        """Return log lines (name, text) about the data. `num_samples`: number of training samples of the whole run."""
        lines = []
        for name, source in single_sources(self.train).items():
            text = source.describe()
            if isinstance(self.order, MixtureOrder):
                share, epochs = self.order.progress(num_samples)[name]
                text = f"{share:.1%} of the run's samples, {epochs:.2f} epochs; {text}"
            lines.append((f"data {name}".rstrip(), text))
        held_out = {} if self.validation is None else single_sources(self.validation)
        for name, source in held_out.items():
            used = len(self.validation_parts[name])
            text = f"; the first {used:,} samples are used" if used < len(source) else ""
            lines.append((f"validation data {name}".rstrip(), f"{source.describe()}{text}"))
        return lines

    def meta_inputs(self) -> Tensor:
        """Return the inputs of one microbatch on this rank, on the meta device. Reads one sample."""
        inputs = part_of(self.train, self.sequence_part)[0][0]
        return inputs.to("meta").expand(self.layout.local_batch_size, *inputs.shape)


def build_data(config: JobConfig, layout: Layout, part: SequencePart | None) -> RunData:
    """Open the training data and the validation data. Raises ConfigError for data that cannot be read, or whose samples
    do not fit the loss. `part`: see `RunData.sequence_part`."""
    tokenizer = build_tokenizer(config.tokenizer)

    def build(data: DataSource, key: KeyPath) -> SampleSource:
        return build_source(data, tokenizer, config.training.seq_len, key, images_taken(config.model))

    train, validation = build(config.data, ("data",)), None
    parts: dict[str, range] = {}
    if config.validation.freq and config.validation.data is not None:
        validation, start = build(config.validation.data, ("validation", "data")), 0
        for name, source in single_sources(validation).items():
            parts[name] = range(start, start + len(source))[: config.validation.max_samples]
            start += len(source)
    data = RunData(
        train,
        build_order(config.data, train, config.training.seed, layout.global_batch_size),
        validation,
        parts,
        part,
        layout,
        tokenizer,
    )
    _check_answers(config, data)
    return data


def with_steps(config: JobConfig, data: RunData, progress: Progress | None = None) -> JobConfig:
    """Return the job with `training.steps` computed from `training.epochs`, rounded up. A job without epochs is
    unchanged.

    `progress`: progress of a resumed run, whose finished steps may have had another global batch size.
    Raises ConfigError for a stream, which has no epochs, and for keys that do not fit the number of steps.
    """
    epochs, progress = config.training.epochs, progress or Progress()
    if epochs is None:
        return config
    if isinstance(data.train, StreamSource):
        raise config_error(("training", "epochs"), NO_EPOCHS_OF_A_STREAM, epochs, also=(("data", "kind"),))
    rest = steps_of(epochs, data.order.num_samples, data.layout.global_batch_size, progress.samples_seen)
    steps = max(1, progress.step + rest)
    config = with_values(config, {("training", "steps"): steps})
    if problems := [problem for rule in STEP_RULES for problem in rule(config)]:
        raise ConfigError(problems)
    return config


def build_order(data: DataSource, source: SampleSource, seed: int, global_batch_size: int) -> Order:
    """Return the order in which a run reads the samples of its training source."""
    if not (isinstance(data, MixtureData) and isinstance(source, MixtureSource)):
        return SampleOrder(len(source), seed, data.shuffle)
    orders = {
        name: SampleOrder(len(one), seed, entry.shuffle)
        for (name, one), entry in zip(source.sources.items(), data.sources, strict=True)
    }
    stages = [(step * global_batch_size, weights) for step, weights in data.stages()]
    return MixtureOrder(orders, stages, seed)


def _check_answers(config: JobConfig, data: RunData) -> None:
    """Raise ConfigError if a data source lacks the answers that the loss reads, or has answers that the loss does not
    read. Answers are pairs, or single answers with a label."""
    flags = {PAIRS: "has_pairs", RATED: "has_ratings"}  # attributes of token files
    for (section, source), (kind, flag) in product(data.sources.items(), flags.items()):
        wanted = config.loss.kind.data_kind == kind
        if getattr(source, flag, wanted) != wanted:
            key = tuple(int(part) if part.isdigit() else part for part in section.split("."))
            has, reads = ("has no", "needs") if wanted else ("has", "does not read")
            remedy = f'prepared with kind = "{kind}"' if wanted else "without them, or set another loss.name"
            reason = f'{has} {ANSWERS[kind]}, which loss.name = "{config.loss.name}" {reads}; name token files {remedy}'
            raise config_error((*key, "path"), reason, also=(("loss", "name"),))


def build_train_batches(
    config: JobConfig, data: RunData, ranks: Ranks, position: int, stack: ExitStack
) -> TrainBatches:
    """Return this rank's microbatches after the first `position` samples of the run (counted over all ranks). Closing
    `stack` ends the data workers."""
    workers = Workers(config.data.num_workers, ranks.device.type == "cuda")

    def build_loader(start: int) -> Loader:
        source, dp_rank = part_of(data.train, data.sequence_part), data.layout.data_rank(ranks.rank)
        return build_train_loader(source, data.order, data.layout, dp_rank, start=start, workers=workers)

    num_ahead = data.layout.num_microbatches if config.data.num_workers else 0
    batches = TrainBatches(build_loader, position, num_ahead)
    stack.callback(batches.close)
    return batches


def build_stream_batches(config: JobConfig, data: RunData, ranks: Ranks, stack: ExitStack) -> StreamBatches | None:
    """Return this rank's microbatches of a stream; None if the training data is not a stream. Closing `stack` ends the
    data workers."""
    if not isinstance(data.train, StreamSource):
        return None
    workers = Workers(config.data.num_workers, ranks.device.type == "cuda")
    dp_rank = data.layout.data_rank(ranks.rank)
    batches = StreamBatches(data.train, data.layout, dp_rank, data.sequence_part, workers)
    stack.callback(batches.close)
    return batches


def build_validation_batches(
    config: JobConfig, data: RunData, ranks: Ranks, stack: ExitStack
) -> ValidationBatches | None:
    """Return this rank's batches of the validation source; None if the run has no validation source. Closing `stack`
    ends the data workers."""
    if data.validation is None:
        return None
    validation = config.validation
    assert validation.data is not None
    loader = build_validation_loader(
        part_of(data.validation, data.sequence_part),
        local_batch_size=validation.local_batch_size,
        dp_rank=data.layout.data_rank(ranks.rank),
        dp_size=data.layout.data_parallel,
        parts=list(data.validation_parts.values()),
        workers=Workers(validation.data.num_workers, ranks.device.type == "cuda"),
    )
    stack.callback(loader.close)
    names = [
        name
        for name, part in data.validation_parts.items()
        for _ in range(num_validation_batches(part, validation.local_batch_size, data.layout.data_parallel))
    ]
    return ValidationBatches(loader, names)


def sample_format(config: JobConfig) -> tuple[tuple[int, ...], int]:
    """Return the shape of one input, `[seq_len]` or `[channels, height, width]`, and the number of classes.

    The shape of images comes from the model's arguments. If these arguments do not determine the shape, as for a
    user's own model, one image of the data is read. Raises ConfigError if the data or the tokenizer cannot be read.
    """
    shape, taken = known_input_shape(config), images_taken(config.model)
    if config.data.unit == "tokens":
        assert shape is not None
        return shape, config.data.own_vocabulary() or build_tokenizer(config.tokenizer).vocab_size
    if shape is not None and taken is not None:
        return shape, taken.num_classes
    source = build_source(config.data, build_tokenizer(config.tokenizer), config.training.seq_len)
    image = source[0][0]
    return tuple(image.shape), source.num_classes


def known_input_shape(config: JobConfig) -> tuple[int, ...] | None:
    """Return the shape of one input, as `sample_format` does; None if the size of images is known only from the
    data."""
    if config.data.unit == "tokens":
        return (config.training.seq_len,)
    taken = images_taken(config.model)
    if taken is None or taken.height is None or taken.width is None:
        return None
    return taken.channels, taken.height, taken.width


def make_microbatch(config: JobConfig, shape: tuple[int, ...], num_samples: int) -> Batch:
    """Return a batch of `num_samples` samples of zeros on the default device. Its tensors have the shapes of batches
    from data sources. `shape`: shape of one input."""
    if config.data.unit == "images":
        return Batch(torch.zeros(num_samples, *shape), torch.zeros(num_samples, dtype=torch.int64))
    tokens = torch.zeros(num_samples, *shape, dtype=torch.int64)
    documents = torch.zeros_like(tokens, dtype=torch.int32) if separates_documents(config.data) else None
    return Batch(tokens, torch.zeros_like(tokens), documents)
