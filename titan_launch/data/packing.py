"""Packing of documents into samples with little padding. Documents that are too long for a sample are cut into pieces.

A document of n tokens has n - 1 pairs of an input and its target, the next token. It therefore takes n - 1 positions of
a sample. A document that takes more than `seq_len` positions is cut into pieces of `seq_len` positions and a rest. So
every pair of every document is in exactly one sample, and no pair crosses the border of a document. A document of one
token has no pair, and is in no sample.

The pieces are assigned to samples by best-fit decreasing, as in Ding et al., "Fewer Truncations Improve Language
Modeling" (arXiv:2404.10830): in the order of decreasing length, each piece goes to the sample with the least free
space that suffices. The result depends only on the lengths of the documents, on `seq_len`, and on whether the documents
are pairs of answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from titan_launch.core.cache import built_once
from titan_launch.core.json_files import read_json
from titan_launch.data.token_files import TokenStream

VERSION = 1
"""Version of the algorithm and of its files. Data that a different version packed is packed again."""

Indices = npt.NDArray[np.int64]

_SUMMARY = "packing.json"
_ARRAYS = ("starts", "lengths", "ends")


@dataclass(frozen=True)
class PackingSummary:
    """The numbers that the log line about a packing shows."""

    num_documents: int
    """Number of documents with at least two tokens."""

    num_cut: int
    """Number of documents that are cut into pieces."""

    num_samples: int
    padding: float
    """Fraction of padding among the positions of all samples, from 0 to 1."""


@dataclass(frozen=True)
class Packing:
    """The pieces of each sample.

    Pieces are sorted by sample and, within a sample, by their position in the data. Samples are sorted by the positions
    of their first pieces. The arrays of a packing from the cache are memory maps.
    """

    seq_len: int
    summary: PackingSummary
    starts: Indices
    """For each piece, the position of its first token in the stream of all tokens."""

    lengths: npt.NDArray[np.int32]
    """For each piece, the number of its pairs of an input and a target."""

    ends: Indices
    """For each sample, the number of pieces in this sample and all earlier ones."""

    def pieces_of(self, samples: Iterable[int]) -> tuple[Indices, list[int]]:
        """Return the indices of all pieces in `samples`, and for each sample the number of its pieces."""
        bounds = [(int(self.ends[sample - 1]) if sample else 0, int(self.ends[sample])) for sample in samples]
        return np.concatenate([np.arange(*bound) for bound in bounds]), [stop - start for start, stop in bounds]


def cached_packing(stream: TokenStream, seq_len: int) -> Packing:
    """Return the packing of token files. The first process of a host computes the packing and writes it to the cache.
    Raises UserError if the cache cannot be written."""
    ends, has_pairs = stream.document_ends, stream.header.has_pairs
    identity = [VERSION, seq_len, has_pairs, stream.identity]
    folder = built_once("packing", identity, lambda folder: _write(folder, pack(ends(), seq_len, has_pairs)))
    summary = PackingSummary(**read_json(folder / _SUMMARY))
    mode: Literal["r"] | None = "r" if summary.num_samples else None  # an empty file cannot be mapped
    mapped = (np.asarray(np.load(folder / f"{name}.npy", mmap_mode=mode)) for name in _ARRAYS)
    return Packing(seq_len, summary, *mapped)


def _write(folder: Path, packing: Packing) -> None:
    for name in _ARRAYS:
        np.save(folder / f"{name}.npy", getattr(packing, name))
    (folder / _SUMMARY).write_text(json.dumps(asdict(packing.summary)))


def pack(document_ends: Indices, seq_len: int, has_pairs: bool = False) -> Packing:
    """Return the packing of documents. `document_ends`: number of tokens up to the end of each document.

    `has_pairs`: True if documents 2k and 2k + 1 are a pair. Both documents of a pair are then put into one sample, next
    to each other. In the sample, the first document of a pair has an even document number, and the second has the next
    number. Each document must have at least two tokens, and each pair must fit into a sample (`longest_pair`).
    """
    num_pairs = np.maximum(np.diff(document_ends, prepend=0) - 1, 0)
    starts, lengths = _pieces(document_ends, num_pairs, seq_len)
    if has_pairs:
        sample_of = best_fit_decreasing(lengths[0::2] + lengths[1::2], seq_len).repeat(2)
    else:
        sample_of = best_fit_decreasing(lengths, seq_len)
    num_samples = int(sample_of.max(initial=-1)) + 1

    first_pieces = np.zeros(num_samples, np.int64)
    first_pieces[sample_of[::-1]] = np.arange(len(sample_of))[::-1]  # for equal indices, NumPy keeps the last value
    rank = np.empty(num_samples, np.int32)
    rank[np.argsort(first_pieces)] = np.arange(num_samples, dtype=np.int32)
    sample_of = rank[sample_of]

    by_sample = np.argsort(sample_of, kind="stable")
    ends = np.cumsum(np.bincount(sample_of, minlength=num_samples))
    padding = 1 - int(num_pairs.sum()) / max(1, num_samples * seq_len)
    num_documents, num_cut = int((num_pairs > 0).sum()), int((num_pairs > seq_len).sum())
    summary = PackingSummary(num_documents, num_cut, num_samples, padding)
    return Packing(seq_len, summary, starts[by_sample], lengths[by_sample], ends)


def longest_pair(lengths: Indices) -> int:
    """Return the largest number of positions that documents 2k and 2k + 1 take together; 0 without documents.
    `lengths`: tokens of each document."""
    return int((lengths[0::2] + lengths[1::2]).max(initial=2)) - 2


def _pieces(document_ends: Indices, num_pairs: Indices, seq_len: int) -> tuple[Indices, npt.NDArray[np.int32]]:
    """Return the starts and the lengths of the pieces (see `Packing`), in the order of the data."""
    num_pieces = -(-num_pairs // seq_len)
    document = np.repeat(np.arange(len(num_pairs)), num_pieces)
    first_piece = np.cumsum(num_pieces) - num_pieces
    begin = (np.arange(len(document)) - first_piece[document]) * seq_len  # the position of each piece in its document
    lengths = np.minimum(num_pairs[document] - begin, seq_len).astype(np.int32)
    return (document_ends - num_pairs - 1)[document] + begin, lengths


def best_fit_decreasing(lengths: npt.NDArray[np.int32], capacity: int) -> npt.NDArray[np.int32]:
    """Return the bin of each item. The lengths of the items in a bin, each from 1 to `capacity`, add up to at most
    `capacity`.

    Items of equal length are assigned together. A bin with free space f takes f // length of these items, because after
    each item it is still the bin with the least free space that suffices. So the time grows with the number of
    different lengths.
    """
    counts = np.bincount(lengths, minlength=capacity + 1)
    bin_of = np.empty(len(lengths), np.int32)  # the bin of each item, in the order of decreasing length
    open_bins: list[list[npt.NDArray[np.int32]]] = [[] for _ in range(capacity)]  # by free space
    has_bins = 0  # bit f is set if open_bins[f] is not empty
    num_bins = placed = 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        last = placed + int(counts[length])
        while placed < last:
            fitting = has_bins >> length
            free = length + (fitting & -fitting).bit_length() - 1 if fitting else capacity
            per_bin = free // length
            needed = -(-(last - placed) // per_bin)
            if fitting:
                available = open_bins[free].pop()
                bins, others = available[:needed], available[needed:]
                if len(others):
                    open_bins[free].append(others)
                elif not open_bins[free]:
                    has_bins ^= 1 << free
            else:
                bins = np.arange(num_bins, num_bins + needed, dtype=np.int32)
                num_bins += needed
            stop = min(last, placed + len(bins) * per_bin)
            bin_of[placed:stop] = np.repeat(bins, per_bin)[: stop - placed]
            in_last = stop - placed - (len(bins) - 1) * per_bin
            for changed, number in ((bins[:-1], per_bin), (bins[-1:], in_last)):
                rest = free - number * length
                if rest and len(changed):
                    open_bins[rest].append(changed)
                    has_bins |= 1 << rest
            placed = stop
    result = np.empty_like(bin_of)
    result[_by_falling_length(lengths, capacity)] = bin_of
    return result


def _by_falling_length(lengths: npt.NDArray[np.int32], capacity: int) -> Indices:
    """Return the indices of the items in the order of decreasing length. Items of equal length keep their order."""
    keys = capacity - lengths  # sorted as uint16 if possible: NumPy uses a radix sort, 5 times as fast as for int32
    return np.argsort(keys.astype(np.uint16) if capacity < 1 << 16 else keys, kind="stable")
