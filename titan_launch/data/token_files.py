"""Token files: tokenized documents on disk, which all processes of a host read through one memory map.

A folder of token files contains (all numbers are little-endian):

    tokens.json      the header: format, version, dtype, tokenizer, and the shards in order
    00000.tokens     token ids of shard 0, uint16 or uint32: its documents one after another
    00000.ends       int64 per document: number of tokens of the shard up to the document's end
    00000.targets    only if some tokens are not targets: uint8 per token, 1 if it counts as a target

The header is written last, so a folder with a header is complete. docs/reference/token_files.md specifies the format.
"""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from titan_launch.core.errors import UserError
from titan_launch.core.files import MIB, file_state, read_regular, replace_text, sync
from titan_launch.core.fingerprint import content_digest
from titan_launch.core.json_files import parse_record
from titan_launch.core.terminal import one_line

Tokens = npt.NDArray[np.unsignedinteger[Any]]

HEADER = "tokens.json"
FORMAT = "titan_launch tokens"
VERSION = 1

SHARD_NAME = re.compile(r"[0-9A-Za-z_-]{1,64}")
"""Valid names of shards. A header must not name files outside of its folder."""

CHUNK = 1 << 24
"""Number of tokens, or of ends of documents, that are processed at a time when a whole file is read."""

MOST_LISTED = 256 * MIB
"""Largest size in bytes of a JSON file that lists all files of a corpus."""

_MOST_ENTRIES = 5_000_000
"""Largest number of arrays and objects in a header."""


class TokenFilesError(Exception):
    """Error for token files that cannot be read. The message is a clause: `is damaged: ...; remedy`."""


@dataclass(frozen=True)
class Encoded:
    """A document, or a pair of documents, as tokens."""

    tokens: Tokens
    targets: npt.NDArray[np.bool_] | None = None
    """True for each token that counts as a target; None if all tokens count."""

    first_length: int | None = None
    """Number of tokens of the first document of a pair. None: the tokens are one document."""


@dataclass(frozen=True)
class TokenShard:
    """An entry of the header for one shard."""

    name: str
    num_tokens: int
    num_documents: int
    digest: str
    """BLAKE2b digest of the concatenated files of the shard."""

    largest: int | None = None
    """Largest token id, 0 without tokens; None in headers of other programs and of earlier releases."""


@dataclass(frozen=True)
class Header:
    """The content of `tokens.json`."""

    dtype: str
    """Dtype of the tokens: `uint16` if the vocabulary has at most 65,536 tokens, else `uint32`."""

    vocab_size: int
    tokenizer: str
    """Digest of the tokenizer."""

    has_targets: bool
    shards: tuple[TokenShard, ...]
    files: tuple[tuple[str, int, str], ...] = ()
    """For each file with documents: its name, its size in bytes, and a CRC-32 of the documents' tokens and targets. The
    CRC-32 is "" if it is unknown."""

    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped files or documents, by reason."""

    first_skipped: str = ""
    """Name of the first skipped file or document."""

    has_pairs: bool = False
    """True if documents 2k and 2k + 1 of every shard are a pair: the chosen and the rejected answer to a prompt."""

    has_ratings: bool = False
    """True if the last token of every document is a label of its answer: 1 for a desirable answer, else 0."""

    source: str = ""
    """Digest of everything that decides the tokens, except for the tokenizer (see `data.prepare`)."""

    format: str = FORMAT
    version: int = VERSION

    @property
    def num_tokens(self) -> int:
        return sum(shard.num_tokens for shard in self.shards)

    @property
    def num_documents(self) -> int:
        return sum(shard.num_documents for shard in self.shards)


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype of the format that holds every token id."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def write_shard(folder: Path, name: str, documents: Iterable[Encoded], dtype: str, has_targets: bool) -> TokenShard:
    """Write the documents as one shard, and return its entry of the header. The files have temporary names until their
    content is on disk."""
    num_tokens, largest, ends = 0, 0, []
    with ExitStack() as stack:
        tokens_file = stack.enter_context((folder / f"{name}.tokens.part").open("wb"))
        targets_file = None
        if has_targets:
            targets_file = stack.enter_context((folder / f"{name}.targets.part").open("wb"))
        for document in documents:
            tokens_file.write(document.tokens.astype(dtype, copy=False).data)
            largest = max(largest, int(document.tokens.max(initial=0)))
            if document.first_length is not None:
                ends.append(num_tokens + document.first_length)
            num_tokens += len(document.tokens)
            ends.append(num_tokens)
            if targets_file is not None:
                counts = np.ones(len(document.tokens), np.uint8) if document.targets is None else document.targets
                targets_file.write(counts.astype(np.uint8).data)
    (folder / f"{name}.ends.part").write_bytes(np.array(ends, dtype="<i8").tobytes())
    for suffix in _suffixes(has_targets):
        partial = folder / f"{name}.{suffix}.part"
        sync(partial)
        partial.rename(folder / f"{name}.{suffix}")
    return TokenShard(name, num_tokens, len(ends), shard_digest(folder, name, has_targets), largest)


def shard_digest(folder: Path, name: str, has_targets: bool) -> str:
    """Return the digest of the content of a shard's files."""
    return content_digest(folder / f"{name}.{suffix}" for suffix in _suffixes(has_targets))


