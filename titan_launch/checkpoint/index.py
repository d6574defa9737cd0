"""The index of a checkpoint's tensors as JSON, and functions that read tensors as plain bytes.

The launcher never unpickles a checkpoint. A checkpoint also contains pickles of torch.distributed.checkpoint (DCP): the
index `.metadata`, and the header of each tensor's record. The launcher writes these pickles only for other tools.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import struct
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import Field, TypeAdapter, ValidationError
from torch import Tensor

from titan_launch.checkpoint.manifest import MANIFEST_FILE, DamagedCheckpointError
from titan_launch.core.errors import UserError
from titan_launch.core.files import MIB, open_regular, read_regular
from titan_launch.core.terminal import one_line
from titan_launch.distributed.dtensor import part_of_box

INDEX_FILE = "index.json"
"""Name of the file with the launcher's index."""

DCP_INDEX_FILE = ".metadata"
"""Name of the file with DCP's index, for other tools."""

Count = Annotated[int, Field(ge=0, lt=2**62)]
"""A number of elements or bytes."""

_HAS_ENDED = "early_stopping.has_ended"
"""Name of a tensor that is 1 in the checkpoint at which early stopping ended the run (`train.early_stopping`)."""


@dataclass(frozen=True)
class Chunk:
    """A part of a tensor, and the position of its record in a file."""

    offsets: tuple[Count, ...]
    """Offset of the part in each dim of the whole tensor, in elements."""

    sizes: tuple[Count, ...]
    file: str
    """Name of a file in the checkpoint's folder."""

    start: Count
    """Offset of the record in the file, in bytes. A record is what `torch.save` writes for a tensor."""

    length: Count
    """Size of the record in bytes."""


@dataclass(frozen=True)
class IndexedTensor:
    """Dtype, shape and parts of a tensor in a checkpoint."""

    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]


Index = dict[str, IndexedTensor]
"""Tensors of a checkpoint by full name, such as `model.norm.weight`."""


@dataclass(frozen=True)
class _IndexFile:
    tensors: Index
    dcp_index_sha256: str


_INDEX = TypeAdapter(_IndexFile)

_MOST_BYTES = 1 << 30
"""Maximum size of the index, and of DCP's index, in bytes. The index of 3,000 tensors from 1,024 ranks has 400 MiB."""

_BYTES_PER_VALUE = 6
"""Minimum number of bytes per JSON value of an index. An index with fewer bytes per value is refused, because each of
its many values would take up to 500 bytes of memory."""


def index_text(index: Index, dcp_index: bytes) -> str:
    """Return an index as JSON, with the SHA-256 digest of `dcp_index`, the content of DCP's index file."""
    file = _IndexFile(index, hashlib.sha256(dcp_index).hexdigest())
    return json.dumps(asdict(file)) + "\n"


def read_index(folder: Path) -> Index:
    """Return the index of a checkpoint. Raises DamagedCheckpointError if a file is missing or invalid, or if the two
    index files are not from the same save."""
    try:
        content = read_regular(folder / INDEX_FILE, _MOST_BYTES)
        dcp_index = read_regular(folder / DCP_INDEX_FILE, _MOST_BYTES)
        # Only regular files: an entry of the index must not refer to a link or a FIFO.
        sizes = {
            entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False)
        }
    except OSError as error:
        unread = Path(error.filename or folder).name  # a failed read, unlike a failed open, has no file name
        raise DamagedCheckpointError(f"{unread} cannot be read: {error.strerror}") from None
    num_values = content.count(b",") + content.count(b"[") + content.count(b"{")
    if len(content) > MIB + sum(sizes.values()) / 4 or num_values > len(content) / _BYTES_PER_VALUE:
        raise DamagedCheckpointError(f"{INDEX_FILE} has more bytes or values than an index of this checkpoint can have")
    try:
        file = _INDEX.validate_json(content, strict=True)
    except ValidationError:
        raise DamagedCheckpointError(f"{INDEX_FILE} is damaged") from None
    if hashlib.sha256(dcp_index).hexdigest() != file.dcp_index_sha256:
        raise DamagedCheckpointError(f"{DCP_INDEX_FILE} and {INDEX_FILE} are not from the same save")
    for name, tensor in file.tensors.items():
        if not _is_possible(tensor, sizes):
            raise DamagedCheckpointError(f"{INDEX_FILE} has an invalid entry for the tensor {one_line(name)[:200]}")
    return file.tensors


def _is_possible(tensor: IndexedTensor, file_sizes: Mapping[str, int]) -> bool:
    """Return True if the entry of a tensor can be valid. PyTorch must have the dtype. All parts must lie within the
    tensor, begin at different offsets, and together have as many elements as the tensor. All records must lie within
    files. `file_sizes`: bytes of the files in the checkpoint's folder."""
    if not isinstance(vars(torch).get(tensor.dtype), torch.dtype):
        return False
    for chunk in tensor.chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(tensor.shape):
            return False
        if any(o + size > whole for o, size, whole in zip(chunk.offsets, chunk.sizes, tensor.shape, strict=True)):
            return False
        if chunk.file not in file_sizes or chunk.start + chunk.length > file_sizes[chunk.file]:
            return False
    if len({chunk.offsets for chunk in tensor.chunks}) < len(tensor.chunks):
        return False
    return sum(math.prod(chunk.sizes) for chunk in tensor.chunks) == math.prod(tensor.shape)


