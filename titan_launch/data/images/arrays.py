"""Images in arrays: `.npz` files (uncompressed arrays are mapped into memory) and the digits of scikit-learn."""

from __future__ import annotations

import gzip
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import numpy.typing as npt

from titan_launch.config.paths import SKLEARN_DIGITS
from titan_launch.core.errors import KeyPath, UserError, config_error
from titan_launch.core.files import MIB, open_regular, read_regular
from titan_launch.core.packages import not_installed
from titan_launch.core.terminal import one_line
from titan_launch.data.images.pillow import MOST_PIXELS

if TYPE_CHECKING:
    from torch import Tensor

Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.floating]
Labels = npt.NDArray[np.int64]

MOST_CLASSES = 1 << 20
"""Largest number of classes. The classifier of a model has a row of weights for each class."""

_HEADER_READERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}

_MOST_EXPANDED = 256 * MIB
"""A compressed array, which is decompressed into memory, may have at most ten times the bytes of its file, plus this
number of bytes."""


class ArrayImages:
    """Images `[N, channels, height, width]` and labels `[N]`: an implementation of `data.sources.images.Images`."""

    def __init__(self, path: str, images: Pixels, labels: Labels):
        self.labels = labels
        self.skipped = ""
        self._path, self._images = path, images

    @property
    def shape(self) -> tuple[int, ...]:
        """Number of images, channels, height and width."""
        return self._images.shape

    def as_file(self, chosen: npt.NDArray[np.int64]) -> tuple[str, int]:
        """See `Images.as_file`. The name is the dtype and shape of an image. The bytes of the labels count too."""
        images, labels = self._images, self.labels
        image_bytes = images.dtype.itemsize * int(np.prod(images.shape[1:]))
        return f"{images.dtype} {images.shape[1:]}", len(chosen) * (image_bytes + labels.itemsize)

    def hashes(self) -> npt.NDArray[np.uint32]:
        return index_hashes(len(self.labels))

    def name(self, index: int) -> str:
        return f"image {index} of {self._path}"

    def content(self, index: int) -> bytes:
        return self._images[index].tobytes()

    def pixels(self, index: int, resize: int | None) -> Tensor:
        """See `Images.pixels`. `resize` has no effect. Raises UserError for a pixel that is not finite."""
        import torch  # imported here, because `init` and `check` only count images

        stored = self._images[index]
        if stored.dtype == np.uint8:
            return torch.from_numpy(np.array(stored))
        image = stored.astype(np.float32)
        if not np.isfinite(image).all():
            raise UserError(f"{self.name(index)} has pixels that are not finite (NaN or infinity); repair or remove it")
        return torch.from_numpy(image)


def index_hashes(number: int) -> npt.NDArray[np.uint32]:
    """Return a hash of each index below `number`. The hash decides to which split an image of an array belongs."""
    return np.array([zlib.crc32(str(index).encode()) for index in range(number)], np.uint32)


def open_digits(path_key: KeyPath) -> ArrayImages:
    """Return the digits of scikit-learn. Raises ConfigError if scikit-learn is not installed."""
    package = find_spec("sklearn")
    try:
        if package is None or package.origin is None:
            raise FileNotFoundError
        # An import of `sklearn.datasets` would take 1.6 s.
        packed = read_regular(Path(package.origin).parent / "datasets/data/digits.csv.gz")
    except OSError:
        raise config_error(path_key, not_installed("sklearn"), SKLEARN_DIGITS) from None
    # Each line has 64 pixels from 0 to 16, and a label.
    table = np.loadtxt(gzip.decompress(packed).decode().splitlines(), delimiter=",")
    images = (table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    return ArrayImages(SKLEARN_DIGITS, images, table[:, -1].astype(np.int64))


class ArrayFileError(Exception):
    """Error for an `.npy` or `.npz` file that is refused. The message is a clause without the name of the file."""


def open_npz(path: str, path_key: KeyPath) -> ArrayImages:
    """Return the images of an `.npz` file. Raises ConfigError for a file that cannot be read, or has other content."""
    remedy = "the file with numpy.savez(path, images=..., labels=...)"
    try:
        arrays = map_npz(Path(path), ("images", "labels"))
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}; correct the path or the permissions"
        raise config_error(path_key, reason, path) from None
    except ArrayFileError as error:
        raise config_error(path_key, f"{error}; write {remedy}", path) from None
    except Exception:  # zipfile and NumPy raise many types of errors for damaged files and other formats
        reason = f"is not a valid .npz file of plain arrays; write {remedy}"
        raise config_error(path_key, reason, path) from None
    problem = next(_problems(arrays, remedy), None)
    if problem is not None:
        raise config_error(path_key, problem, path)
    images, labels = arrays["images"], arrays["labels"]
    return ArrayImages(path, images[:, None] if images.ndim == 3 else images, labels.astype(np.int64))


