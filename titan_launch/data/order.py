"""The order in which samples are visited, without a list of them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

# Four rounds make a Feistel network indistinguishable from a random permutation of a large domain (Luby and Rackoff
# 1988); small domains, which a tiny data set has, want more.
_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """Which sample stands at a position of an endless stream: epoch after epoch, every sample once in each.

    A pure function of (`seed`, epoch, index) without memory: any rank can ask for any position at any time, and the
    position alone is all there is to save. Shuffled epochs use a keyed permutation of [0, n) that is computed point by
    point: a Feistel network over the next larger power of 4, and what lands outside is sent through again until it
    lands inside ("cycle walking"; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). The domain is less
    than 4n, so that takes fewer than four passes on average.
    """

    num_samples: int
    """Samples in an epoch, at least 1."""

    seed: int
    shuffle: bool
    """Otherwise every epoch is in the order of the source."""

    def __call__(self, position: int) -> int:
        """The sample, from 0 to `num_samples` - 1, at `position` (0, 1, 2, ...) of the stream."""
        epoch, index = divmod(position, self.num_samples)
        return self._permute(index, f"{self.seed}/{epoch}") if self.shuffle else index

    def _permute(self, index: int, key: str) -> int:
        half_bits = max(1, ((self.num_samples - 1).bit_length() + 1) // 2)
        while True:
            index = _feistel(index, half_bits, key)
            if index < self.num_samples:
                return index


def _feistel(value: int, half_bits: int, key: str) -> int:
    """A permutation of [0, 4 ** `half_bits`), chosen by `key`."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for step in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}/{step}/{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
    return left << half_bits | right
