"""Samples of token files. Inputs are a sequence of tokens, and targets are this sequence shifted by one token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from titan_launch.config.sections.data import IGNORED_TARGET, CorpusData, TokensData
from titan_launch.core.errors import ConfigError, UserError, config_error
from titan_launch.core.fingerprint import Fingerprint, fingerprint_of
from titan_launch.core.terminal import counted, one_line
from titan_launch.data.corpora import CORPORA
from titan_launch.data.corpora.interface import Corpus
from titan_launch.data.foreign_tokens import check_unknown_ids, open_foreign_tokens
from titan_launch.data.packing import Packing, cached_packing, longest_pair
from titan_launch.data.prepare import cached_token_files
from titan_launch.data.sources.interface import Details, Sample, SourceContext, bytes_of
from titan_launch.data.token_files import Header, TokenFilesError, Tokens, TokenStream, open_token_files, read_header

_SHOWN = 64
"""Largest number of characters of a digest that an error quotes."""


class _TokenFilesSource(ABC):
    """Samples of token files. A subclass decides which tokens are in a sample."""

    def __init__(self, stream: TokenStream, seq_len: int, description: str, note: str = ""):
        """`description`, `note`: texts at the beginning and at the end of `describe()`."""
        self.num_classes = stream.header.vocab_size
        self.has_pairs = stream.header.has_pairs
        """True if documents 2k and 2k + 1 of a sample are a chosen and a rejected answer."""

        self.has_ratings = stream.header.has_ratings
        """True if the last target of each document is a label of its answer."""

        self.stream, self._seq_len, self._description, self._note = stream, seq_len, description, note

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None = None) -> Sample:
        """Return the samples at `indices`. All tensors are int32 `[len(indices), seq_len]`. `positions` has no effect.
        Raises UserError for a token outside of the vocabulary."""

    def __getitem__(self, index: int) -> Sample:
        """Return inputs and targets, int64 `[seq_len]`, and of a packed sample also document numbers, int32
        `[seq_len]`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        inputs, targets, *documents = (column[0] for column in self.read_batch([index]))
        return inputs.long(), targets.long(), *documents

    def describe(self) -> str:
        return f"{self._description}, {counted(len(self), 'sample')} of {self._seq_len}{self._note}"

    def details(self) -> Details:
        stream, header = self.stream, self.stream.header
        amounts = {
            "files": len(header.files) or None,  # empty if the header does not name the files
            "skipped": header.skipped or None,
            "documents": stream.num_documents,
            "tokens": len(stream),
        }
        lengths = np.diff(stream.document_ends(), prepend=0)
        first_tokens = stream.read(0, min(len(stream), 100_000))
        return Details({name: value for name, value in amounts.items() if value is not None}, lengths, first_tokens)

    def fingerprint(self, seed: int) -> Fingerprint:
        header = self.stream.header
        return fingerprint_of(header.files, len(self), self._content, seed, header.tokenizer)

    def _content(self, index: int) -> bytes:
        """Return the content of a sample, for the fingerprint."""
        return bytes_of(self[index])


class TokenSource(_TokenFilesSource):
    """A source whose samples are consecutive parts of one stream of tokens.

    In an epoch, each token is an input at most once, and a target at most once. Tokens at the end of the stream that do
    not fill a sample are not used.
    """

    def __len__(self) -> int:
        return max(0, len(self.stream) - 1) // self._seq_len

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None = None) -> Sample:
        """Return inputs and targets. The targets are the inputs shifted by one position, with IGNORED_TARGET for tokens
        that do not count as targets."""
        windows = np.stack([self._window(index) for index in indices])
        if windows.max() >= self.num_classes:
            raise self.stream.outside_vocabulary(
                (index * self._seq_len, (index + 1) * self._seq_len + 1) for index in indices
            )
        inputs, targets = windows[:, :-1].astype(np.int32), windows[:, 1:].astype(np.int32)
        for row, index in enumerate(indices):
            counts = self.stream.read_targets(index * self._seq_len + 1, (index + 1) * self._seq_len + 1)
            if counts is not None:
                targets[row, ~counts] = IGNORED_TARGET
        return torch.from_numpy(inputs), torch.from_numpy(targets)

    def _content(self, index: int) -> bytes:
        return self._window(index).astype(np.int64).tobytes()

    def _window(self, index: int) -> Tokens:
        start = index * self._seq_len
        return self.stream.read(start, start + self._seq_len + 1)


