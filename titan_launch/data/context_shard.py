"""Context parallelism in the data: selection of the tokens of each sequence that a rank needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_launch.core.fingerprint import Fingerprint
from titan_launch.data.sources import SampleSource


@dataclass(frozen=True)
class SequencePart:
    """The tokens of every sequence that belong to one rank of a context-parallel group."""

    index: int
    """Index of the rank in the group, from 0 to `count` - 1."""

    count: int

    is_balanced: bool
    """True: a sequence has `2 * count` chunks, and rank i has chunk i from the front, then chunk i from the back. This
    balances the work of causal attention, and PyTorch's ring attention expects this order. False: a sequence has
    `count` chunks, and rank i has chunk i."""

    def of(self, full: Tensor, axis: int = 0) -> Tensor:
        """Return the rank's part of a tensor along the token axis, whose size is a multiple of the number of chunks."""
        if not self.is_balanced:
            return full.chunk(self.count, axis)[self.index]
        chunks = full.chunk(2 * self.count, axis)
        return torch.cat((chunks[self.index], chunks[-1 - self.index]), axis)


def part_of(source: SampleSource, part: SequencePart | None) -> SampleSource:
    """Return a source whose samples contain only a rank's tokens and targets. If `part` is None, return `source`."""
    return source if part is None else _SequencePartSource(source, part)


@dataclass(frozen=True)
class _SequencePartSource:
    source: SampleSource
    part: SequencePart

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.source[index]
        return self.part.of(inputs), self.part.of(targets)

    @property
    def num_classes(self) -> int:
        return self.source.num_classes

    def describe(self) -> str:
        return self.source.describe()

    def fingerprint(self, seed: int) -> Fingerprint | None:
        return self.source.fingerprint(seed)
