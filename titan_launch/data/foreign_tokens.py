"""Token files of other programs: `.bin` and `.idx` of Megatron-LM, files of llm.c, one-dimensional `.npy` files of
NumPy, and flat files (token ids without a header) as in nanoGPT.

These files do not name their tokenizer. Their token ids are therefore compared with the vocabulary of `[tokenizer]`. To
find the largest id and the ends of the documents, each host reads the files once, and keeps the result in the cache.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_launch.config.paths import LinkError, expand_paths
from titan_launch.config.sections.data import TokensData
from titan_launch.core.cache import built_once
from titan_launch.core.errors import KeyPath, config_error
from titan_launch.core.files import file_state, open_regular
from titan_launch.core.fingerprint import fingerprint_of_files
from titan_launch.core.json_files import read_json
from titan_launch.core.terminal import counted, one_line
from titan_launch.data.images.arrays import map_npy
from titan_launch.data.token_files import (
    CHUNK,
    Header,
    TokenFilesError,
    Tokens,
    TokenShard,
    TokenStream,
    check_ids,
    map_file,
    token_dtype,
)
from titan_launch.data.tokenizers import Tokenizer

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = np.dtype(
    [("magic", "V9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("ends", "<u8")]
)
_MEGATRON_DTYPES = {1: "uint8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""Dtypes by their code in an `.idx` file."""