class PackedSource(_TokenFilesSource):
    """A source of packed samples (`packing = "documents"`). A sample is a sequence of whole documents and of pieces of
    long documents, with padding at the end.

    The pieces of a sample have the document numbers 0, 1, 2 and so on. Padding has the next number after the last
    piece, inputs of 0, and ignored targets.
    """

    def __init__(self, stream: TokenStream, packing: Packing, description: str, note: str = ""):
        self.packing, summary = packing, packing.summary
        cut = f"{summary.num_cut:,} of {summary.num_documents:,} documents cut"
        super().__init__(stream, packing.seq_len, description, f", {summary.padding:.2%} padding, {cut}{note}")

    def __len__(self) -> int:
        return len(self.packing.ends)

    def details(self) -> Details:
        details, summary = super().details(), self.packing.summary
        details.amounts.update(padding=summary.padding, documents_cut=summary.num_cut)
        return details

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None = None) -> Sample:
        """Return inputs, targets and document numbers."""
        seq_len, stream = self._seq_len, self.stream
        pieces, num_pieces = self.packing.pieces_of(indices)
        starts, lengths = self.packing.starts[pieces], self.packing.lengths[pieces]
        inputs = np.zeros(len(indices) * seq_len, np.int32)
        targets = np.full(len(indices) * seq_len, IGNORED_TARGET, np.int32)
        documents = np.empty((len(indices), seq_len), np.int32)
        piece = 0
        for row, number in enumerate(num_pieces):
            of_row = lengths[piece : piece + number]
            documents[row] = np.repeat(np.arange(number + 1), [*of_row, seq_len - of_row.sum()])
            at = row * seq_len
            for start, length in zip(starts[piece : piece + number].tolist(), of_row.tolist(), strict=True):
                tokens = stream.read(start, start + length + 1)
                inputs[at : at + length] = tokens[:-1]
                targets[at : at + length] = tokens[1:]
                if (counts := stream.read_targets(start + 1, start + length + 1)) is not None:
                    targets[at : at + length][~counts] = IGNORED_TARGET
                at += length
            piece += number
        # The ids are compared as unsigned numbers, because int32 ids from 2**31 on are negative. All pieces are checked
        # together: a check of each piece would take a third of this method's time.
        used = targets.view(np.uint32)[targets != IGNORED_TARGET]
        if max(inputs.view(np.uint32).max(), used.max(initial=0)) >= self.num_classes:
            raise stream.outside_vocabulary(zip(starts, starts + lengths + 1, strict=True))
        shape = (len(indices), seq_len)
        return tuple(map(torch.from_numpy, (inputs.reshape(shape), targets.reshape(shape), documents)))


def build_corpus(config: CorpusData, context: SourceContext) -> TokenSource | PackedSource:
    """Return the source of a corpus's tokens in the cache. If the cache does not have the tokens, tokenize the corpus
    first. Raises ConfigError on a key below `context.key`, UserError if the cache cannot be written or has an invalid
    header, and RunError if a process that tokenizes is killed."""
    corpus = CORPORA[config.kind](config, context.tokenizer, context.key, context.seq_len)
    folder = cached_token_files(corpus)
    try:
        header = read_header(folder)
    except TokenFilesError as error:
        raise UserError(f"{folder}: {error}") from None
    skipped = _skipped(corpus, header)
    if not header.num_documents:
        raise _without_documents(corpus, skipped)
    documents = "" if corpus.unit == "file" else f", {counted(header.num_documents, 'document')}"
    description = f"{counted(len(header.files), 'file')}{documents}"
    stream = _open(config, context, folder, header)
    left_out = corpus.left_out and f"not read: {corpus.left_out}"
    note = "".join(f"; {part}" for part in (skipped, left_out) if part)
    return _build(config, context, stream, description, note)


