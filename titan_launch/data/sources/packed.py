"""Samples of whole documents, and of pieces of long documents: `packing = "documents"`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.core.terminal import counted
from titan_launch.data.packing import Packing
from titan_launch.data.sources.interface import Details, Sample, bytes_of
from titan_launch.data.token_files import Header, TokenStream


class PackedSource:
    """A source of packed samples. A sample is a sequence of pieces of documents, with padding at the end.

    The pieces of a sample have the document numbers 0, 1, 2 and so on. Padding has the next number after the last
    piece, inputs of 0, and ignored targets.
    """

    def __init__(self, stream: TokenStream, packing: Packing, header: Header, description: str, note: str = ""):
        """`description`, `note`: texts at the beginning and at the end of `describe()`."""
        self.stream, self.packing = stream, packing
        self.num_classes = header.vocab_size
        self.has_pairs = header.has_pairs
        """True if documents 2k and 2k + 1 of a sample are a chosen and a rejected answer."""

        self.has_ratings = header.has_ratings
        """True if the last target of each document is a label of its answer."""

        self._header, self._description, self._note = header, description, note

    def __len__(self) -> int:
        return len(self.packing.ends)

    def describe(self) -> str:
        summary, size = self.packing.summary, f"{counted(len(self), 'sample')} of {self.packing.seq_len}"
        cut = f"{summary.num_cut:,} of {summary.num_documents:,} documents cut"
        return f"{self._description}, {size}, {summary.padding:.2%} padding, {cut}{self._note}"

    def details(self) -> Details:
        summary = self.packing.summary
        return token_details(self._header, self.stream, padding=summary.padding, documents_cut=summary.num_cut)

    def fingerprint(self, seed: int) -> Fingerprint:
        return self.stream.fingerprint(len(self), lambda index: bytes_of(self[index]), seed)

    def __getitem__(self, index: int) -> Sample:
        """Return inputs and targets, int64 `[seq_len]`, and document numbers, int32 `[seq_len]`."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        inputs, targets, documents = self.read_batch([index])
        return inputs[0].long(), targets[0].long(), documents[0]

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None = None) -> Sample:
        """Return inputs, targets and document numbers of several samples, all int32 `[len(indices), seq_len]`. Raises
        UserError for a token outside of the vocabulary."""
        seq_len, stream = self.packing.seq_len, self.stream
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
        if max(inputs.view(np.uint32).max(), used.max(initial=0)) >= stream.vocab_size:
            raise stream.outside_vocabulary(zip(starts, starts + lengths + 1, strict=True))
        shape = (len(indices), seq_len)
        return tuple(map(torch.from_numpy, (inputs.reshape(shape), targets.reshape(shape), documents)))


def token_details(header: Header, stream: TokenStream, **amounts: Any) -> Details:
    """Return the contents of token files. `amounts`: further entries of `Details.amounts`."""
    found = {
        "files": len(header.files) or None,  # empty if the header does not name the files
        "skipped": header.skipped or None,
        "documents": stream.num_documents,
        "tokens": len(stream),
        **amounts,
    }
    lengths = np.diff(stream.document_ends(), prepend=0)
    first_tokens = stream.read(0, min(len(stream), 100_000))
    return Details({name: value for name, value in found.items() if value is not None}, lengths, first_tokens)
