"""A microbatch as the model will be given it: shapes and dtypes without values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan_launch.config.architectures import images_taken
from titan_launch.config.data import ImageData, SyntheticData, TextData
from titan_launch.config.job import JobConfig
from titan_launch.data.sequence_part import SequencePart
from titan_launch.data.sources.images import build_images
from titan_launch.parallel.pipeline import pipeline_of
from titan_launch.plan.layout import Layout
from titan_launch.tokenizer import build_tokenizer


class Batches:
    """The microbatches of a rank: all alike."""

    def __init__(self, config: JobConfig, layout: Layout, part: SequencePart | None):
        """`part`: of every sequence, what the rank has. Raises ConfigError as `sample_format` does."""
        self._config = config
        self._batch_size = layout.local_batch_size
        self._shape, self.num_classes = sample_format(config)
        self._part = part

    def make(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, on the default device."""
        inputs, targets = make_microbatch(self._config, self._shape, self._batch_size)
        if self._part is None:
            return inputs, targets
        return self._part.of(inputs, axis=1), self._part.of(targets, axis=1)

    def announce(self, model: nn.Module) -> None:
        """Let the stages of a pipeline find what travels between them, before tensors are fake ones."""
        pipeline = pipeline_of(model)
        if pipeline is not None:
            with torch.device("meta"):
                pipeline.boundaries.of(self.make()[0])


def sample_format(config: JobConfig) -> tuple[tuple[int, ...], int]:
    """Return the shape of one input, `[seq_len]` or `[channels, height, width]`, and the number of classes.

    Of images it is what the model takes; a user's own model takes what the data source holds, which is read for it.
    Raises ConfigError where that cannot be read.
    """
    data = config.data
    if isinstance(data, TextData):
        return (config.training.seq_len,), build_tokenizer(config.tokenizer).vocab_size
    if isinstance(data, SyntheticData):
        return (config.training.seq_len,), data.vocab_size
    taken = images_taken(config.model)
    if taken is not None:
        return (taken.channels, taken.height, taken.width), taken.num_classes
    source = build_images(data, None, ("data",))
    image, _ = source[0]
    return tuple(image.shape), source.num_classes


def make_microbatch(config: JobConfig, shape: tuple[int, ...], num_samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `num_samples`, as the data sources give them, on the default device."""
    if isinstance(config.data, ImageData):
        return torch.zeros(num_samples, *shape), torch.zeros(num_samples, dtype=torch.int64)
    tokens = torch.zeros(num_samples, *shape, dtype=torch.int64)
    return tokens, torch.zeros_like(tokens)
