"""Reading a checkpoint without running what is in it.

DCP's index is a pickle, and so is every value that is not a tensor; a pickle can call anything. Here the index may only
name the classes that an index consists of, and values may only be what `torch.load(weights_only=True)` makes.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from titan_launch.checkpoint.manifest import DamagedCheckpointError

_INDEX_CLASSES = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}
"""What a pickled index may name, as (module, name). None of them does anything but hold its arguments."""


class UnsafeCheckpointError(Exception):
    """A checkpoint that would run code, or that is none of ours; the text is a clause."""


class SafeReader(FileSystemReader):
    """DCP's reader, with an index that cannot name anything but its own classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index. Raises UnsafeCheckpointError, or DamagedCheckpointError."""
        path = self._get_metadata_path(kwargs.get("rank"))
        with open(path, "rb") as file:
            index = read_index(file.read())
        index.storage_meta = index.storage_meta or StorageMeta()
        index.storage_meta.load_id = self.load_id
        return index


def read_index(content: bytes) -> Metadata:
    """A pickled DCP index. Raises UnsafeCheckpointError for one that names anything else than an index consists of, or
    a file outside of its folder; DamagedCheckpointError for one that cannot be read."""
    try:
        index = _IndexUnpickler(io.BytesIO(content)).load()
    except UnsafeCheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises anything
        raise DamagedCheckpointError(f".metadata is damaged ({type(error).__name__})") from None
    if not isinstance(index, Metadata):
        raise UnsafeCheckpointError(f".metadata holds a {type(index).__name__}, not DCP's index")
    for info in (index.storage_data or {}).values():
        if "/" in info.relative_path or "\\" in info.relative_path:
            raise UnsafeCheckpointError(f".metadata names a file outside of the checkpoint: {info.relative_path}")
        if info.transform_descriptors:
            raise UnsafeCheckpointError(".metadata asks for transformations of its data")
    return index


class SafeLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, with values that are numbers, strings, tables and tensors only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take over a value that is no tensor. Raises UnsafeCheckpointError."""
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).splitlines()[0]
            raise UnsafeCheckpointError(f"{read_item.dest_index.fqn} is not plain data: {reason}") from None
        value.seek(0)
        super().load_bytes(read_item, value)  # what has been found to be harmless


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _INDEX_CLASSES.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.startswith("pathlib") and name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"):
            return _just_text  # where it was written to: nobody needs it
        raise UnsafeCheckpointError(f".metadata names {module}.{name}, which is no part of DCP's index")


def _just_text(*parts: str) -> str:
    return "/".join(map(str, parts))
