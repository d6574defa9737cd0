"""Token files of other programs: `.bin` and `.idx` of Megatron-LM, files of llm.c, and flat files as in nanoGPT.

These files do not name their tokenizer. Their token ids are therefore compared with the vocabulary of `[tokenizer]`.
Ids and ends of documents need a pass over the files, which is made once per host; the result is in the cache.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from titan_launch.config.sections.data import TokensData
from titan_launch.core.errors import KeyPath, config_error
from titan_launch.data.cache import built_once
from titan_launch.data.token_files import Header, Shard, TokenFilesError, Tokens, TokenStream, map_file, token_dtype
from titan_launch.data.tokenizers import Tokenizer

_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = np.dtype(
    [("magic", "V9"), ("version", "<u8"), ("dtype", "u1"), ("sequences", "<u8"), ("ends", "<u8")]
)
_MEGATRON_DTYPES = {1: "uint8", 3: "uint16", 4: "uint32", 5: "uint64", 8: "uint16"}
"""Dtypes by their code. Signed integers are read as unsigned: a negative id becomes an id outside of the vocabulary."""

_LLMC_FORMATS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}
"""Dtypes by magic number and version."""

_LLMC_HEADER = 256
"""Number of int32 in the header of a file of llm.c: magic number, version, number of tokens, zeros."""

_CHUNK = 1 << 24
"""Tokens per read of the pass over a file."""

_VERSION = 1
"""Version of the cached results."""


@dataclass(frozen=True)
class _File:
    """A file of tokens."""

    path: Path
    dtype: str
    start: int
    """Bytes before the first token."""

    num_tokens: int
    index: Path | None = None
    """The `.idx` file of Megatron-LM; None for other formats."""

    def map(self) -> Tokens:
        """Return the tokens as a memory map."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        return np.asarray(np.memmap(self.path, dtype, mode="r", offset=self.start, shape=(self.num_tokens,)))


def open_foreign_tokens(config: TokensData, tokenizer: Tokenizer, key: KeyPath) -> tuple[Header, TokenStream]:
    """Map the files that `config.path` names into memory: a file, the path of `.bin` and `.idx` without its suffix, or
    a glob. Return the header that token files with this content would have.

    `key`: path of the section. Raises ConfigError on a key below it, and TokenFilesError for files that cannot be read.
    """
    files = [_recognized(path, config, key) for path in _paths(config, key)]
    stats = [file.path.stat() for file in files]
    states = [
        [str(file.path.resolve()), stat.st_size, stat.st_mtime_ns, file.dtype]
        for file, stat in zip(files, stats, strict=True)
    ]
    size = sum(stat.st_size for stat in stats)
    folder = built_once(
        "foreign_tokens",
        [_VERSION, tokenizer.end_of_document, states],
        lambda folder: _scan(files, tokenizer.end_of_document, folder),
        f"{'reading token files:':26} {len(files):,} files, {size / 1e6:,.1f} MB",
    )
    scan = json.loads((folder / "scan.json").read_text())
    if scan["largest"] >= tokenizer.vocab_size:
        reason = (
            f"has the token id {scan['largest']:,}, but the vocabulary of [tokenizer] has {tokenizer.vocab_size:,} "
            "tokens; set [tokenizer] to the tokenizer that made these files"
        )
        raise config_error((*key, "path"), reason, config.path, also=(("tokenizer",),))
    ends = [map_file(folder / f"{index}.ends", "int64", number) for index, number in enumerate(scan["documents"])]
    names = [(file.path.name, stat.st_size, "") for file, stat in zip(files, stats, strict=True)]
    shards = [
        Shard(str(index), file.num_tokens, len(of_file), hashlib.blake2b(repr(state).encode()).hexdigest())
        for index, (file, of_file, state) in enumerate(zip(files, ends, states, strict=True))
    ]
    dtype = token_dtype(tokenizer.vocab_size)
    header = Header(dtype, tokenizer.vocab_size, tokenizer.digest, False, tuple(shards), tuple(names))
    return header, TokenStream([file.map() for file in files], ends, None, names, tokenizer.digest)


def _paths(config: TokensData, key: KeyPath) -> list[Path]:
    """Return the files of tokens, sorted by name."""
    if Path(f"{config.path}.bin").is_file():
        return [Path(f"{config.path}.bin")]
    names = [config.path] if Path(config.path).is_file() else sorted(glob.glob(config.path, recursive=True))
    paths = [Path(name) for name in names if Path(name).is_file() and not name.endswith(".idx")]
    if not paths:
        reason = "names no file; name a folder of token files, files of Megatron-LM or llm.c, or flat files"
        raise config_error((*key, "path"), reason, config.path)
    return paths


