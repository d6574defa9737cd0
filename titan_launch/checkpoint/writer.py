"""The function that writes a checkpoint into a temporary folder, verifies the files, and then renames the folder."""

from __future__ import annotations

import os
import shutil
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from titan_launch.checkpoint.index import DCP_INDEX_FILE, INDEX_FILE, Chunk, Index, IndexedTensor, index_text
from titan_launch.checkpoint.manifest import FileRecord, checkpoint_name, record_of, write_manifest
from titan_launch.checkpoint.retention import TEMPORARY, WriteRequest, Written, clean, set_aside, tidy
from titan_launch.checkpoint.snapshot import Shard, State, hash_of_names, is_on_host, total_bytes
from titan_launch.core.files import sync
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0
from titan_launch.plan.hardware import GIB

_SPARE = 1.02
"""Required disk space as a multiple of the bytes of the tensors. The extra 2 % are for headers and metadata."""

_SHARED = "put job.dump_folder on a shared file system"


def write_checkpoint(request: WriteRequest, state: State, group: dist.ProcessGroup | None) -> Written:
    """Write the checkpoint of a step, and return the result. Collective over `group`, a process group for CPU tensors.

    Raises the same error on all ranks: an OSError (no space, no permission, or a file that differs from the written
    bytes) or a RuntimeError. After an error, the temporary folder is removed, and all valid checkpoints stay. If a rank
    dies, the temporary folder stays until the next save.
    """
    start = time.perf_counter()
    temporary = request.folder / f"{checkpoint_name(request.manifest.step)}{TEMPORARY}"
    # Ranks of one pipeline stage have shards of the same tensors. The dict counts each pipeline stage once.
    needed = sum(dict(on_all_ranks(lambda: (hash_of_names(state), total_bytes(state)), group)).values())
    on_rank_0(lambda: _make_room(request, temporary, needed), group)
    try:
        records = _write_files(temporary, state, group)
        deleted, warning = on_rank_0(lambda: _complete(request, temporary, records), group)
    except Exception:
        if dist.get_rank(group) == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    size = sum(record.bytes for record in records.values())
    return Written(request.manifest.step, size, time.perf_counter() - start, deleted, warning)


def _make_room(request: WriteRequest, temporary: Path, needed: int) -> None:
    folder = request.folder
    if request.creates_folder:
        folder.mkdir(exist_ok=True)  # `titan_launch.train.run_folder.folder` has created the run folder above it
    clean(folder)
    free = shutil.disk_usage(folder).free
    if free < needed * _SPARE:
        needed_gib, free_gib = needed * _SPARE / GIB, free / GIB
        raise OSError(f"{needed_gib:.3f} GiB are needed, and {folder} has {free_gib:.3f} GiB free; delete files")
    temporary.mkdir()


def _write_files(temporary: Path, state: State, group: dist.ProcessGroup | None) -> dict[str, FileRecord]:
    """Write the files of all ranks, read each file back, and return the records of all files."""
    # If CUDA is available, DCP's copy-ahead uses a CUDA stream even for tensors on the host. In a writer thread of
    # any rank, the stream would open a CUDA context on GPU 0.
    writer = _Writer(temporary, per_thread_copy_ahead=0 if is_on_host(state) else 10_000_000)  # bytes; DCP's default
    files = _RecordingFileSystem()
    writer.fs = files
    # Replicated values (buffers, the optimizer's step counts) come from rank 0. By default, DCP chooses for each
    # tensor the rank with the fewest bytes to write.
    planner = _Planner(dedup_save_to_lowest_rank=True)
    try:
        dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
    except dcp.api.CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]  # the error of one failed rank, without DCP's tracebacks
        raise cause if isinstance(cause, OSError) else RuntimeError(f"{type(cause).__name__}: {cause}") from error
    records: dict[str, FileRecord] = {}
    for of_rank in on_all_ranks(lambda: _read_back(temporary, files.records), group):
        records |= of_rank
    return records


