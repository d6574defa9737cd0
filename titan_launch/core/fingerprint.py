"""Fingerprint of a data set. A resumed run compares fingerprints to detect changed data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

_HASHED_SAMPLES = 64


@dataclass(frozen=True)
class Fingerprint:
    """Sizes and digests of a data set."""

    seed: int
    """Seed of the random choice of the hashed samples."""

    samples: int
    files: int
    names_and_sizes: str
    """Digest of the names and sizes of all files, in order."""

    content: str
    """Digest of up to 64 samples."""

    def changed_to(self, now: Fingerprint) -> str:
        """Return a clause that says how the data has changed; "" if the data is the same. `now`: a fingerprint of the
        present data, made with the same seed."""
        counts = [
            f"{new:,} {noun if new == 1 else f'{noun}s'} (before: {old:,})"
            for noun, old, new in (("sample", self.samples, now.samples), ("file", self.files, now.files))
            if old != new
        ]
        if counts:
            return f"it now has {' and '.join(counts)}"
        if self.names_and_sizes != now.names_and_sizes:
            return "the names or the sizes of its files differ"
        return "" if self == now else "the names and sizes of its files are the same, but their content differs"


def fingerprint_of(
    files: Sequence[tuple[str, int]], num_samples: int, sample: Callable[[int], bytes], seed: int
) -> Fingerprint:
    """Return the fingerprint of a data set, the same on every machine.

    `files`: name and size of each file, in order. `sample` returns the content of the sample at an index.
    """
    names_and_sizes = json.dumps(files).encode()
    content = map(sample, _drawn_samples(num_samples, seed))
    return Fingerprint(seed, num_samples, len(files), _digest([names_and_sizes]), _digest(content))


def _drawn_samples(num_samples: int, seed: int) -> Iterable[int]:
    """Return the indices of the samples to hash: all samples if there are at most 64, else 64 random samples."""
    if num_samples <= _HASHED_SAMPLES:
        return range(num_samples)
    return (int(_digest([f"{seed}/{draw}".encode()]), 16) % num_samples for draw in range(_HASHED_SAMPLES))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