def map_npz(path: Path, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays of an `.npz` file whose names are in `names`, by name. Names that the file lacks are omitted.
    Raises ArrayFileError, OSError, and many other types of errors for damaged files.

    Uncompressed arrays are mapped into memory: all processes of a host share them, and only the used parts are read.
    """
    with open_regular(path) as stream, zipfile.ZipFile(stream) as file:
        members = {name: file.NameToInfo.get(f"{name}.npy") for name in names}
        return {name: _array(stream, file, member) for name, member in members.items() if member is not None}


def map_npy(stream: BinaryIO, size: int) -> npt.NDArray[Any]:
    """Map an array of an open file into memory. The position of `stream` is the beginning of the array's header.
    `size`: bytes of the header and the array. Raises ArrayFileError, and other types of errors for a damaged header."""
    start = stream.tell()
    shape, is_fortran, dtype = _read_header(stream)
    _check_size(shape, dtype, size - (stream.tell() - start))
    if 0 in shape:
        return np.empty(shape, dtype)  # an empty range cannot be mapped
    return np.memmap(stream, dtype, "r", stream.tell(), shape, "F" if is_fortran else "C")


def _array(stream: BinaryIO, file: zipfile.ZipFile, member: zipfile.ZipInfo) -> npt.NDArray[Any]:
    """Return an array of an `.npz` file: mapped into memory, or decompressed. Raises the errors of `map_npz`."""
    if member.compress_type == zipfile.ZIP_STORED:
        # A local header has 30 bytes, a name and an extra field. The content follows (APPNOTE.TXT, section 4.3.7).
        stream.seek(member.header_offset + 26)
        name_length, extra_length = struct.unpack("<HH", stream.read(4))
        stream.seek(name_length + extra_length, 1)
        return map_npy(stream, member.file_size)
    if member.compress_type != zipfile.ZIP_DEFLATED:
        raise ValueError("a compression that NumPy does not write")
    most = 10 * stream.seek(0, 2) + _MOST_EXPANDED
    if member.file_size > most:
        found = f"{member.filename} of {member.file_size:,} bytes after decompression"
        raise ArrayFileError(f"has {one_line(found)}, and the limit for a compressed file of its size is {most:,}")
    with file.open(member) as content:
        shape, is_fortran, dtype = _read_header(content)
        _check_size(shape, dtype, member.file_size - content.tell())
        flat = np.empty(math.prod(shape), dtype)
        read = 0
        while chunk := content.read(MIB):
            flat.view(np.uint8)[read : read + len(chunk)] = np.frombuffer(chunk, np.uint8)
            read += len(chunk)
        if read < flat.nbytes:
            raise EOFError
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _read_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Read the header of an array. Return (shape, is_fortran, dtype). Raises the errors of `map_npz`."""
    version = np.lib.format.read_magic(stream)
    width = 2 if version == (1, 0) else 4
    length = stream.read(width)
    if int.from_bytes(length, "little") > 10_000:  # NumPy's own limit
        raise ValueError("a long header")
    header = length + stream.read(int.from_bytes(length, "little"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a header is parsed as Python, which warns of strange escapes
        shape, is_fortran, dtype = _HEADER_READERS[version](BytesIO(header))
    if dtype.hasobject:
        raise ValueError("an array of Python objects")  # its bytes are a pickle
    return shape, is_fortran, dtype


def _check_size(shape: tuple[int, ...], dtype: np.dtype[Any], size: int) -> None:
    """Raise ArrayFileError unless an array of this shape and dtype has `size` bytes."""
    if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != size:
        described = f"{dtype!s:.40} of the shape {shape!s:.80}"
        raise ArrayFileError(f"is damaged: an array has {size:,} bytes, but its header says {one_line(described)}")


def _problems(arrays: Mapping[str, npt.NDArray[Any]], remedy: str) -> Iterator[str]:
    """Yield the problems of the arrays `images` and `labels`. Use only the first problem, because later checks assume
    that earlier checks passed."""
    for name in ("images", "labels"):
        if name not in arrays:
            yield f"holds no array named {name}; save {remedy}"
    images, labels = arrays["images"], arrays["labels"]
    if images.ndim not in (3, 4):
        yield f"images have the shape {images.shape}; save them as (N, height, width) or (N, channels, height, width)"
    if images.dtype != np.uint8 and not np.issubdtype(images.dtype, np.floating):
        yield f"images are {_name(images.dtype)}; save them as uint8 or floating point"
    if labels.ndim != 1 or not np.issubdtype(labels.dtype, np.integer):
        yield f"labels are {_name(labels.dtype)} of the shape {labels.shape}; save them as integers of the shape (N)"
    if len(images) != len(labels):
        yield f"holds {len(images)} images, but {len(labels)} labels; save one label for each image"
    if math.prod(images.shape[-2:]) > MOST_PIXELS:
        yield f"has images of more than {MOST_PIXELS:,} pixels, the limit of an image; make them smaller"
    if not len(images):
        yield "holds no images; save at least one image with its label"
    if not images.size:
        yield f"images have the shape {images.shape}, and so no pixels; save images of at least one pixel"
    if labels.min() < 0:
        yield f"labels must be 0 or more, but the smallest is {labels.min()}; number the classes from 0"
    if labels.max() >= MOST_CLASSES:
        limit = f"less than {MOST_CLASSES:,}"
        yield f"labels must be {limit}, but the largest is {labels.max()}; number the classes from 0"


def _name(dtype: np.dtype[Any]) -> str:
    return f"{one_line(str(dtype)):.80}"
