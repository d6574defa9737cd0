"""Random samples for the small twin of a job. Microbatches and ranks have different numbers of valid targets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from titan_launch.config.sections.data import IGNORED_TARGET
from titan_launch.config.sections.loss import RATED
from titan_launch.data.sources.interface import SourceContext

_NUM_SAMPLES = 96
_KINDS = 5
"""Number of samples after which the pattern of ignored targets repeats. Text sample i ignores (i % 5) / 8 of its
targets. Of every five images, the last has an ignored target."""


class Samples:
    """Random tokens or images by index, the same on every rank.

    By default, a sample is a sequence of tokens, whose ignored targets are at random places. With `documents = True`, a
    sequence consists of up to four documents. With `documents = "preferences"`, it consists of exactly four: two pairs
    of answers. With `documents = "unpaired_preferences"`, it consists of four documents, whose last targets are labels
    (0 or 1). With `shape`, a sample is an image of noise with a class. The random seed of a sample is `offset` plus its
    index.
    """

    def __init__(
        self,
        context: SourceContext,
        num_classes: int,
        shape: Sequence[int] | None = None,
        documents: bool | str = False,
        offset: int = 0,
    ):
        self.num_classes = num_classes
        self._shape, self._documents = shape, documents
        self._length, self._offset = context.seq_len, offset

    def __len__(self) -> int:
        return _NUM_SAMPLES

    def describe(self) -> str:
        return "random samples of titan-launch prove"

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(self._offset + index)
        if self._shape is not None:
            label = torch.randint(self.num_classes, (), generator=generator)
            is_ignored = index % _KINDS == _KINDS - 1
            return torch.randn(*self._shape, generator=generator), label.fill_(IGNORED_TARGET) if is_ignored else label
        tokens = torch.randint(self.num_classes, (self._length + 1,), generator=generator)
        inputs, targets = tokens[:-1].clone(), tokens[1:].clone()
        order = torch.randperm(self._length, generator=generator)
        targets[order[: self._length * (index % _KINDS) // 8]] = IGNORED_TARGET
        if not self._documents:
            return inputs, targets
        ends = torch.randint(1, self._length, (3,), generator=generator)
        if self._documents is not True:
            ends = torch.arange(1, 4) * self._length // 4
        if self._documents == RATED:
            targets[torch.cat([ends, torch.tensor([self._length])]) - 1] %= 2
        documents = (torch.arange(self._length)[:, None] >= ends.unique()).sum(1)  # numbers without gaps
        return inputs, targets, documents.to(torch.int32)