def build_tokens(config: TokensData, context: SourceContext) -> TokenSource | PackedSource:
    """Return the source of token files that `prepare` or another program wrote. Raises ConfigError on a key below
    `context.key`, and UserError if the cache cannot be written."""
    folder, key = Path(config.path), (*context.key, "path")
    try:
        if not folder.is_dir():
            stream = open_foreign_tokens(config, context.tokenizer, context.key)
            return _build(config, context, stream, counted(stream.num_documents, "document"))
        header = read_header(folder)
    except TokenFilesError as error:
        raise config_error(key, one_line(str(error)), config.path) from None
    except OSError as error:
        found = f"cannot read {one_line(str(error.filename or config.path))}: {error.strerror or error}"
        raise config_error(key, f"{found}; correct the permissions, or name other files", config.path) from None
    if header.tokenizer != context.tokenizer.digest:
        digest = one_line(header.tokenizer)[:_SHOWN]
        reason = (
            f"was prepared with another tokenizer (digest {digest}; [tokenizer] has the digest "
            f"{context.tokenizer.digest}); set [tokenizer] as for titan-launch prepare, or prepare the text again"
        )
        raise config_error(key, reason, config.path, also=(("tokenizer",),))
    if header.vocab_size != context.tokenizer.vocab_size:
        claimed, known = header.vocab_size, context.tokenizer.vocab_size
        reason = f"has a header with a vocabulary of {claimed:,} tokens, but the tokenizer has {known:,}"
        reason += "; prepare the text again"
        raise config_error(key, reason, config.path, also=(("tokenizer",),))
    stream = _open(config, context, folder, header)
    return _build(config, context, stream, counted(stream.num_documents, "document"))


def _open(config: CorpusData | TokensData, context: SourceContext, folder: Path, header: Header) -> TokenStream:
    try:
        stream = open_token_files(folder, header)
        check_unknown_ids(folder, header)
        return stream
    except TokenFilesError as error:
        raise config_error((*context.key, "path"), one_line(str(error)), config.path) from None


def _build(
    config: CorpusData | TokensData, context: SourceContext, stream: TokenStream, description: str, note: str = ""
) -> TokenSource | PackedSource:
    description = f"{description}, {counted(len(stream), 'token')}"
    if stream.header.has_pairs or stream.header.has_ratings:
        _check_whole(config, context, stream)
    split = getattr(config, "split", "all")
    of_split = "" if split == "all" else f" in its {split} split"
    source: TokenSource | PackedSource
    if config.packing == "documents":
        source = PackedSource(stream, cached_packing(stream, context.seq_len), description, note)
        lack, remedy = f"no document of at least 2 tokens{of_split}", "name more text"
    else:
        source = TokenSource(stream, context.seq_len, description, note)
        lack = f"too few tokens{of_split} for a sample of seq_len + 1 = {context.seq_len + 1} tokens"
        remedy = "name more text, or set a smaller training.seq_len"
    if not len(source):
        reason = f"has {lack}: {description}{note}; {remedy}"
        raise config_error((*context.key, "path"), reason, config.path)
    return source


def _check_whole(config: CorpusData | TokensData, context: SourceContext, stream: TokenStream) -> None:
    """Raise ConfigError if a pair of answers, or an answer and its label, could be divided between samples, or is too
    long for a sample. Also raise ConfigError if documents are not pairs, though the header says so."""
    has_pairs = stream.header.has_pairs
    what = "pairs of answers" if has_pairs else "answers with a label"
    if config.packing != "documents":
        reason = f'would divide the {what} in the token files; set "documents"'
        raise config_error((*context.key, "packing"), reason, config.packing)
    lengths = np.diff(stream.document_ends(), prepend=0)
    if has_pairs and (any(len(shard) % 2 for shard in stream.ends) or lengths.min(initial=2) < 2):
        reason = f"has {what}, but a shard has an odd number of documents, or a document has only one token"
        raise config_error((*context.key, "path"), f"{reason}; prepare the text again", config.path)
    longest = longest_pair(lengths) if has_pairs else int(lengths.max(initial=1)) - 1
    if longest > context.seq_len:
        reason = (
            f"has {what}. The longest takes {longest:,} positions, but training.seq_len is {context.seq_len:,}; "
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
