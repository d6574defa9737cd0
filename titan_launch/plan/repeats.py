"""Finding what repeats in a sequence of blocks, so that a deep model need not be gone through whole. No torch."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Repeat:
    """A stretch of a sequence in which the same `period` entries come again and again."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The first index behind the stretch."""
        return self.start + self.period * self.times


def longest_repeat(sequence: Sequence[Hashable]) -> Repeat:
    """The longest stretch with the shortest period: of `a b b b c` the three `b`, of `a b a b a b` the three `a b`.

    An empty sequence has none: `Repeat(0, 1, 0)`.
    """
    numbers: dict[Hashable, int] = {}
    sequence = [numbers.setdefault(entry, len(numbers)) for entry in sequence]  # entries may be slow to compare
    best = Repeat(0, 1, min(1, len(sequence)))
    for period in range(1, len(sequence) // 2 + 1):
        start = 0
        while start + period < len(sequence):
            end = start + period
            while end < len(sequence) and sequence[end] == sequence[end - period]:
                end += 1
            found = Repeat(start, period, (end - start) // period)
            if found.times > 1 and found.times * period > best.times * best.period * (1 if best.times > 1 else 0):
                best = found
            start = max(end - period + 1, start + 1)
    return best


def shorten(length: int, repeat: Repeat, times: int) -> list[int]:
    """The indices that are left of a sequence of `length` when its repeated stretch is cut to so many periods.

    Half of those left are the first ones and half the last, so that entries have the same index at every depth: of 80
    blocks, 0, 1, 78, 79 are left of four and 0, 1, 77, 78, 79 of five.
    """
    if times >= repeat.times:
        return list(range(length))
    first = repeat.start + times // 2 * repeat.period
    last = repeat.end - (times - times // 2) * repeat.period
    return [*range(first), *range(last, length)]
