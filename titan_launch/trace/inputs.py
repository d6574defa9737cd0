"""A microbatch as the model will be given it: shapes and dtypes without values."""

from __future__ import annotations

import torch
from torch import Tensor

from titan_launch.config.architectures import images_taken
from titan_launch.config.data import ImageData
from titan_launch.config.job import JobConfig
from titan_launch.data.sources.images import build_images


def sample_shape(config: JobConfig) -> tuple[int, ...]:
    """The shape of one input: `[seq_len]`, or `[channels, height, width]`.

    Of images it is what the model takes; a user's own model takes what the data source holds, which is read for it.
    Raises ConfigError where that cannot be read.
    """
    if not isinstance(config.data, ImageData):
        return (config.training.seq_len,)
    taken = images_taken(config.model)
    if taken is not None:
        return (taken.channels, taken.height, taken.width)
    image, _ = build_images(config.data, None, ("data",))[0]
    return tuple(image.shape)


def make_microbatch(config: JobConfig, shape: tuple[int, ...], num_samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `num_samples`, as the data sources give them, on the default device."""
    if isinstance(config.data, ImageData):
        return torch.zeros(num_samples, *shape), torch.zeros(num_samples, dtype=torch.int64)
    tokens = torch.zeros(num_samples, *shape, dtype=torch.int64)
    return tokens, torch.zeros_like(tokens)
