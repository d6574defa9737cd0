"""Several sources as one source. `data.order.MixtureOrder` decides how often each source is read."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from titan_launch.core.errors import KeyPath, config_error, format_key
from titan_launch.core.fingerprint import Fingerprint
from titan_launch.data.sources.interface import Sample, SampleSource, read_batch


class MixtureSource:
    """The samples of several sources, one source after another."""

    def __init__(self, sources: Mapping[str, SampleSource], key: KeyPath):
        """`sources`: the sources by name. `key`: path of `[[data.sources]]`. Raises ConfigError if the inputs of two
        sources differ in shape or dtype."""
        self.sources = dict(sources)
        self._sources = list(sources.values())
        self.num_classes = max(source.num_classes for source in self._sources)
        self._starts = [0, *accumulate(map(len, self._sources))]
        samples = [source[0] for source in self._sources]
        self._has_documents = any(len(sample) > 2 for sample in samples)
        first = samples[0][0]
        for index, (inputs, *_) in enumerate(samples):
            if (inputs.shape, inputs.dtype) != (first.shape, first.dtype):
                found, wanted = (f"{tuple(sample.shape)} {sample.dtype}" for sample in (inputs, first))
                reason = f"has samples of {found}, but {format_key((*key, 0))} has {wanted}; use one shape and dtype"
                raise config_error((*key, index), reason)

    def __len__(self) -> int:
        return self._starts[-1]

    def describe(self) -> str:
        return f"{len(self._sources)} sources, {len(self):,} samples"

    def fingerprint(self, seed: int) -> Fingerprint | None:
        """Return None: a run compares the fingerprint of each source of the mixture."""

    def __getitem__(self, index: int) -> Sample:
        """Return sample `index`. If a source of the mixture has document numbers and this sample has none, all tokens
        of the sample get the document number 0."""
        return tuple(column[0] for column in self.read_batch([index], None))

    def read_batch(self, indices: Sequence[int], positions: Sequence[int] | None) -> Sample:
        rows: dict[int, list[int]] = {}
        for row, index in enumerate(indices):
            rows.setdefault(bisect_right(self._starts, index) - 1, []).append(row)
        parts = []
        for source, chosen in rows.items():
            of_source = [indices[row] - self._starts[source] for row in chosen]
            part = read_batch(self._sources[source], of_source, positions and [positions[row] for row in chosen])
            if self._has_documents and len(part) == 2:
                part = (*part, torch.zeros_like(part[0], dtype=torch.int32))
            parts.append(part)
        if len(parts) == 1:
            return parts[0]
        order = torch.tensor([row for chosen in rows.values() for row in chosen]).argsort()
        return tuple(torch.cat(columns)[order] for columns in zip(*parts, strict=True))


def single_sources(source: SampleSource) -> dict[str, SampleSource]:
    """Return the sources of a mixture by name. For any other source, return {"": source}."""
    return source.sources if isinstance(source, MixtureSource) else {"": source}