def _recognized(path: Path, config: TokensData, key: KeyPath) -> _File:
    """Return a file with its format. Raises ConfigError for a dtype that is missing or wrong."""
    index = path.with_suffix(".idx")
    file = _megatron_file(path, index) if index.is_file() else _llmc_file(path)
    if file is None:
        if config.dtype is None:
            reason = (
                f'must be "uint16" or "uint32": {path.name} has no header that says so. (A file of Megatron-LM needs '
                f"its {index.name} beside it. Token files of titan-launch prepare are named by their folder.)"
            )
            raise config_error((*key, "dtype"), reason)
        file = _whole_file(path, config.dtype)
    elif config.dtype not in (None, file.dtype):
        reason = f"the header of {path.name} says {file.dtype}; remove this key, which is only for flat files"
        raise config_error((*key, "dtype"), reason, config.dtype)
    if not file.num_tokens:
        raise TokenFilesError(f"is empty: {path.name} has no tokens; name other files")
    return file


def _whole_file(path: Path, dtype: str, start: int = 0, index: Path | None = None) -> _File:
    """Return a file whose tokens begin at byte `start`."""
    num_tokens, rest = divmod(path.stat().st_size - start, np.dtype(dtype).itemsize)
    if rest:
        raise TokenFilesError(f"is damaged: the size of {path.name} is not a multiple of {dtype}; copy it again")
    return _File(path, dtype, start, num_tokens, index)


def _llmc_file(path: Path) -> _File | None:
    """Return a file of llm.c; None if it has no such header."""
    header = np.fromfile(path, "<i4", _LLMC_HEADER)
    dtype = _LLMC_FORMATS.get(tuple(map(int, header[:2])))  # type: ignore[arg-type]
    if dtype is None or len(header) < _LLMC_HEADER or header[3:].any():
        return None
    file = _whole_file(path, dtype, header.nbytes)
    if file.num_tokens != header[2]:
        found = f"has {file.num_tokens:,} tokens, but its header says {header[2]:,}"
        raise TokenFilesError(f"is damaged: {path.name} {found}; copy it again")
    return file


def _megatron_file(path: Path, index: Path) -> _File:
    header = np.fromfile(index, _MEGATRON_HEADER, 1)
    if not len(header) or bytes(header["magic"][0]) != _MEGATRON_MAGIC or header["version"][0] != 1:
        raise TokenFilesError(f"cannot be read: {index.name} is not an index of Megatron-LM in version 1")
    dtype = _MEGATRON_DTYPES.get(int(header["dtype"][0]))
    if dtype is None:
        raise TokenFilesError(f"cannot be read: {index.name} says that the data are not token ids of 1 to 8 bytes")
    return _whole_file(path, dtype, index=index)


def _scan(files: Sequence[_File], end_of_document: int, folder: Path) -> None:
    """Write the largest token id, and the ends of the documents of each file."""
    largest, documents = 0, []
    for number, file in enumerate(files):
        tokens, found = file.map(), []
        for start in range(0, file.num_tokens, _CHUNK):
            chunk = tokens[start : start + _CHUNK]
            largest = max(largest, int(chunk.max()))
            if file.index is None:
                found.append(np.flatnonzero(chunk == end_of_document) + start + 1)
        last = np.array([file.num_tokens])
        ends = np.union1d(np.concatenate(found), last) if file.index is None else _megatron_ends(file, file.index)
        ends.astype("<i8").tofile(folder / f"{number}.ends")
        documents.append(len(ends))
    (folder / "scan.json").write_text(json.dumps({"largest": largest, "documents": documents}))


def _megatron_ends(file: _File, index: Path) -> npt.NDArray[np.int64]:
    """Return the number of tokens up to the end of each document. Raises TokenFilesError for an index of other data."""
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
    ends = np.concatenate([[0], np.cumsum(arrays["lengths"], dtype=np.int64)])
    borders = arrays["documents"]
    is_valid = (
        ends[-1] == file.num_tokens
        and np.array_equal(ends[:-1] * np.dtype(file.dtype).itemsize, arrays["starts"])
        and len(borders) > 0
        and borders[0] == 0
        and borders[-1] == sequences
        and bool((np.diff(borders) >= 0).all())
    )
    if not is_valid:
        raise TokenFilesError(f"is damaged: {index.name} does not describe {file.path.name}; copy both again")
    return np.setdiff1d(ends[borders], [0])