def _read_back(temporary: Path, written: dict[str, FileRecord]) -> dict[str, FileRecord]:
    for name, record in written.items():
        if record_of(temporary / name) != record:
            reason = "does not have the bytes that were written to it; check the disk or the file system"
            raise OSError(f"{temporary / name} {reason}")
    return written


def _complete(request: WriteRequest, temporary: Path, records: dict[str, FileRecord]) -> tuple[tuple[int, ...], str]:
    """Rename the folder to its final name, update the links, and delete the checkpoints that `retention` does not keep.
    Runs on rank 0. Return the deleted steps, and a text with the problems of links and deletions."""
    missing = [name for name in records if not (temporary / name).exists()]
    if missing:
        reason = f"was written on another host, and is not visible on this host; {_SHARED}"
        raise OSError(f"{temporary / missing[0]} {reason}")
    write_manifest(temporary, replace(request.manifest, files=records))  # also syncs the folder
    final = request.folder / checkpoint_name(request.manifest.step)
    if final.exists():  # a damaged checkpoint of this step, from which the run has not resumed
        set_aside(final)
    temporary.rename(final)
    sync(request.folder)
    deleted, notes = tidy(request.folder, request.manifest.step, request.retention, request.step_in_copy)
    return tuple(deleted), "; ".join(notes)


class _Writer(FileSystemWriter):
    """DCP's writer, which also writes the launcher's index."""

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        places = {result.index: result.storage_data for of_rank in results for result in of_rank}
        text = index_text(_index_of(metadata, places), Path(self.path, DCP_INDEX_FILE).read_bytes())
        with self.fs.create_stream(Path(self.path, INDEX_FILE), "wb") as file:
            file.write(text.encode())
            os.fsync(file.fileno())


def _index_of(metadata: Metadata, places: Mapping[MetadataIndex, Any]) -> Index:
    """Return the index of the tensors that DCP has written. `places`: file, offset and length of each part, from DCP's
    writer."""
    index: Index = {}
    for name, tensor in metadata.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata), f"{name} is not a tensor"
        chunks = []
        for chunk in tensor.chunks:
            place = places[MetadataIndex(name, chunk.offsets)]
            sizes = tuple(chunk.sizes)
            chunks.append(Chunk(tuple(chunk.offsets), sizes, place.relative_path, place.offset, place.length))
        dtype = str(tensor.properties.dtype).removeprefix("torch.")
        index[name] = IndexedTensor(dtype, tuple(tensor.size), tuple(chunks))
    return index


class _Planner(DefaultSavePlanner):
    """DCP's save planner. It also accepts the class `Shard` of this package, and then saves the tensor in the shard.
    Tensors are made contiguous, because a checkpoint is read as plain bytes."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        value = value.local if isinstance(value, Shard) else super().lookup_object(index)
        assert isinstance(value, Tensor), f"{index.fqn} is a {type(value).__name__}"
        return value.resolve_conj().resolve_neg().contiguous()


class _RecordingFileSystem(FileSystem):
    """DCP's file system, which also records the size and checksum of each written file, by final name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Create a folder, but not its missing parents: the run folder may have been moved away."""
        try:
            Path(path).mkdir(exist_ok=True)
        except FileNotFoundError:
            raise OSError(f"{Path(path).parent} does not exist on this host; {_SHARED}") from None

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        with super().create_stream(path, mode) as stream:
            recorded = _RecordedStream(stream)
            yield recorded
        self.records[os.path.basename(path)] = recorded.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.records[os.path.basename(new_path)] = self.records.pop(os.path.basename(path))


class _RecordedStream:
    """A file that is written sequentially, with the size and the checksum of the bytes written so far."""

    def __init__(self, stream: Any):
        self._stream = stream
        self._size = 0
        self._checksum = 0

    def write(self, data: Any) -> int:
        self._checksum = zlib.crc32(data, self._checksum)
        self._size += memoryview(data).nbytes
        return int(self._stream.write(data))

    @property
    def record(self) -> FileRecord:
        return FileRecord(self._size, f"{self._checksum:08x}")

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        self._stream.flush()  # DCP calls fsync on the descriptor, which does not write Python's buffer
        return int(self._stream.fileno())

    def close(self) -> None:
        self._stream.close()
