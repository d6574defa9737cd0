"""Fingerprints of data sets, digests of files, and the commit of a git checkout.

A resumed run compares fingerprints to detect changed data.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from titan_launch.core.errors import listed
from titan_launch.core.files import chunks_of, open_regular
from titan_launch.core.terminal import counted

_HASHED_SAMPLES = 64

_NAMED_FILES = 2000
"""Largest number of files whose names and states a fingerprint contains. They take 60 to 100 bytes per file."""


@dataclass(frozen=True)
class Fingerprint:
    """Sizes and digests of a data set."""

    seed: int
    """Seed of the random choice of the hashed samples."""

    samples: int
    files: int
    states: str
    """Digest of the names and states of all files, in order. The state of a file is its size and, if the whole file has
    been read, a checksum of its content."""

    content: str
    """Digest of up to 64 samples."""

    named: tuple[tuple[str, str], ...] = ()
    """Name and state of each file that has a name. Empty if there are more than 2,000 files."""

    tokenizer: str = ""
    """Digest of the tokenizer that made the tokens; "" for data without tokens."""

    @property
    def digest(self) -> str:
        """Digest of sizes and contents: 16 hexadecimal digits. Only digests with the same seed can be compared."""
        return _digest([f"{self.samples} {self.files} {self.states} {self.content}".encode()])[:16]

    def changed_to(self, now: Fingerprint) -> str:
        """Return a clause that says how the data has changed; "" if no change is found. `now`: a fingerprint of the
        present data, made with the same seed. The tokenizers are not compared."""
        counts = [
            f"{counted(new, noun)} (before: {old:,})"
            for noun, old, new in (("sample", self.samples, now.samples), ("file", self.files, now.files))
            if old != new
        ]
        names = self._changed_names(now)
        if counts or names:
            return "; ".join([*([f"it now has {' and '.join(counts)}"] if counts else []), *names])
        if self.states != now.states:
            return "the names, sizes or contents of its files differ"
        if self.content != now.content:
            return "the names and sizes of its files are the same, but their content differs"
        return ""

    def _changed_names(self, now: Fingerprint) -> list[str]:
        """Return a clause for each kind of change (missing, changed, new), such as `missing: a.txt, b.txt`. Return an
        empty list if no file has changed, or if one of the data sets has too many files or unnamed files."""
        if len(self.named) != self.files or len(now.named) != now.files:
            return []
        before, after = dict(self.named), dict(now.named)
        groups = {
            "missing": [name for name in before if name not in after],
            "changed": [name for name in before if after.get(name, before[name]) != before[name]],
            "new": [name for name in after if name not in before],
        }
        return [f"{group}: {listed(names)}" for group, names in groups.items() if names]


def fingerprint_of(
    files: Sequence[Sequence[Any]], num_samples: int, sample: Callable[[int], bytes], seed: int, tokenizer: str = ""
) -> Fingerprint:
    """Return the fingerprint of a data set, the same on every machine.

    `files`: name and state of each file, in order. The name may be "". `sample` returns the content of the sample at an
    index.
    """
    named = tuple(
        # A name may have bytes that are not UTF-8, which JSON cannot contain. Each such byte becomes the text `\udcXX`.
        (name.encode(errors="backslashreplace").decode(), " ".join(map(str, state)))
        for name, *state in files[:_NAMED_FILES]
        if name
    )
    states = _digest([json.dumps(files).encode()])
    content = _digest(map(sample, _drawn_samples(num_samples, seed)))
    is_named = len(files) <= _NAMED_FILES
    return Fingerprint(seed, num_samples, len(files), states, content, named if is_named else (), tokenizer)


def fingerprint_of_files(files: Sequence[tuple[str, Path]], sample_bytes: int = 1 << 20) -> Fingerprint:
    """Return the fingerprint of named files: their sizes, and the content of up to 64 samples. Raises OSError.

    A sample is a piece of `sample_bytes` bytes of a file. If the files have more than 64 pieces, a fixed seed draws 64
    of them.
    """
    sizes = [(name, path.stat().st_size) for name, path in files]
    ends = list(accumulate(-(-size // sample_bytes) for _, size in sizes))

    def sample(index: int) -> bytes:
        file = bisect_right(ends, index)
        with open_regular(files[file][1]) as stream:
            stream.seek((index - (ends[file - 1] if file else 0)) * sample_bytes)
            return stream.read(sample_bytes)

    return fingerprint_of(sizes, ends[-1] if ends else 0, sample, seed=0)


def content_digest(paths: Iterable[Path]) -> str:
    """Return the 16-byte BLAKE2b digest of the concatenated contents of files, in hexadecimal. Raises OSError."""
    return _digest(chunk for path in paths for chunk in chunks_of(path))


def commit_of(folder: Path, digits: int = 40) -> str | None:
    """Return the commit of the git checkout around `folder`: the first `digits` digits of its hash, and `-dirty` if
    tracked files have changed. Return None if there is no checkout, or if git is missing or fails."""
    import subprocess  # the cache, which imports this module, does not need it

    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", f"--abbrev={digits}", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _drawn_samples(num_samples: int, seed: int) -> Iterable[int]:
    """Return the indices of the samples to hash: all samples if there are at most 64. Otherwise return 64 random
    indices, some of which may be equal."""
    if num_samples <= _HASHED_SAMPLES:
        return range(num_samples)
    return (int(_digest([f"{seed}/{draw}".encode()]), 16) % num_samples for draw in range(_HASHED_SAMPLES))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
