"""Images in arrays: `.npz` files, which are mapped into memory, and the digits of scikit-learn."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_launch.config.paths import SKLEARN_DIGITS
from titan_launch.core.errors import KeyPath, UserError, config_error
from titan_launch.core.files import open_regular

Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.floating]
Labels = npt.NDArray[np.int64]

_DIGITS_MAXIMUM = 16

_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class ArrayImages:
    """Images `[N, channels, height, width]` and labels `[N]`."""

    def __init__(self, path: str, images: Pixels, labels: Labels):
        self.labels = labels
        self.note = ""
        self._path, self._images = path, images

    def as_file(self, chosen: npt.NDArray[np.int64]) -> tuple[str, int]:
        """Return the chosen images as if they were one file: dtype and shape, and bytes."""
        images, labels = self._images, self.labels
        image_bytes = images.dtype.itemsize * int(np.prod(images.shape[1:]))
        return f"{images.dtype} {images.shape[1:]}", len(chosen) * (image_bytes + labels.itemsize)

    def hashes(self) -> npt.NDArray[np.uint32]:
        """Return a hash of each image's index."""
        return np.array([zlib.crc32(str(index).encode()) for index in range(len(self.labels))], np.uint32)

    def name(self, index: int) -> str:
        """Return the name of an image for messages."""
        return f"image {index} of {self._path}"

    def content(self, index: int) -> bytes:
        """Return the stored bytes of an image."""
        return self._images[index].tobytes()

    def pixels(self, index: int, resize: int | None) -> Tensor:
        """Return an image `[channels, height, width]`, uint8 or float32. `resize` is not used."""
        stored = self._images[index]
        if stored.dtype == np.uint8:
            return torch.from_numpy(np.array(stored))
        image = stored.astype(np.float32)
        if not np.isfinite(image).all():
            raise UserError(f"{self.name(index)} has pixels that are not finite (NaN or infinity); repair or remove it")
        return torch.from_numpy(image)


def open_digits(path_key: KeyPath) -> ArrayImages:
    """Return the digits of scikit-learn."""
    try:
        from sklearn.datasets import load_digits  # optional, and slow to import
    except ImportError:
        reason = "needs scikit-learn, which is not installed: pip install scikit-learn"
        raise config_error(path_key, reason, SKLEARN_DIGITS) from None
    digits = load_digits()
    images = (digits.images[:, None] / _DIGITS_MAXIMUM).astype(np.float32)
    return ArrayImages(SKLEARN_DIGITS, images, digits.target.astype(np.int64))


def open_npz(path: str, path_key: KeyPath) -> ArrayImages:
    """Return the images of an `.npz` file. Raises ConfigError for other files."""
    remedy = "the file with numpy.savez(path, images=..., labels=...)"
    try:
        arrays = map_npz(Path(path), ("images", "labels"))
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}; correct the path or the permissions"
        raise config_error(path_key, reason, path) from None
    except Exception:  # numpy raises many types for damaged files and other formats
        reason = f"is not a valid .npz file of plain arrays; write {remedy}"
        raise config_error(path_key, reason, path) from None
    problem = next(_problems(arrays, remedy), None)
    if problem is not None:
        raise config_error(path_key, problem, path)
    images, labels = arrays["images"], arrays["labels"]
    return ArrayImages(path, images[:, None] if images.ndim == 3 else images, labels.astype(np.int64))


def map_npz(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the named arrays of an `.npz` file, as far as it contains them. Raises many types of errors.

    Uncompressed arrays are mapped into memory: all processes of a host share them, and only the used parts are read.
    """
    with open_regular(path) as stream, np.load(stream, allow_pickle=False) as file:
        found = [(name, file.zip.getinfo(f"{name}.npy")) for name in names if name in file.files]
        return {name: _map(path, stream, member) if _can_map(member) else file[name] for name, member in found}


def _can_map(member: zipfile.ZipInfo) -> bool:
    return member.compress_type == zipfile.ZIP_STORED


def _map(path: Path, stream: BinaryIO, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Map an array of an `.npz` file. A member of a zip file follows its local header of 30 bytes, name and extra field
    (APPNOTE.TXT, section 4.3.7)."""
    stream.seek(member.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", stream.read(4))
    stream.seek(name_length + extra_length, 1)
    shape, is_fortran, dtype = _HEADER_READERS[np.lib.format.read_magic(stream)](stream)
    if dtype.hasobject:
        raise ValueError("an array of Python objects")  # its bytes are a pickle
    if 0 in shape:
        return np.empty(shape, dtype)  # an empty range cannot be mapped
    return np.memmap(path, dtype, "r", stream.tell(), shape, "F" if is_fortran else "C")


def _problems(arrays: Mapping[str, npt.NDArray[Any]], remedy: str) -> Iterator[str]:
    """Yield the problems of the arrays. Only the first is meaningful: later checks assume that earlier ones passed."""
    for name in ("images", "labels"):
        if name not in arrays:
            yield f"holds no array named {name}; save {remedy}"
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
