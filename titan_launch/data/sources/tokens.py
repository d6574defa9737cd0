"""Samples of token files. Inputs are a sequence of tokens, and targets are this sequence shifted by one token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from titan_launch.config.sections.data import IGNORED_TARGET, CorpusData, TokensData
from titan_launch.core.errors import ConfigError, config_error
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.core.terminal import counted, one_line
from titan_launch.data.corpora import CORPORA
from titan_launch.data.corpora.interface import Corpus
from titan_launch.data.foreign_tokens import check_unknown_ids, open_foreign_tokens
from titan_launch.data.packing import cached_packing, longest_pair
from titan_launch.data.prepare import cached_token_files
from titan_launch.data.sources.interface import Details, Sample, SourceContext
from titan_launch.data.sources.packed import PackedSource, token_details
from titan_launch.data.token_files import Header, TokenFilesError, Tokens, TokenStream, open_token_files, read_header

_SHOWN = 64
"""Largest number of characters of a digest that an error quotes."""


class TokenSource:
    """A source whose samples are consecutive parts of one stream of tokens.

    In an epoch, each token is an input at most once, and a target at most once. Tokens at the end of the stream that do
    not fill a sample are not used.
    """

    has_pairs = has_ratings = False

    def __init__(self, stream: TokenStream, seq_len: int, header: Header, description: str, note: str = ""):
        """`description`, `note`: texts at the beginning and at the end of `describe()`."""
        self._stream, self._seq_len = stream, seq_len
        self.num_classes = header.vocab_size
        self._header, self._description, self._note = header, description, note

    def __len__(self) -> int:
        return max(0, len(self._stream) - 1) // self._seq_len

    def describe(self) -> str:
        return f"{self._description}, {counted(len(self), 'sample')} of {self._seq_len}{self._note}"

    def details(self) -> Details:
        return token_details(self._header, self._stream)

    def fingerprint(self, seed: int) -> Fingerprint:
        return self._stream.fingerprint(len(self), lambda i: self._window(i).astype(np.int64).tobytes(), seed)

    def __getitem__(self, index: int) -> Sample:
        """Return inputs and targets, both int64 `[seq_len]`. The targets are the inputs shifted by one position."""
        inputs, targets = self.read_batch([index])
        return inputs[0].long(), targets[0].long()

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None = None) -> Sample:
        """Return inputs and targets of several samples, both int32 `[len(indices), seq_len]`. Raises UserError for a
        token outside of the vocabulary."""
        windows = np.stack([self._window(index) for index in indices])
        if windows.max() >= self._stream.vocab_size:
            raise self._stream.outside_vocabulary(
                (index * self._seq_len, (index + 1) * self._seq_len + 1) for index in indices
            )
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


def build_corpus(config: CorpusData, context: SourceContext) -> TokenSource | PackedSource:
    """Return the source of a corpus's tokens in the cache. If the cache does not have the tokens, tokenize the corpus
    first. Raises ConfigError on a key below `context.key`, UserError if the cache cannot be written, and RunError if a
    process that tokenizes is killed."""
    corpus = CORPORA[config.kind](config, context.tokenizer, context.key, context.seq_len)
    folder = cached_token_files(corpus)
    header = read_header(folder)
    skipped = _skipped(corpus, header)
    if not header.num_documents:
        raise _without_documents(corpus, skipped)
    documents = "" if corpus.unit == "file" else f", {counted(header.num_documents, 'document')}"
    description = f"{counted(len(header.files), 'file')}{documents}"
    stream = _open(config, context, folder, header)
    left_out = corpus.left_out and f"not read: {corpus.left_out}"
    note = "".join(f"; {part}" for part in (skipped, left_out) if part)
    return _build(config, context, header, stream, description, note)


def build_tokens(config: TokensData, context: SourceContext) -> TokenSource | PackedSource:
    """Return the source of token files that `prepare` or another program wrote. Raises ConfigError on a key below
    `context.key`, and UserError if the cache cannot be written."""
    folder, key = Path(config.path), (*context.key, "path")
    try:
        if not folder.is_dir():
            header, stream = open_foreign_tokens(config, context.tokenizer, context.key)
            return _build(config, context, header, stream, counted(header.num_documents, "document"), "")
        header = read_header(folder)
    except TokenFilesError as error:
        raise config_error(key, one_line(str(error)), config.path) from None
    except OSError as error:
        found = f"cannot read {one_line(str(error.filename))}: {error.strerror}"
        raise config_error(key, f"{found}; correct the permissions, or name other files", config.path) from None
    if header.tokenizer != context.tokenizer.digest:
        digest = one_line(header.tokenizer)[:_SHOWN]
        reason = (
            f"was prepared with another tokenizer (digest {digest}; that of [tokenizer] is "
            f"{context.tokenizer.digest}); set [tokenizer] as for titan-launch prepare, or prepare the text again"
        )
        raise config_error(key, reason, config.path, also=(("tokenizer",),))
    if header.vocab_size != context.tokenizer.vocab_size:
        claimed, known = header.vocab_size, context.tokenizer.vocab_size
        reason = f"has a header with a vocabulary of {claimed:,} tokens, but the tokenizer has {known:,}"
        reason += "; prepare the text again"
        raise config_error(key, reason, config.path, also=(("tokenizer",),))
    stream = _open(config, context, folder, header)
    return _build(config, context, header, stream, counted(header.num_documents, "document"), "")


def _open(config: CorpusData | TokensData, context: SourceContext, folder: Path, header: Header) -> TokenStream:
    try:
        stream = open_token_files(folder, header)
        check_unknown_ids(folder, header)
        return stream
    except TokenFilesError as error:
        raise config_error((*context.key, "path"), one_line(str(error)), config.path) from None


def _build(
    config: CorpusData | TokensData,
    context: SourceContext,
    header: Header,
    stream: TokenStream,
    description: str,
    note: str,
) -> TokenSource | PackedSource:
    description = f"{description}, {counted(len(stream), 'token')}"
    if header.has_pairs or header.has_ratings:
        _check_whole(config, context, header, stream)
    source: TokenSource | PackedSource
    if config.packing == "documents":
        packing = cached_packing(stream, header, context.seq_len)
        source = PackedSource(stream, packing, header, description, note)
        needed, remedy = "one document of at least 2 tokens", "name more text"
    else:
        source = TokenSource(stream, context.seq_len, header, description, note)
        needed = f"a sample of seq_len + 1 = {context.seq_len + 1} tokens"
        remedy = "name more text, or set a smaller training.seq_len"
    if not len(source):
        split = getattr(config, "split", "all")
        of_split = "" if split == "all" else f" in its {split} split"
        reason = f"has too few tokens{of_split} for {needed}: {description}{note}; {remedy}"
        raise config_error((*context.key, "path"), reason, config.path)
    return source


def _check_whole(config: CorpusData | TokensData, context: SourceContext, header: Header, stream: TokenStream) -> None:
    """Raise ConfigError if a pair of answers, or an answer and its label, could be divided between samples, or is too
    long for a sample."""
    what = "pairs of answers" if header.has_pairs else "answers with a label"
    if config.packing != "documents":
        reason = f'would divide the {what} in the token files; set "documents"'
        raise config_error((*context.key, "packing"), reason, config.packing)
    ends = stream.document_ends()
    longest = longest_pair(ends) if header.has_pairs else int(np.diff(ends, prepend=0).max(initial=1)) - 1
    if longest > context.seq_len:
        reason = (
            f"has {what}, of which one takes {longest:,} positions, but training.seq_len is {context.seq_len:,}; "
            "set a larger training.seq_len, or prepare the text again"
        )
        raise config_error((*context.key, "path"), reason, config.path, also=(("training", "seq_len"),))


def _without_documents(corpus: Corpus, skipped: str) -> ConfigError:
    """Return the error for a corpus without usable documents. `skipped`: result of `_skipped`."""
    config = corpus.config
    if config.split == "all" or skipped:
        reason = f"has no documents{f' ({skipped})' if skipped else ''}; {corpus.remedy}"
        return config_error((*corpus.key, "path"), reason, config.path)
    reason = (
        f"is empty: with validation_percent = {config.validation_percent}, no document belongs to it; provide more "
        f'documents (each {corpus.unit} is one document), or other data with split = "all"'
    )
    return config_error((*corpus.key, "split"), reason, config.split)


def _skipped(corpus: Corpus, header: Header) -> str:
    """Return a clause about the files or documents that the corpus has skipped; "" if there are none."""
    reasons = ", ".join(f"{number:,} {one_line(reason)}" for reason, number in header.skipped.items())
    number = counted(sum(header.skipped.values()), corpus.unit)
    return reasons and f"skipped {number}: {reasons}; first: {one_line(header.first_skipped)}"
