"""Sources of images with classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_launch.config.image_format import ImageFormat, misfits
from titan_launch.config.paths import class_folders, images_named
from titan_launch.config.sections.data import ImageData
from titan_launch.core.errors import ConfigError, KeyPath, Problem, UserError, config_error
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of
from titan_launch.data.images.arrays import Labels, open_digits, open_npz
from titan_launch.data.images.encoded import open_folder, open_shards
from titan_launch.data.images.transform import Transform
from titan_launch.data.sources.interface import Details, SourceContext

Indices = npt.NDArray[np.int64]


class Images(Protocol):
    """Stored images, by index."""

    labels: Labels
    """Class of each image."""

    skipped: str
    """Number and name of skipped files, such as `2 files that ..., first: cat/9.png`; "" if no files were skipped."""

    def as_file(self, chosen: Indices) -> tuple[str, int]:
        """Return (name, size in bytes) of the images with the indices `chosen`. A fingerprint lists these images as one
        file. The name is, for example, a digest of the images."""

    def hashes(self) -> npt.NDArray[np.uint32]:
        """Return a hash for each image, which decides to which split the image belongs."""

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""

    def content(self, index: int) -> bytes:
        """Return the stored bytes of an image."""

    def pixels(self, index: int, resize: int | None) -> Tensor:
        """Return an image, uint8 or float32 `[channels, height, width]`. Raises UserError for an image that cannot be
        read. `resize`: number of pixels to which the caller will scale the shorter side; None: no scaling."""


class ImageSource:
    """Images with transforms. All samples have one shape."""

    def __init__(self, images: Images, chosen: Indices, transform: Transform, class_names: Sequence[str] = ()):
        """`chosen`: indices of the images of the split. The first of these images is read, to find the shape of
        samples. `class_names`: names of the classes, for `details`; if empty, `details` numbers the classes. Raises
        UserError if the first image cannot be read, and ConfigError if `mean` or `std` does not fit its channels."""
        self._class_names = class_names
        self.num_classes = int(images.labels.max()) + 1
        self._images, self._chosen, self._transform = images, chosen, transform
        self._shape: torch.Size | None = None
        self._shape = self.shape = transform.normalized(self._changed(0, None)).shape

    def __len__(self) -> int:
        return len(self._chosen)

    def describe(self) -> str:
        skipped = self._images.skipped and f"; skipped {self._images.skipped}"
        return f"{len(self):,} images {tuple(self.shape)} of {self.num_classes:,} classes{skipped}"

    def details(self) -> Details:
        counts = np.bincount(self._images.labels[self._chosen], minlength=self.num_classes).tolist()
        amounts = {
            "shape": " x ".join(map(str, self.shape)),
            "bytes": self._images.as_file(self._chosen)[1],
            "classes": dict(zip(self._class_names or map(str, range(self.num_classes)), counts, strict=True)),
        }
        return Details(amounts | ({"skipped": self._images.skipped} if self._images.skipped else {}))

    def fingerprint(self, seed: int) -> Fingerprint:
        """Return the fingerprint of the stored images and labels, which count as one file."""
        images = self._images

        def sample(index: int) -> bytes:
            image = self._chosen[index]
            return images.content(image) + images.labels[image].tobytes()

        return fingerprint_of([("", *images.as_file(self._chosen))], len(self), sample, seed)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a float32 image `[channels, height, width]` without augmentation, and its class, an int64 scalar.
        Raises UserError if the image cannot be read, or if its shape differs from that of the first image."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        images, labels = self.read_batch([index], None)
        return images[0], labels[0]

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None) -> tuple[Tensor, Tensor]:
        """Return float32 images `[len(indices), channels, height, width]`, and their classes, int64 `[len(indices)]`.
        With `positions`, the images are augmented with random numbers that depend only on index and position. Raises
        UserError as `__getitem__` does."""
        places = repeat(None, len(indices)) if positions is None else positions
        images = list(map(self._changed, indices, places))
        normalized = self._transform.normalized
        if len({image.dtype for image in images}) == 1:  # a user's transform may return several dtypes
            inputs = normalized(torch.stack(images))
        else:
            inputs = torch.stack([normalized(image) for image in images])
        return inputs, torch.from_numpy(self._images.labels[self._chosen[list(indices)]])

    def _changed(self, index: int, position: int | None) -> Tensor:
        """Return image `index` of the split after all changes except normalization. Raises UserError."""
        image = int(self._chosen[index])
        pixels = self._images.pixels(image, self._transform.config.resize)
        sample = self._transform.changed(pixels, image, position)
        if self._shape is not None and sample.shape != self._shape:
            raise UserError(
                f"{self._images.name(image)} becomes a sample {tuple(sample.shape)}, but other samples are "
                f"{tuple(self._shape)}; set resize and crop, so that images of all sizes become samples of one size"
            )
        return sample


def build_images(config: ImageData, context: SourceContext) -> ImageSource:
    """Return the source of the images in the split of `config`. Raises ConfigError on a key below `context.key`. Raises
    UserError if the first image cannot be read, or if the cache cannot be written."""
    key, taken = context.key, context.images_taken
    images = _open(config, 3 if taken is None else taken.channels, (*key, "path"))
    chosen = _choose_split(images, config, key)
    names = class_folders(config.path) if images_named(config.path) == "folder" else ()
    source = ImageSource(images, chosen, Transform(config, key), names)
    channels, height, width = source.shape
    if taken is not None:
        held = ImageFormat(channels, height, width, num_classes=source.num_classes)
        problems = [Problem((*key, "path"), reason, config.path) for reason in misfits(held, taken)]
        if problems:
            raise ConfigError(problems)
    return source


def _open(config: ImageData, channels: int, path_key: KeyPath) -> Images:
    match images_named(config.path):
        case "digits":
            return open_digits(path_key)
        case "folder":
            return open_folder(config.path, channels, path_key)
        case "shards":
            return open_shards(config.path, config.label_field, channels, path_key)
        case "npz":
            return open_npz(config.path, path_key)


def _choose_split(images: Images, config: ImageData, key: KeyPath) -> Indices:
    """Return the indices of the images in the split, in order. Raises ConfigError if there are none."""
    if config.split == "all":
        return np.arange(len(images.labels))
    wanted = config.split == "validation"
    is_validation = images.hashes() % 100 < config.validation_percent
    chosen = np.flatnonzero(is_validation == wanted)
    if not len(chosen):
        other = "train" if wanted else "validation"
        reason = (
            f"is empty: with validation_percent = {config.validation_percent}, all {len(images.labels)} images belong "
            f'to "{other}"; provide more images, or a separate path with split = "all"'
        )
        raise config_error((*key, "split"), reason, config.split)
    return chosen