_LLMC_FORMATS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Dtypes by (magic number, version) of the header of llm.c."""

_SIGNATURES = {
    b"\x1f\x8b\x08": "gzip",
    b"\x28\xb5\x2f\xfd": "Zstandard",
    b"PK\x03\x04": "zip or .npz",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x89HDF\r\n": "HDF5",
}
"""File formats by their first bytes. Files of these formats are refused, because they are not flat files."""

_LLMC_HEADER = 256
"""Number of int32 values in the header of llm.c: magic number, version, number of tokens, zeros."""

_VERSION = 2
"""Version of the cached results."""

_SCAN = "scan.json"


@dataclass(frozen=True)
class _File:
    """A file of tokens."""

    path: Path
    dtype: str
    """The unsigned dtype with which the file is read."""

    start: int
    """Bytes before the first token."""

    num_tokens: int
    index: Path | None = None
    """The `.idx` file of Megatron-LM; None for other formats."""

    is_signed: bool = False
    """True if the file has signed integers. A negative integer is then read as a large unsigned integer."""

    def map(self) -> Tokens:
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return np.asarray(np.memmap(self.path, dtype, mode="r", offset=self.start, shape=(self.num_tokens,)))


def open_foreign_tokens(config: TokensData, tokenizer: Tokenizer, key: KeyPath) -> TokenStream:
    """Map the token files of another program into memory. The result has a header like that of token files, but
    without digests of the shards.

    `config.path` names a file, the files `.bin` and `.idx` without their suffixes, or a glob. `key`: path of the
    section.

    Raises ConfigError on a key below `key`, UserError if the cache cannot be written, and OSError for files that cannot
    be opened. Raises TokenFilesError for files that are empty, are damaged, or have ids outside of the vocabulary.
    """
    files = [_recognized(path, config, key) for path in _paths(config, key)]
    folder, identity = _scanned(files, tokenizer.end_of_document)
    scan = read_json(folder / _SCAN)
    for file, largest in zip(files, scan["largest"], strict=True):
        if file.is_signed and largest > np.iinfo(file.dtype).max // 2:
            raise TokenFilesError(f"has negative token ids in {file.path.name}; write the ids as uint16 or uint32")
        check_ids(largest, file.path.name, tokenizer.vocab_size)
    ends = [map_file(folder / f"{index}.ends", "int64", number) for index, number in enumerate(scan["documents"])]
    names = tuple((file.path.name, file.path.stat().st_size, "") for file in files)
    shards = tuple(
        TokenShard(str(index), file.num_tokens, len(of_file), digest="", largest=largest)
        for index, (file, of_file, largest) in enumerate(zip(files, ends, scan["largest"], strict=True))
    )
    dtype = token_dtype(tokenizer.vocab_size)
    header = Header(dtype, tokenizer.vocab_size, tokenizer.digest, False, shards, names)
    maps, paths = [file.map() for file in files], [file.path for file in files]
    return TokenStream(header, maps, ends, None, paths, identity)


def check_unknown_ids(folder: Path, header: Header) -> None:
    """Check the shards for which the header does not give the largest token id. Raise TokenFilesError if a token id in
    them is outside of the vocabulary. Each host reads these shards once."""
    unknown = [shard for shard in header.shards if shard.largest is None and shard.num_tokens]
    if not unknown:
        return
    files = [_File(folder / f"{shard.name}.tokens", header.dtype, 0, shard.num_tokens) for shard in unknown]
    scan = read_json(_scanned(files, None)[0] / _SCAN)
    for file, largest in zip(files, scan["largest"], strict=True):
        check_ids(largest, file.path.name, header.vocab_size)


def _paths(config: TokensData, key: KeyPath) -> list[Path]:
    """Return the files of tokens, sorted by name. Raises ConfigError if there are no files, or for a link that leads
    out of a folder."""
    if Path(f"{config.path}.bin").is_file():
        return [Path(f"{config.path}.bin")]
    paths: list[Path] = []
    try:
        with suppress(FileNotFoundError):
            paths = [file for _, file in expand_paths(config.path) if file.suffix != ".idx"]
    except LinkError as error:
        raise config_error((*key, "path"), f"{error}, or name the target", config.path) from None
    if not paths:
        reason = "names no file of tokens; name a folder of token files, files of Megatron-LM or llm.c, or flat files"
        raise config_error((*key, "path"), reason, config.path)
    return paths


def _recognized(path: Path, config: TokensData, key: KeyPath) -> _File:
    """Return the file at `path`. An `.idx` beside it, or its header, tells the format. Without them, the file is flat,
    and its dtype is the value of the key `dtype`. Raises ConfigError if `dtype` is missing or wrong, and
    TokenFilesError for a file that cannot be read, is damaged, or has no tokens."""
    index = path.with_suffix(".idx")
    file = _megatron_file(path, index) if index.is_file() else _llmc_file(path) or _numpy_file(path)
    if file is None:
        _check_flat(path)
        if config.dtype is None:
            reason = (
                f'must be "uint16" or "uint32": {path.name} has no header that gives the dtype. (A file of Megatron-LM '
                f"needs its {index.name} beside it. For files of titan-launch prepare, name their folder.)"
            )
            raise config_error((*key, "dtype"), reason)
        try:
            file = _whole_file(path, config.dtype)
        except TokenFilesError:
            found = f"the {path.stat().st_size:,} bytes of {path.name}"
            reason = f"does not fit {found}; set another dtype, or copy the file again"
            raise config_error((*key, "dtype"), reason, config.dtype) from None
    elif config.dtype not in (None, file.dtype):
        reason = f"{path.name} is not a flat file, and has another dtype; remove this key"
        raise config_error((*key, "dtype"), reason, config.dtype)
    if not file.num_tokens:
        raise TokenFilesError(f"is empty: {path.name} has no tokens; name other files")
    return file


def _whole_file(path: Path, dtype: str, start: int = 0, index: Path | None = None) -> _File:
    """Return a file whose tokens begin at byte `start` and end with the file. `dtype`: dtype of the tokens. Raises
    TokenFilesError if the size does not fit the dtype."""
    size = np.dtype(dtype).itemsize
    num_tokens, rest = divmod(path.stat().st_size - start, size)
    if rest:
        reason = f"the size of {path.name} is no multiple of {size} bytes ({dtype})"
        raise TokenFilesError(f"is damaged: {reason}; copy it again")
    return _File(path, f"uint{8 * size}", start, num_tokens, index, is_signed=dtype.startswith("int"))


def _llmc_file(path: Path) -> _File | None:
    """Return a file of llm.c; None for a file of another format. Raises TokenFilesError for a damaged file."""
    header = np.fromfile(path, "<i4", _LLMC_HEADER)
    if not len(header) or int(header[0]) not in {magic for magic, _ in _LLMC_FORMATS}:
        return None
    dtype = _LLMC_FORMATS.get(tuple(map(int, header[:2])))  # type: ignore[arg-type]
    if dtype is None or len(header) < _LLMC_HEADER or header[3:].any():
        formats = " or ".join(f"magic number {magic} with version {version}" for magic, version in _LLMC_FORMATS)
        reason = f"{path.name} begins like a file of llm.c, but its header is incomplete or unknown (known: {formats})"
        raise TokenFilesError(f"cannot be read: {reason}; copy or write it again")
    file = _whole_file(path, dtype, header.nbytes)
    if file.num_tokens != header[2]:
        found = f"has {file.num_tokens:,} tokens, but its header says {header[2]:,}"
        raise TokenFilesError(f"is damaged: {path.name} {found}; copy it again")
    return file


def _numpy_file(path: Path) -> _File | None:
    """Return a `.npy` file of NumPy; None for a file of another format. Raises TokenFilesError for a damaged file, and
    for an array that is not one-dimensional or not of integers."""
    with open_regular(path) as file:
        if file.read(len(np.lib.format.MAGIC_PREFIX)) != np.lib.format.MAGIC_PREFIX:
            return None
        file.seek(0)
        try:
            array: Any = map_npy(file, path.stat().st_size)
            start = array.offset if array.size else path.stat().st_size
        except Exception as error:  # NumPy raises many types of errors for damaged headers
            found = f"{path.name} is not a valid .npy file ({one_line(str(error)):.200})"
            raise TokenFilesError(f"is damaged: {found}; write it again") from None
    if array.ndim != 1 or array.dtype.kind not in "iu" or array.dtype.newbyteorder("<") != array.dtype:
        found = f"{one_line(str(array.dtype)):.80} of the shape {array.shape!s:.80}"
        raise TokenFilesError(
            f"cannot be read: {path.name} has {found}; save a one-dimensional array of little-endian integers"
        )
    return _whole_file(path, array.dtype.name, start)


def _check_flat(path: Path) -> None:
    """Raise TokenFilesError for a file whose first bytes are those of another format."""
    with open_regular(path) as file:
        start = file.read(max(map(len, _SIGNATURES)))
    for signature, name in _SIGNATURES.items():
        if start.startswith(signature):
            found = f"{path.name} is a {name} file, not flat numbers"
            raise TokenFilesError(f"cannot be read: {found}; convert it to uint16 or uint32 numbers")


def _megatron_file(path: Path, index: Path) -> _File:
    header = np.fromfile(index, _MEGATRON_HEADER, 1)
    if not len(header) or bytes(header["magic"][0]) != _MEGATRON_MAGIC or header["version"][0] != 1:
        raise TokenFilesError(
            f"cannot be read: {index.name} is not an index of Megatron-LM in version 1; write it again"
        )
    dtype = _MEGATRON_DTYPES.get(int(header["dtype"][0]))
    if dtype is None:
        known = ", ".join(_MEGATRON_DTYPES.values())
        raise TokenFilesError(f"cannot be read: {index.name} has none of the dtypes {known}; write both files again")
    return _whole_file(path, dtype, index=index)


def _scanned(files: Sequence[_File], end_of_document: int | None) -> tuple[Path, list[Any]]:
    """Return the folder of the cache with the result of `_scan`, and the identity of the files. The identity includes
    samples of the content (`data.prepare._cached_digests` has the reason)."""
    paths = [path for file in files for path in (file.path, file.index) if path is not None]
    sample = fingerprint_of_files([("", path) for path in paths]).content
    states = [[str(path.resolve()), *file_state(path)] for path in paths]
    identity = [_VERSION, end_of_document, [file.dtype for file in files], states, sample]
    size = sum(file.path.stat().st_size for file in files)
    task = f"{'reading token files:':26} {counted(len(files), 'file')}, {size / 1e6:,.1f} MB"
    return built_once("foreign_tokens", identity, lambda folder: _scan(files, end_of_document, folder), task), identity


def _scan(files: Sequence[_File], end_of_document: int | None, folder: Path) -> None:
    """Write the largest token id and the ends of the documents of each file into `folder`. `end_of_document`: id of the
    token that ends a document, in files without an index. With None, no ends are written."""
    largest, documents = [], []
    for number, file in enumerate(files):
        tokens, found = file.map(), [np.array([file.num_tokens])]
        largest.append(0)
        for start in range(0, file.num_tokens, CHUNK):
            chunk = tokens[start : start + CHUNK]
            largest[-1] = max(largest[-1], int(chunk.max()))
            if end_of_document is not None and file.index is None:
                found.append(np.flatnonzero(chunk == end_of_document) + start + 1)
        if end_of_document is None:
            continue
        ends = np.unique(np.concatenate(found)) if file.index is None else _megatron_ends(file, file.index)
        ends.astype("<i8").tofile(folder / f"{number}.ends")
        documents.append(len(ends))
    (folder / _SCAN).write_text(json.dumps({"largest": largest, "documents": documents}))


def _megatron_ends(file: _File, index: Path) -> npt.NDArray[np.int64]:
    """Return the ends of the documents that have tokens: numbers of tokens from the start of the file. Raises
    TokenFilesError if the index does not match the file."""
    header = np.fromfile(index, _MEGATRON_HEADER, 1)[0]
    sequences, documents = int(header["sequences"]), int(header["ends"])
    columns = {"lengths": ("<i4", sequences), "starts": ("<i8", sequences), "documents": ("<i8", documents)}
    sizes = {name: np.dtype(kind).itemsize * number for name, (kind, number) in columns.items()}
    if index.stat().st_size != header.nbytes + sum(sizes.values()):
        raise TokenFilesError(f"is damaged: {index.name} has another size than its header says; copy it again")
    arrays, start = {}, header.nbytes
    for name, (kind, number) in columns.items():
        arrays[name] = np.fromfile(index, kind, number, offset=start)
        start += sizes[name]
    lengths, borders = arrays["lengths"], arrays["documents"]
    ends = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    problem = ""
    if sequences and lengths.min() < 1:
        problem = f"has the length {lengths.min()} for sequence {lengths.argmin():,}"
    elif ends[-1] != file.num_tokens:
        problem = f"describes {ends[-1]:,} tokens, but {file.path.name} has {file.num_tokens:,}"
    elif not np.array_equal(ends[:-1] * np.dtype(file.dtype).itemsize, arrays["starts"]):
        problem = "has sequences that do not begin where the previous sequence ends"
    elif not len(borders) or borders[0] != 0 or borders[-1] != sequences or (np.diff(borders) < 0).any():
        problem = f"has documents that do not divide its {sequences:,} sequences in order"
    if problem:
        raise TokenFilesError(f"is damaged: {index.name} {problem}; copy both files again")
    return np.setdiff1d(ends[borders], [0])  # each end once: preprocess_data.py may write empty documents
