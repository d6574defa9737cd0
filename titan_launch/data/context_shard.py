"""Sequences divided over ranks (context parallelism): which tokens a rank has, and samples with these only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from titan_launch.core.fingerprint import Fingerprint
from titan_launch.data.sources import SampleSource


@dataclass(frozen=True)
class SequencePart:
    """Which tokens of every sequence one of several ranks has."""

    index: int
    """The place of the rank among `count`."""

    count: int

    is_balanced: bool
    """Whether, of twice as many parts as ranks, each has one from the front and one from the back, in this order: under
    a causal mask a later token attends to more. This is the order that PyTorch's ring attention takes. Otherwise a rank
    has one part, in the order of ranks."""

    def of(self, whole: Tensor, axis: int = 0) -> Tensor:
        """The rank's part of a tensor, along the axis of the tokens: a multiple of `count`, or of twice that."""
        if not self.is_balanced:
            return whole.chunk(self.count, axis)[self.index]
        chunks = whole.chunk(2 * self.count, axis)
        return torch.cat((chunks[self.index], chunks[-1 - self.index]), axis)


def part_of(source: SampleSource, part: SequencePart | None) -> SampleSource:
    """A source of sequences with a rank's tokens and their targets only; with None, the whole ones."""
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
