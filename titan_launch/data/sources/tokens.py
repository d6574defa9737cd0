"""Samples of token files: sequences of tokens, and the same sequences shifted by one token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from titan_launch.config.sections.data import IGNORED_TARGET, CorpusData, TokenizedData, TokensData
from titan_launch.core.errors import config_error
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of
from titan_launch.data.corpora.base import Corpus
from titan_launch.data.corpora.text import TextCorpus
from titan_launch.data.prepare import cached_token_files
from titan_launch.data.sources.base import Sample, SourceContext
from titan_launch.data.token_files import Header, TokenFilesError, Tokens, TokenStream, open_token_files, read_header

CORPORA: dict[str, type[Corpus]] = {"text": TextCorpus}
"""The corpus of each kind of data that is tokenized when a run starts."""


class TokenSource:
    """A source whose samples are consecutive parts of one stream of tokens.

    The inputs of the samples do not overlap. Each token of a sample is an input once per epoch. All tokens except the
    first are also a target once.
    """

    def __init__(self, stream: TokenStream, seq_len: int, num_classes: int, description: str, note: str = ""):
        """`description`: the files, for the log line; `note`: its end."""
        self._stream, self._seq_len = stream, seq_len
        self.num_classes = num_classes
        self._description, self._note = description, note

    def __len__(self) -> int:
        return max(0, len(self._stream) - 1) // self._seq_len

    def describe(self) -> str:
        """Return the amount of data as part of a log line."""
        size = f"{self._description}, {_count(len(self._stream), 'token')}"
        return f"{size}, {_count(len(self), 'sample')} of {self._seq_len}{self._note}"

    def fingerprint(self, seed: int) -> Fingerprint:
        """Return the fingerprint of the tokens and their files, without skipped files."""

        def content(index: int) -> bytes:
            return self._window(index).astype(np.int64).tobytes()

        return fingerprint_of(self._stream.files, len(self), content, seed)

    def __getitem__(self, index: int) -> Sample:
        """Return inputs and targets, both int64 `[seq_len]`. The targets are the inputs shifted by one position."""
        inputs, targets = self.read_batch([index])
        return inputs[0].long(), targets[0].long()

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None = None) -> Sample:
        """Return inputs and targets of several samples, both int32 `[len(indices), seq_len]`."""
        windows = np.stack([self._window(index) for index in indices])
        inputs, targets = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
        for row, index in enumerate(indices):
            counts = self._stream.read_targets(index * self._seq_len + 1, (index + 1) * self._seq_len + 1)
            if counts is not None:
                targets[row, ~counts] = IGNORED_TARGET
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _window(self, index: int) -> Tokens:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self._seq_len
        return self._stream.read(start, start + self._seq_len + 1)


def build_corpus(config: CorpusData, context: SourceContext) -> TokenSource:
    """Tokenize a corpus, unless the cache has its tokens, and open them. Raises ConfigError on a key below
    `context.key`."""
    corpus = CORPORA[config.kind](config, context.tokenizer, context.key)
    folder = cached_token_files(corpus)
    header = read_header(folder)
    note = _skipped_note(header)
    _check_split(corpus, header)
    if not header.files:
        is_single = len(corpus.files) == 1
        found = "is not UTF-8 text" if is_single else f"none of its {len(corpus.files):,} files is UTF-8 text"
        reason = f"{found} without NUL bytes (first: {header.first_skipped}); convert it to UTF-8, or name text files"
        raise config_error((*context.key, "path"), reason, _path(config))
    return _build(config, context, folder, header, _count(len(header.files), "file"), note)


def build_tokens(config: TokensData, context: SourceContext) -> TokenSource:
    """Open token files that `prepare` wrote. Raises ConfigError on a key below `context.key`."""
    folder, key = Path(config.path), (*context.key, "path")
    try:
        header = read_header(folder)
    except TokenFilesError as error:
        raise config_error(key, str(error), config.path) from None
    if header.tokenizer != context.tokenizer.digest:
        reason = (
            f"was prepared with another tokenizer (digest {header.tokenizer}; that of [tokenizer] is "
            f"{context.tokenizer.digest}); set [tokenizer] as for titan-launch prepare, or prepare the text again"
        )
        raise config_error(key, reason, config.path, also=(("tokenizer",),))
    return _build(config, context, folder, header, _count(header.num_documents, "document"), "")


def _build(
    config: TokenizedData, context: SourceContext, folder: Path, header: Header, description: str, note: str
) -> TokenSource:
    key = (*context.key, "path")
    try:
        stream = open_token_files(folder, header)
    except TokenFilesError as error:
        raise config_error(key, str(error), _path(config)) from None
    source = TokenSource(stream, context.seq_len, header.vocab_size, description, note)
    if not len(source):
        found = f"{len(stream)} tokens in {description}{note}"
        reason = (
            f"has too few tokens for a sample of seq_len + 1 = {context.seq_len + 1} tokens: {found}; name more text, "
            "or set a smaller training.seq_len"
        )
        raise config_error(key, reason, _path(config))
    return source


def _check_split(corpus: Corpus, header: Header) -> None:
    """Raise ConfigError if no document belongs to the split."""
    config, num_files = corpus.config, len(corpus.files)
    if config.split == "all" or header.files or header.skipped:
        return
    other = "train" if config.split == "validation" else "validation"
    belongs = "the only file belongs" if num_files == 1 else f"all {num_files} files belong"
    reason = (
        f'is empty: with validation_percent = {config.validation_percent}, {belongs} to "{other}"; provide more files '
        '(each file is one document), or a separate path with split = "all"'
    )
    raise config_error((*corpus.key, "split"), reason, config.split)


def _skipped_note(header: Header) -> str:
    """Return the text of a log line about skipped files; "" if there are none."""
    if not header.skipped:
        return ""
    counts = " and ".join(_plural(number, reason) for reason, number in header.skipped.items())
    return f"; skipped {counts}, first: {header.first_skipped}"


def _plural(number: int, reason: str) -> str:
    """Return `2 files that are not UTF-8 text` for `file that is not UTF-8 text`."""
    noun, _, rest = reason.partition(" that is ")
    return f"{number:,} {reason}" if number == 1 else f"{number:,} {noun}s that are {rest}"


def _path(config: TokenizedData) -> object:
    return getattr(config, "path", None)


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else f'{noun}s'}"