def write_header(folder: Path, header: Header) -> None:
    """Write `tokens.json`, which completes the folder."""
    replace_text(folder / HEADER, json.dumps(asdict(header), indent=1))


def read_header(folder: Path) -> Header:
    """Return the header of a folder. Raises TokenFilesError if the header is missing, unreadable or invalid."""
    try:
        text = read_regular(folder / HEADER, MOST_LISTED)
        if text.count(b"[") + text.count(b"{") > _MOST_ENTRIES:
            raise ValueError
        content = parse_record(text)
        if content.pop("format") != FORMAT:
            raise ValueError
        version = content.pop("version")
        if version != VERSION:
            found = f"{one_line(str(version)):.40}"
            reason = f"has version {found} of the format, but this release reads version {VERSION}"
            raise TokenFilesError(f"{reason}; prepare the folder again")
        shards = tuple(shard_of(shard) for shard in content.pop("shards"))
        files = tuple(map(_file_of, content.pop("files")))
        header = Header(**content, shards=shards, files=files)
        _check_types(header)
        for shard in shards:
            if shard.largest is not None:
                check_ids(shard.largest, f"{shard.name}.tokens", header.vocab_size)
    except FileNotFoundError:
        raise TokenFilesError(f"has no {HEADER}; write the folder with titan-launch prepare") from None
    except OSError as error:
        raise TokenFilesError(f"cannot be read: {error.strerror or error}; {_REMEDY}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        reason = f"has a {HEADER} that is damaged, or that titan-launch prepare did not write"
        raise TokenFilesError(f"{reason}; prepare the folder again") from None
    return header


def shard_of(entry: Any) -> TokenShard:
    """Return the shard that an entry of a JSON file describes. Raises ValueError or TypeError for an invalid entry."""
    shard = TokenShard(**entry)
    sizes = (shard.num_tokens, shard.num_documents)
    if not (
        isinstance(shard.name, str)
        and SHARD_NAME.fullmatch(shard.name)
        and isinstance(shard.digest, str)
        and all(map(_is_count, sizes if shard.largest is None else (*sizes, shard.largest)))
        and shard.num_documents <= shard.num_tokens
        and bool(shard.num_documents) == bool(shard.num_tokens)
    ):
        raise ValueError
    return shard


def _file_of(entry: Any) -> tuple[str, int, str]:
    name, size, checksum = entry
    if not (isinstance(name, str) and _is_count(size) and isinstance(checksum, str)):
        raise ValueError
    return name, size, checksum


def _check_types(header: Header) -> None:
    """Raise ValueError for a header with values that `prepare` never writes."""
    texts = (header.dtype, header.tokenizer, header.first_skipped, header.source)
    counts = (header.vocab_size, header.num_tokens, header.num_documents, *header.skipped.values())
    is_valid = all(isinstance(text, str) for text in texts) and all(map(_is_count, counts))
    is_valid &= all(isinstance(flag, bool) for flag in (header.has_targets, header.has_pairs, header.has_ratings))
    is_valid &= len({shard.name for shard in header.shards}) == len(header.shards)
    if not is_valid or header.dtype != token_dtype(header.vocab_size):
        raise ValueError


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 60


def check_ids(largest: int, file: str, vocab_size: int) -> None:
    """Raise TokenFilesError if the largest token id of a file is outside of the vocabulary."""
    if largest >= vocab_size:
        raise TokenFilesError(
            f"has the token id {largest:,} in {file}, but the vocabulary has {vocab_size:,} tokens (0 to "
            f"{vocab_size - 1:,}); set [tokenizer] to the tokenizer that made these files, or make them again"
        )


@dataclass(frozen=True)
class TokenStream:
    """The tokens of all shards that have tokens, as one stream. The arrays are memory maps."""

    header: Header
    shards: Sequence[Tokens]
    ends: Sequence[npt.NDArray[np.int64]]
    """For each shard, the number of its tokens up to the end of each document."""

    targets: Sequence[npt.NDArray[np.uint8]] | None
    """For each shard, an array with 1 for each token that counts as a target, and 0 for the other tokens. None if all
    tokens count."""

    paths: Sequence[Path]
    """For each shard, the file of its tokens."""

    identity: Sequence[Any]
    """JSON values that change if the end of a document changes: the key of cached packings."""

    starts: Sequence[int] = field(init=False)
    """For each shard, the number of tokens before it. The last entry is the number of all tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts", [0, *accumulate(map(len, self.shards))])

    def __len__(self) -> int:
        return self.starts[-1]

    @property
    def num_documents(self) -> int:
        return sum(map(len, self.ends))

    def read(self, start: int, stop: int) -> Tokens:
        """Return the tokens from `start` to `stop` of the stream: a view if one shard contains them all."""
        return self._read(self.shards, start, stop)

    def read_targets(self, start: int, stop: int) -> npt.NDArray[np.bool_] | None:
        """Return True for each token from `start` to `stop` that counts as a target; None if all tokens of the stream
        count."""
        return None if self.targets is None else self._read(self.targets, start, stop).astype(bool)

    def document_ends(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens up to the end of each document of the stream."""
        parts = [ends + start for ends, start in zip(self.ends, self.starts, strict=False)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def outside_vocabulary(self, spans: Iterable[tuple[int, int]]) -> UserError:
        """Return the error for the first token outside of the vocabulary in one of the spans `(start, stop)`."""
        vocab_size = self.header.vocab_size
        positions = (start + np.flatnonzero(self.read(start, stop) >= vocab_size) for start, stop in spans)
        position = next(int(found[0]) for found in positions if len(found))
        shard = bisect_right(self.starts, position) - 1
        place, (found,) = position - self.starts[shard], self.read(position, position + 1)
        vocabulary = f"the vocabulary has {vocab_size:,} tokens (0 to {vocab_size - 1:,})"
        reason = f"token {place:,} is {found:,}, but {vocabulary}; the file is damaged: {_REMEDY}"
        return UserError(f"{self.paths[shard]}: {reason}")

    def _read(self, arrays: Sequence[npt.NDArray[Any]], start: int, stop: int) -> npt.NDArray[Any]:
        first = bisect_right(self.starts, start) - 1
        begin = self.starts[first]
        if stop <= self.starts[first + 1]:
            return arrays[first][start - begin : stop - begin]
        parts = [arrays[first][start - begin :]]
        while stop > self.starts[first + 1]:
            first += 1
            parts.append(arrays[first][: max(0, stop - self.starts[first])])
        return np.concatenate(parts)


def open_token_files(folder: Path, header: Header) -> TokenStream:
    """Map the files of a folder into memory. This reads all ends of documents, but no tokens.

    Raises TokenFilesError if a file is missing, or if its size does not agree with the header. Also raises
    TokenFilesError if a document has no tokens, or if the last document does not end with its shard.
    """
    shards = [shard for shard in header.shards if shard.num_tokens]
    tokens = [map_file(folder / f"{shard.name}.tokens", header.dtype, shard.num_tokens) for shard in shards]
    ends = [map_file(folder / f"{shard.name}.ends", "int64", shard.num_documents) for shard in shards]
    for shard, of_shard in zip(shards, ends, strict=True):
        if of_shard[-1] != shard.num_tokens:
            reason = f"{shard.name}.ends does not end at {shard.num_tokens:,}, the number of tokens"
            raise TokenFilesError(f"is damaged: {reason}; {_REMEDY}")
        if (document := first_without_tokens(of_shard)) is not None:
            reason = f"document {document:,} of {shard.name}.ends does not end after its start"
            raise TokenFilesError(f"is damaged: {reason}; {_REMEDY}")
    targets = None
    if header.has_targets:
        targets = [map_file(folder / f"{shard.name}.targets", "uint8", shard.num_tokens) for shard in shards]
    paths = [folder / f"{shard.name}.tokens" for shard in shards]
    identity = [
        [shard.digest, *file_state(path.with_suffix(".ends"))] for shard, path in zip(shards, paths, strict=True)
    ]
    return TokenStream(header, tokens, ends, targets, paths, identity)


def first_without_tokens(ends: npt.NDArray[np.int64]) -> int | None:
    """Return the index of the first document that does not end after its start; None if there is none. A document
    starts at the end of the previous document."""
    for start in range(0, len(ends), CHUNK):
        chunk = ends[start : start + CHUNK]
        rises = np.diff(chunk, prepend=ends[start - 1] if start else 0) > 0
        if not rises.all():
            return start + int(rises.argmin())
    return None


def verify_token_files(folder: Path) -> Header:
    """Read all files of a folder, and compare them with the header. Return the header. Raises TokenFilesError if a file
    is damaged."""
    header = read_header(folder)
    stream = open_token_files(folder, header)
    for shard in header.shards:
        if shard_digest(folder, shard.name, header.has_targets) != shard.digest:
            raise TokenFilesError(f"is damaged: shard {shard.name} has another digest than the header says; {_REMEDY}")
    for tokens, path in zip(stream.shards, stream.paths, strict=True):
        check_ids(int(tokens.max()), path.name, header.vocab_size)
    return header


_REMEDY = "copy or prepare the files again"


def map_file(path: Path, dtype: str, size: int) -> npt.NDArray[Any]:
    """Map a file of `size` numbers into memory. Raises TokenFilesError for an unreadable file, or another size."""
    kind = np.dtype(dtype).newbyteorder("<")
    try:
        found = os.stat(path).st_size
        if found != size * kind.itemsize:
            reason = f"{path.name} has {found:,} bytes, but the header says {size * kind.itemsize:,}"
            raise TokenFilesError(f"is damaged: {reason}; {_REMEDY}")
        # Slices of a plain array take a third of the time of slices of `np.memmap`.
        return np.asarray(np.memmap(path, kind, mode="r")) if size else np.zeros(0, kind)
    except OSError as error:
        raise TokenFilesError(f"is damaged: {path.name}: {error.strerror}; {_REMEDY}") from None


def _suffixes(has_targets: bool) -> tuple[str, ...]:
    return ("tokens", "ends", "targets") if has_targets else ("tokens", "ends")
