"""Images and their classes, held in memory in their stored dtype."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_launch.config.sections.data import SKLEARN_DIGITS, ImageData, ImageFormat, misfits
from titan_launch.core.errors import ConfigError, KeyPath, Problem, config_error
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of
from titan_launch.data.sources.base import SourceContext

Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.floating]
Labels = npt.NDArray[np.int64]

_DIGITS_MAXIMUM = 16
_UINT8_MAXIMUM = 255


class ImageSource:
    """Images `[N, channels, height, width]` and labels `[N]`; `__getitem__` scales the pixels."""

    def __init__(self, images: Pixels, labels: Labels, num_classes: int, mean: Tensor, std: Tensor):
        """`num_classes` must be larger than every label. `mean` and `std`: float32 `[1 or channels, 1, 1]`. For uint8
        images they refer to pixels divided by 255."""
        self.num_classes = num_classes
        unit = _UINT8_MAXIMUM if images.dtype == np.uint8 else 1
        self._images, self._labels = images, labels
        self._mean, self._std = mean * unit, std * unit

    def __len__(self) -> int:
        return len(self._images)

    def describe(self) -> str:
        """Return the amount of data as part of a log line."""
        return f"{len(self):,} images {self._images.shape[1:]} of {self.num_classes:,} classes"

    def fingerprint(self, seed: int) -> Fingerprint:
        """Return the fingerprint of the stored images and labels, which count as one file."""
        images, labels = self._images, self._labels
        files = [("", f"{images.dtype} {images.shape[1:]}", images.nbytes + labels.nbytes)]
        return fingerprint_of(files, len(self), lambda index: images[index].tobytes() + labels[index].tobytes(), seed)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return a float32 image `[channels, height, width]` and its class, an int64 scalar."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        pixels = torch.from_numpy(self._images[index].astype(np.float32))
        return (pixels - self._mean) / self._std, torch.tensor(self._labels[index])


def build_images(config: ImageData, context: SourceContext) -> ImageSource:
    """Read the images of `config` and choose its split. Raises ConfigError that names a key below `context.key`."""
    key, taken = context.key, context.images_taken
    path_key = (*key, "path")
    images, labels = _read_digits(path_key) if config.path == SKLEARN_DIGITS else _read_npz(config.path, path_key)
    _, channels, height, width = images.shape
    held = ImageFormat(channels, height, width, num_classes=int(labels.max()) + 1)
    if taken is not None:
        problems = [Problem(path_key, reason, config.path) for reason in misfits(held, taken)]
        if problems:
            raise ConfigError(problems)
    mean = _per_channel(config.mean, channels, (*key, "mean"))
    std = _per_channel(config.std, channels, (*key, "std"))
    if config.split != "all":
        chosen = _choose_split(len(images), config, key)
        images, labels = images[chosen], labels[chosen]
    return ImageSource(images, labels, held.num_classes, mean, std)


def is_validation_image(index: int, percent: int) -> bool:
    """Return True if image `index` belongs to the `percent` % of validation images. Only the arguments decide."""
    return zlib.crc32(str(index).encode()) % 100 < percent


def _read_digits(path_key: KeyPath) -> tuple[Pixels, Labels]:
    try:
        from sklearn.datasets import load_digits  # optional, and slow to import
    except ImportError:
        reason = "needs scikit-learn, which is not installed: pip install scikit-learn"
        raise config_error(path_key, reason, SKLEARN_DIGITS) from None
    digits = load_digits()
    return (digits.images[:, None] / _DIGITS_MAXIMUM).astype(np.float32), digits.target.astype(np.int64)


def _read_npz(path: str, path_key: KeyPath) -> tuple[Pixels, Labels]:
    arrays = _load_arrays(path, path_key)
    problem = next(_problems(arrays), None)
    if problem is not None:
        raise config_error(path_key, problem, path)
    images, labels = arrays["images"], arrays["labels"]
    return images[:, None] if images.ndim == 3 else images, labels.astype(np.int64)


def _load_arrays(path: str, path_key: KeyPath) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays `images` and `labels` of an .npz file. An array that the file does not contain is absent from
    the result."""
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            return {name: np.asarray(file[name]) for name in ("images", "labels") if name in file.files}
    except OSError as error:
        raise config_error(
            path_key, f"cannot be read: {error.strerror or error}; correct the path or the permissions", path
        ) from None
    except Exception:  # numpy raises many types for damaged files and other formats
        raise config_error(
            path_key,
            "is not a valid .npz file of plain arrays; write the file with numpy.savez(path, images=..., labels=...)",
            path,
        ) from None


def _problems(arrays: Mapping[str, npt.NDArray[Any]]) -> Iterator[str]:
    """Yield the problems of the arrays. Only the first is meaningful: later checks assume that earlier ones passed."""
    for name in ("images", "labels"):
        if name not in arrays:
            yield f"holds no array named {name}; save the file with numpy.savez(path, images=..., labels=...)"
    images, labels = arrays["images"], arrays["labels"]
    if images.ndim not in (3, 4):
        yield f"images have the shape {images.shape}; save them as (N, height, width) or (N, channels, height, width)"
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        yield f"images are {images.dtype}; save them as uint8 or floating point"
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        yield f"labels are {labels.dtype} of the shape {labels.shape}; save them as integers of the shape (N)"
    if len(images) != len(labels):
        yield f"holds {len(images)} images, but {len(labels)} labels; save one label for each image"
    if not images.size:
        yield "holds no images; save at least one image with its label"
    if labels.min() < 0:
        yield f"labels must be 0 or more, but the smallest is {labels.min()}; number the classes from 0"
    if not np.isfinite(images).all():
        yield "some pixels of the images are not finite (NaN or infinity); remove or repair these images"


def _per_channel(value: float | tuple[float, ...], channels: int, key: KeyPath) -> Tensor:
    """Return `value`, one number or one per channel, as a float32 tensor `[1 or channels, 1, 1]`."""
    if isinstance(value, tuple) and len(value) != channels:
        reason = f"must be one number, or one number for each of the {channels} channels of the images"
        raise config_error(key, reason, value)
    return torch.tensor(value, dtype=torch.float32).view(-1, 1, 1)


def _choose_split(num_images: int, config: ImageData, key: KeyPath) -> npt.NDArray[np.int64]:
    """Return the indices of the images in the split, in order."""
    wanted = config.split == "validation"
    chosen = [i for i in range(num_images) if is_validation_image(i, config.validation_percent) == wanted]
    if not chosen:
        other = "train" if wanted else "validation"
        reason = (
            f"is empty: with validation_percent = {config.validation_percent}, all {num_images} images belong to "
            f'"{other}"; provide more images, or a separate path with split = "all"'
        )
        raise config_error((*key, "split"), reason, config.split)
    return np.array(chosen)
