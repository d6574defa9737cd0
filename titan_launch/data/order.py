"""Order of samples: pure functions from a position in the stream of samples to the index of a sample, or to random
numbers.

A run's position in the stream is one integer: the number of samples consumed so far. The order does not depend on the
number of ranks, microbatches or workers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from math import lcm
from typing import Protocol

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
"""Number of rounds of a Feistel network. Four rounds make it indistinguishable from a random permutation of a large
domain (Luby and Rackoff 1988). The small domain of a tiny data set needs more rounds."""

_CACHED_HASHES = 1 << 16
"""Largest number of hashes that one round of a permutation caches. For up to 4^16 samples, these are all hashes."""


class Order(Protocol):
    """A function from a position in an endless stream of samples to the index of a sample."""

    @property
    def num_samples(self) -> int:
        """Number of different samples."""

    def __call__(self, position: int, /) -> int:
        """Return the index of the sample at `position` (0, 1, 2, ...) of the stream."""

    def consumed(self, position: int, /) -> tuple[int, ...]:
        """Return the number of samples of each source before `position`."""


@dataclass(frozen=True)
class SampleOrder:
    """Order of one source: an endless stream of epochs. An epoch contains each sample once.

    The order is a pure function of (`seed`, epoch, index): any rank can look up any position without state. A shuffled
    epoch is a keyed permutation of [0, n), computed per index.
    """

    num_samples: int
    """Number of samples in an epoch, at least 1."""

    seed: int
    shuffle: bool
    """False: every epoch has the order of the source."""

    def __call__(self, position: int) -> int:
        epoch, index = divmod(position, self.num_samples)
        return _permutation(f"{self.seed}/{epoch}", self.num_samples)(index) if self.shuffle else index

    def consumed(self, position: int) -> tuple[int, ...]:
        return (position,)


_BLOCK = 64
"""Smallest number of positions in a block of a mixture. With a power of 4, `Permutation` is fastest."""


class MixtureOrder:
    """Order of several sources, mixed by weights. Indices count through the samples of the first source, then of the
    second, and so on.

    Each source has an endless stream of its own. Its order is the same as if the source were used alone. Positions are
    divided into blocks. In a block, the weights decide the number of samples of each source, and a keyed permutation
    decides their positions. After every whole block, the number of samples of a source since the weights last changed
    differs by less than 1 from its exact share. All numbers are integers, so rounding errors do not add up.
    """

    def __init__(self, sources: Mapping[str, SampleOrder], stages: Sequence[tuple[int, Sequence[Fraction]]], seed: int):
        """`sources`: the order of each source, by name. `stages`: pairs of a position and the weights of all sources
        from this position on. The first stage begins at position 0."""
        self.sources, self.stages, self.seed = sources, stages, seed
        self._orders = list(sources.values())
        *self._offsets, self.num_samples = [0, *accumulate(order.num_samples for order in self._orders)]
        self._stages: list[_Stage] = []
        before = (0,) * len(sources)
        for start, weights in stages:
            before = self.consumed(start) if self._stages else before
            self._stages.append(_Stage(start, _whole(weights), before, seed))

    def __call__(self, position: int) -> int:
        stage, block, slot = self._locate(position)
        source, number = stage.block(block)[slot]
        return self._offsets[source] + self._orders[source](number)

    def consumed(self, position: int) -> tuple[int, ...]:
        stage, block, slot = self._locate(position)
        counts = list(stage.consumed(block))
        for source, number in stage.block(block)[:slot]:
            counts[source] = number + 1
        return tuple(counts)

    def progress(self, position: int) -> dict[str, tuple[float, float]]:
        """Return (share, epochs) for each source, by name: the source's share of the samples before `position`, from 0
        to 1, and the number of its epochs before `position`."""
        return {
            name: (count / max(position, 1), count / order.num_samples)
            for (name, order), count in zip(self.sources.items(), self.consumed(position), strict=True)
        }

    def _locate(self, position: int) -> tuple[_Stage, int, int]:
        """Return the stage of a position, the index of its block in this stage, and its index in the block."""
        stage = self._stages[bisect_right(self._stages, position, key=lambda stage: stage.start) - 1]
        return stage, *divmod(position - stage.start, stage.block_size)


def block_size(weights: Sequence[Fraction | int]) -> int:
    """Return the number of positions in a block: at least 64, and enough for one sample of every source with a positive
    weight."""
    return max(_BLOCK, -(-sum(weights) // min(weight for weight in weights if weight)))


class _Stage:
    """A range of positions of a mixture in which the weights are constant, divided into blocks."""

    def __init__(self, start: int, weights: tuple[int, ...], before: tuple[int, ...], seed: int):
        """`before`: number of samples of each source before `start`."""
        self.start, self.weights = start, weights
        self.block_size = block_size(weights)
        self._before, self._seed = before, seed
        self.block = lru_cache(maxsize=8)(self._block)

    def consumed(self, blocks: int) -> tuple[int, ...]:
        """Return the number of samples of each source before block `blocks` of this stage.

        The exact shares are rounded down. The missing samples go to the sources with the largest remainders, one to
        each. The number of a source never decreases from one block to the next, because the exact share of a source in
        a block is 0, or at least 1.
        """
        positions, total = blocks * self.block_size, sum(self.weights)
        counts, remainders = zip(*(divmod(weight * positions, total) for weight in self.weights), strict=True)
        by_remainder = sorted(range(len(counts)), key=lambda source: -remainders[source])
        rounded_up = by_remainder[: positions - sum(counts)]
        return tuple(
            before + count + (source in rounded_up)
            for source, (before, count) in enumerate(zip(self._before, counts, strict=True))
        )

    def _block(self, block: int) -> list[tuple[int, int]]:
        """Return the index of the source, and the number of its earlier samples, for each position of a block."""
        counts = list(self.consumed(block))
        ends = list(accumulate(after - before for before, after in zip(counts, self.consumed(block + 1), strict=True)))
        permute = Permutation(f"{self._seed}/mixture/{self.start + block * self.block_size}", self.block_size)
        found = []
        for slot in range(self.block_size):
            source = bisect_right(ends, permute(slot))
            found.append((source, counts[source]))
            counts[source] += 1
        return found


def _whole(weights: Sequence[Fraction]) -> tuple[int, ...]:
    """Return whole numbers with the same ratios as the weights."""
    denominator = lcm(*(weight.denominator for weight in weights))
    return tuple(int(weight * denominator) for weight in weights)


class Permutation:
    """A keyed permutation of [0, size), computed per index without a table of all indices.

    It is a Feistel network over [0, n), where n is the smallest power of 4 that is at least 4 and at least `size`. A
    result outside [0, size) is permuted again until it lies inside ("cycle walking"; Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002). Because n is at most 4 * size, an index is permuted at most 4 times on average.
    """

    def __init__(self, key: str, size: int):
        self._size = size
        self._half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._mask = (1 << self._half_bits) - 1
        rounds = [_Round(f"{key}/{step}/", self._mask) for step in range(_ROUNDS)]
        self._rounds = list(zip(rounds[::2], rounds[1::2], strict=True))

    def __call__(self, index: int) -> int:
        """Return the number in [0, size) to which the permutation maps `index`."""
        while True:
            left, right = index >> self._half_bits, index & self._mask
            for first, second in self._rounds:
                left ^= first[right]
                right ^= second[left]
            index = left << self._half_bits | right
            if index < self._size:
                return index


def random_words(first: int, second: int, count: int) -> npt.NDArray[np.uint64]:
    """Return `count` random 64-bit words that depend only on `first` and `second`, such as a seed and an index.

    Philox is a counter-based generator with a key of two words. NumPy guarantees that the raw words of its bit
    generators never change (NEP 19). NumPy gives no such guarantee for `Generator`.
    """
    return np.random.Philox(key=np.array([first % 2**64, second], dtype=np.uint64)).random_raw(count)


_permutation = lru_cache(maxsize=64)(Permutation)  # consecutive positions of an epoch share one object and its hashes


class _Round(dict[int, int]):
    """The function of one round of a Feistel network, with the hashes that it has computed."""

    def __init__(self, key: str, mask: int):
        super().__init__()
        self._key, self._mask = key, mask

    def __missing__(self, half: int) -> int:
        if len(self) >= _CACHED_HASHES:
            self.clear()
        digest = hashlib.blake2b(f"{self._key}{half}".encode(), digest_size=8).digest()
        self[half] = int.from_bytes(digest, "little") & self._mask
        return self[half]
