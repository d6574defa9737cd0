"""Text files, held in memory as one array of tokens."""

from __future__ import annotations

import codecs
import os
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_launch.config.sections.data import TextData, expand_text_paths
from titan_launch.core.errors import KeyPath, config_error
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of
from titan_launch.data.sources.base import SourceContext
from titan_launch.data.tokenizers import Tokenizer

Files = list[tuple[str, Path]]
"""(name, path) pairs. A file is one document, and its name decides to which split it belongs."""

_CHECKED_BYTES = 1 << 20
"""Bytes per chunk in which `is_text` decodes a file."""


@dataclass(frozen=True)
class Documents:
    """The tokens of a source's text files, and the names of the files."""

    tokens: npt.NDArray[np.uint16]
    """Concatenated tokens of all files."""

    files: tuple[tuple[str, int], ...]
    """Name and size in bytes of each file."""

    skipped: tuple[str, ...]
    """Names of the files that are not text."""

    @property
    def note(self) -> str:
        """Text for a log line: how many files were skipped. Empty if no file was skipped."""
        if not self.skipped:
            return ""
        are = "is" if len(self.skipped) == 1 else "are"
        return f"; skipped {_count(len(self.skipped), 'file')} that {are} not UTF-8 text, first: {self.skipped[0]}"


class TokenSource:
    """A source whose samples are consecutive parts of one array of tokens.

    The inputs of the samples do not overlap. Each token of a sample is an input once per epoch. All tokens except the
    first are also a target once.
    """

    def __init__(self, documents: Documents, seq_len: int, vocab_size: int):
        self._documents = documents
        self._tokens = documents.tokens
        self._seq_len = seq_len
        self.num_classes = vocab_size

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._seq_len

    def describe(self) -> str:
        """Return the amount of data as part of a log line."""
        documents, samples = self._documents, _count(len(self), "sample")
        size = f"{_count(len(documents.files), 'file')}, {_count(len(self._tokens), 'token')}"
        return f"{size}, {samples} of {self._seq_len}{documents.note}"

    def fingerprint(self, seed: int) -> Fingerprint:
        """Return the fingerprint of the tokens and their files, without skipped files."""
        return fingerprint_of(self._documents.files, len(self), lambda index: self._window(index).tobytes(), seed)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return inputs and targets, both int64 `[seq_len]`. The targets are the inputs shifted by one position."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        window = torch.from_numpy(self._window(index).astype(np.int64))
        return window[:-1], window[1:]

    def _window(self, index: int) -> npt.NDArray[np.uint16]:
        start = index * self._seq_len
        return self._tokens[start : start + self._seq_len + 1]


def build_text(config: TextData, context: SourceContext) -> TokenSource:
    """Read, tokenize and concatenate the files of `config`. Raises ConfigError that names a key below `context.key`."""
    tokenizer, seq_len, key = context.tokenizer, context.seq_len, context.key
    files = _choose_split(_find_files(config, key), config, key)
    documents = _tokenize(files, tokenizer, config, (*key, "path"))
    source = TokenSource(documents, seq_len, tokenizer.vocab_size)
    if not len(source):
        found = f"{len(documents.tokens)} tokens in {_count(len(documents.files), 'file')}{documents.note}"
        reason = (
            f"has too few tokens for a sample of seq_len + 1 = {seq_len + 1} tokens: {found}; name more text, or set "
            "a smaller training.seq_len"
        )
        raise config_error((*key, "path"), reason, config.path)
    return source


def is_validation_document(name: str, percent: int) -> bool:
    """Return True if document `name` belongs to the `percent` % of validation documents. Only the arguments decide."""
    return zlib.crc32(os.fsencode(name)) % 100 < percent


def _find_files(config: TextData, key: KeyPath) -> Files:
    try:
        return expand_text_paths(config.path)
    except FileNotFoundError as error:
        entry = error.args[0]
        raise config_error((*key, "path"), f'no file is found at "{entry}"', config.path) from None


def _choose_split(files: Files, config: TextData, key: KeyPath) -> Files:
    if config.split == "all":
        return files
    wanted = config.split == "validation"
    chosen = [(name, path) for name, path in files if is_validation_document(name, config.validation_percent) == wanted]
    if not chosen:
        other = "train" if wanted else "validation"
        belongs = "the only file belongs" if len(files) == 1 else f"all {len(files)} files belong"
        raise config_error(
            (*key, "split"),
            f'is empty: with validation_percent = {config.validation_percent}, {belongs} to "{other}"; provide more '
            'files (each file is one document), or a separate path with split = "all"',
            config.split,
        )
    return chosen


def _tokenize(files: Files, tokenizer: Tokenizer, config: TextData, path_key: KeyPath) -> Documents:
    tokens, taken, skipped = [], [], []
    for name, path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise config_error(
                path_key, f"cannot read {path}: {error.strerror}; correct the permissions, or name other files"
            ) from None
        if is_text(data):
            tokens.append(tokenizer.encode_document(data))
            taken.append((name, len(data)))
        else:
            skipped.append(name)
    if not tokens:
        found = "is not UTF-8 text" if len(files) == 1 else f"none of its {len(files):,} files is UTF-8 text"
        reason = f"{found} without NUL bytes (first: {skipped[0]}); convert it to UTF-8, or name text files"
        raise config_error(path_key, reason, config.path)
    return Documents(np.concatenate(tokens), tuple(taken), tuple(skipped))


def is_text(data: bytes) -> bool:
    """Return True if a file is valid UTF-8 without NUL bytes. Decoding in chunks saves memory."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), _CHECKED_BYTES):
            decoder.decode(data[start : start + _CHECKED_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return b"\0" not in data


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"
