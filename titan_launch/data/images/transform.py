"""Changes that turn stored images into samples: resize, crop, augmentation, the user's transform, and normalization.

The random numbers for an image are computed from its index and its position in the stream of samples. So the numbers do
not depend on ranks or workers, and an image is augmented differently in every epoch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_launch.config.image_format import resized_size
from titan_launch.config.sections.data import ImageData
from titan_launch.core.errors import KeyPath, UserError, config_error, format_key
from titan_launch.core.import_string import import_factory, user_traceback
from titan_launch.core.patches import generators_seeded
from titan_launch.data.order import random_words

_AREA, _RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Ranges of a part in `resized_crop`: fraction of the image's area, and width divided by height (arXiv:1409.4842)."""

_ATTEMPTS = 10
"""Largest number of random parts that `resized_crop` draws until one fits into the image."""


class Draw:
    """Random numbers of one image at one position in the order of samples."""

    def __init__(self, index: int, position: int):
        count = 1 + 2 * _ATTEMPTS + 3  # the seed, two for each attempt, two for the position of the crop, the flip
        self._words = iter(random_words(index, position, count).tolist())
        self.seed: int = next(self._words)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """Return a number in [low, high)."""
        return low + (high - low) * (next(self._words) >> 11) * 2.0**-53

    def whole(self, count: int) -> int:
        """Return a whole number from 0 to `count` - 1."""
        return int(self.uniform(0, count))


def _resize_and_crop(image: Tensor, config: ImageData, draw: Draw | None) -> Tensor:
    """Resize, crop and augment an image, uint8 or float32 `[channels, height, width]`, as `config` says. If `draw` is
    None, the image is not augmented."""
    crop, augment = config.crop, config.augment
    if config.resize is not None:
        image = _scale(image, *resized_size(*_size(image), config.resize))
    if draw is not None and "resized_crop" in augment:
        top, left, height, width = _random_part(*_size(image), draw)
        image = image[:, top : top + height, left : left + width]
        assert crop is not None, "config.rules demands crop with resized_crop"
        image = _scale(image, crop, crop)
    elif draw is not None and "crop" in augment:
        height, width = (crop or size for size in image.shape[1:])
        image = F.pad(image, [config.padding] * 4)
        top, left = (draw.whole(max(0, size - n) + 1) for size, n in zip(image.shape[1:], (height, width), strict=True))
        image = image[:, top : top + height, left : left + width]
    elif crop is not None:
        top, left = (max(0, round((size - crop) / 2)) for size in image.shape[1:])
        image = image[:, top : top + crop, left : left + crop]
    if draw is not None and "flip" in augment and draw.uniform() < 0.5:
        image = image.flip(-1)
    return image


def _size(image: Tensor) -> tuple[int, int]:
    return image.shape[1], image.shape[2]


def _scale(image: Tensor, height: int, width: int) -> Tensor:
    """Scale an image with a bilinear filter, without aliasing."""
    return F.interpolate(image[None], (height, width), mode="bilinear", antialias=True)[0]


def _random_part(height: int, width: int, draw: Draw) -> tuple[int, int, int, int]:
    """Return top, left, height and width of a random part. If no attempt fits, return the largest centered part whose
    aspect ratio is allowed."""
    low, high = (math.log(ratio) for ratio in _RATIO)
    for _ in range(_ATTEMPTS):
        area = height * width * draw.uniform(*_AREA)
        ratio = math.exp(draw.uniform(low, high))
        part_height, part_width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
        if 0 < part_height <= height and 0 < part_width <= width:
            return draw.whole(height - part_height + 1), draw.whole(width - part_width + 1), part_height, part_width
    part_width = min(width, round(height * _RATIO[1]))
    part_height = min(height, round(width / _RATIO[0]))
    return (height - part_height) // 2, (width - part_width) // 2, part_height, part_width


class Transform:
    """All changes of an image, from a stored image to the float32 input of a model."""

    def __init__(self, config: ImageData, key: KeyPath):
        """Build the transforms of the section at `key`. Raises ConfigError if the user's factory cannot be imported,
        fails, or does not return a callable."""
        self.config, self._key = config, key
        self._user = None if config.transform is None else self._build(config.transform, is_training=key[0] == "data")
        self._mean, self._std = _per_channel(config.mean), _per_channel(config.std)

    def changed(self, image: Tensor, index: int, position: int | None) -> Tensor:
        """Return an image after all changes except normalization, uint8 or floating point. `position`: the position in
        the stream; None: the image is not augmented, and the user's transform always gets the same random numbers for
        the image. Raises UserError if the user's transform fails or returns no image."""
        draw = Draw(index, position) if position is not None and self.config.augment else None
        image = _resize_and_crop(image, self.config, draw)
        if self._user is not None:
            with generators_seeded(Draw(index, position or 0).seed):
                image = self._call(self._user, image)
        return image

    def normalized(self, images: Tensor) -> Tensor:
        """Return `(images - mean) / std` as float32. uint8 images are first divided by 255. `images`: the results of
        `changed`, `[..., channels, height, width]`.

        Raises ConfigError if the number of values of `mean` or `std` is neither 1 nor the number of channels.
        """
        for name, values in (("mean", self._mean), ("std", self._std)):
            if len(values) not in (1, images.shape[-3]):
                reason = f"must be one number, or one number for each of the {images.shape[-3]} channels of the images"
                raise config_error((*self._key, name), reason, getattr(self.config, name))
        unit = 255 if images.dtype == torch.uint8 else 1
        inputs = images.to(torch.float32, copy=True)
        return inputs.sub_(self._mean * unit).div_(self._std * unit)  # in place: images may be large

    def _build(self, name: str, is_training: bool) -> Callable[[Tensor], Any]:
        key = (*self._key, "transform")
        factory = import_factory(name, key)
        try:
            transform = factory(train=is_training)
        except Exception as error:
            reason = f"factory(train={is_training}) failed:\n{user_traceback(error)}"
            raise config_error(key, reason, name) from error
        if not callable(transform):
            reason = f"factory(train={is_training}) must return a callable, not {type(transform).__name__}"
            raise config_error(key, reason, name)
        return transform

    def _call(self, transform: Callable[[Tensor], Any], image: Tensor) -> Tensor:
        setting = f'{format_key((*self._key, "transform"))} = "{self.config.transform}"'
        try:
            result = transform(image.contiguous())
        except Exception as error:
            reason = f"failed for an image {list(image.shape)}:\n{user_traceback(error)}"
            raise UserError(f"{setting}: {reason}") from error
        if (
            isinstance(result, Tensor)
            and result.ndim == 3
            and (result.dtype == torch.uint8 or result.is_floating_point())
        ):
            return result
        found = f"{result.dtype} {list(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
        reason = f"must return a uint8 or floating-point tensor [channels, height, width], not {found}"
        raise UserError(f"{setting}: {reason}")


def _per_channel(value: float | tuple[float, ...]) -> Tensor:
    """Return one number, or one number per channel, as a float32 tensor `[1 or channels, 1, 1]`."""
    return torch.tensor(value, dtype=torch.float32).view(-1, 1, 1)