def check_step(folder: Path, step: int) -> None:
    """Raise DamagedCheckpointError if the saved tensors are not those of step `step`, or if the index or the record of
    the saved step is invalid."""
    saved = _saved_number(folder, read_index(folder), "progress.step")
    if saved != step:
        raise DamagedCheckpointError(f"{MANIFEST_FILE} is of step {step}, but the tensors are of step {saved}")


def ended_early(folder: Path) -> bool:
    """Return True if early stopping (`validation.patience`) ended the run at this checkpoint. Raises
    DamagedCheckpointError for an invalid index or record."""
    index = read_index(folder)
    return _HAS_ENDED in index and _saved_number(folder, index, _HAS_ENDED) != 0


def _saved_number(folder: Path, index: Index, name: str) -> int:
    tensor = index.get(name)
    if tensor is None or (tensor.dtype, tensor.shape) != ("int64", ()):  # a valid scalar has one part
        raise DamagedCheckpointError(f"{INDEX_FILE} has no valid entry for the tensor {name}")
    return int(read_chunk(folder, tensor.chunks[0], torch.int64))


def model_tensors(folder: Path, ema: bool = False) -> Index:
    """Return the index entries of the model's parameters and buffers in a checkpoint, by name in the model.

    With `ema`, return the entry of the moving average for each parameter that has one. In the index, a parameter has
    the key `model.NAME`, and its moving average has the key `ema.NAME`. Raises DamagedCheckpointError for an invalid
    index, and with `ema` UserError if the checkpoint has no moving average.
    """
    index = read_index(folder)
    if ema and not any(key.startswith("ema.") for key in index):
        raise UserError(f"error: {folder} has no moving average of the weights (ema.decay was not set); omit --ema")
    names = [key.removeprefix("model.") for key in index if key.startswith("model.")]
    return {name: index.get(f"ema.{name}" if ema else "", index[f"model.{name}"]) for name in names}


def read_tensor(folder: Path, tensor: IndexedTensor) -> Tensor:
    """Read all parts of a tensor, and return the whole tensor. Raises the errors of `read_chunk`."""
    dtype = getattr(torch, tensor.dtype)
    if [chunk.sizes for chunk in tensor.chunks] == [tensor.shape]:
        return read_chunk(folder, tensor.chunks[0], dtype)
    whole = torch.empty(tensor.shape, dtype=dtype)
    read_into(whole, (0,) * whole.ndim, folder, tensor)
    return whole


def read_into(target: Tensor, offsets: Sequence[int], folder: Path, tensor: IndexedTensor) -> None:
    """Copy a part of a tensor into `target`, a plain tensor of the part's shape. Only the records that overlap with the
    part are read. `offsets`: offset of the part in the whole tensor by dim. Raises the errors of `read_chunk`."""
    for chunk in tensor.chunks:
        starts = [max(pair) for pair in zip(offsets, chunk.offsets, strict=True)]
        boxes = zip(starts, offsets, target.shape, chunk.offsets, chunk.sizes, strict=True)
        lengths = [min(a + length, b + size) - start for start, a, length, b, size in boxes]
        if all(length > 0 for length in lengths):
            values = read_chunk(folder, chunk, getattr(torch, tensor.dtype))
            in_chunk = [start - offset for start, offset in zip(starts, chunk.offsets, strict=True)]
            in_target = [start - offset for start, offset in zip(starts, offsets, strict=True)]
            part_of_box(target, in_target, lengths).copy_(part_of_box(values, in_chunk, lengths))


def read_chunk(folder: Path, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """Return a part of a tensor, read as plain bytes. Raises DamagedCheckpointError for an unreadable or invalid
    record."""
    try:
        with open_regular(folder / chunk.file) as file:
            file.seek(chunk.start)
            content = _content_of(file.read(chunk.length))
    except OSError as error:
        raise DamagedCheckpointError(f"{chunk.file} cannot be read: {error.strerror}") from None
    num_elements = math.prod(chunk.sizes)
    if content is None or len(content) != num_elements * dtype.itemsize:
        raise DamagedCheckpointError(f"{chunk.file} has no {dtype} tensor {chunk.sizes} at byte {chunk.start:,}")
    if not num_elements:
        return torch.empty(chunk.sizes, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # nothing writes to the tensor
        return torch.frombuffer(content, dtype=dtype, count=num_elements).view(chunk.sizes)


def read_weights(folder: Path, ema: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the model, tensor) for every parameter and buffer of a valid checkpoint. The tensors are unsharded
    and on the host. `ema`: see `model_tensors`. Raises the errors of `model_tensors` and `read_tensor`."""
    for name, tensor in model_tensors(folder, ema).items():
        yield name, read_tensor(folder, tensor)


def _content_of(record: bytes) -> memoryview | None:
    """Return the bytes of the tensor in a record of `torch.save`, or None for an invalid record. A record is a zip
    file with exactly one entry below `data/`: the bytes of the tensor, not compressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(record)) as archive:
            (entry,) = (entry for entry in archive.infolist() if "/data/" in entry.filename)
        # After the 30 bytes of a local header come the name and the extra field. Bytes 26 to 29 have their lengths.
        name_length, extra_length = struct.unpack_from("<HH", record, entry.header_offset + 26)
    except (zipfile.BadZipFile, ValueError, OverflowError, NotImplementedError, UnicodeDecodeError, struct.error):
        return None
    start = entry.header_offset + 30 + name_length + extra_length
    content = memoryview(record)[start : start + entry.file_size]
    return content if entry.compress_type == zipfile.ZIP_STORED and len(content) == entry.file_size else None
