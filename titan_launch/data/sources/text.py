"""Text files, held in memory as one array of tokens."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from titan_launch.config.data import TextData, expand_text_paths
from titan_launch.errors import KeyPath, config_error
from titan_launch.tokenizer import Tokenizer

Files = list[tuple[str, Path]]
"""(name, path) pairs: the name decides a document's side of the split."""


class TokenSource:
    """Consecutive windows over one array of tokens.

    The inputs of the samples do not overlap: a token is an input once per epoch and, but for the first, a target once.
    """

    def __init__(self, tokens: npt.NDArray[np.uint16], seq_len: int):
        self._tokens = tokens
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._seq_len

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both int64 `[seq_len]`: the targets are the inputs one position on."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._seq_len
        window = torch.from_numpy(self._tokens[start : start + self._seq_len + 1].astype(np.int64))
        return window[:-1], window[1:]


def build_text(config: TextData, tokenizer: Tokenizer, seq_len: int, key: KeyPath) -> TokenSource:
    """Read, tokenize and concatenate the files of `config`. Raises ConfigError that names a key below `key`."""
    files = _choose_split(_find_files(config, key), config, key)
    tokens = _tokenize(files, tokenizer, (*key, "path"))
    source = TokenSource(tokens, seq_len)
    if not len(source):
        raise config_error(
            (*key, "path"),
            f"holds no sample of seq_len + 1 = {seq_len + 1} tokens: {len(tokens)} tokens in {_count(files)}",
            config.path,
        )
    return source


def is_validation_document(name: str, percent: int) -> bool:
    """Whether the document `name` is in the share of `percent` that is set aside. Depends on nothing but the two."""
    return zlib.crc32(name.encode()) % 100 < percent


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
        fall = "the only file falls" if len(files) == 1 else f"all {len(files)} files fall"
        raise config_error(
            (*key, "split"),
            f'holds no document: with validation_percent = {config.validation_percent}, {fall} to "{other}"; give more '
            'files (each is one document), or a path of its own with split = "all"',
            config.split,
        )
    return chosen


def _tokenize(files: Files, tokenizer: Tokenizer, path_key: KeyPath) -> npt.NDArray[np.uint16]:
    documents = []
    for _, path in files:
        try:
            data = path.read_bytes()
        except OSError as error:
            raise config_error(path_key, f"cannot read {path}: {error.strerror}") from None
        documents.append(tokenizer.encode_document(data))
    return np.concatenate(documents)


def _count(files: Files) -> str:
    return f"{len(files)} {'file' if len(files) == 1 else 'files'}"
