"""Dividing a sequence into parts of about equal cost. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import accumulate


def balance(costs: Sequence[int], num_parts: int) -> tuple[int, ...]:
    """Where the second and later of so many parts of a sequence begin, none of them empty, so that the largest sum of
    costs is as small as it can be, and then the sum of their squares."""
    ends, count = (0, *accumulate(costs)), len(costs)

    def next_starts(start: int, parts: int) -> range:
        return range(start + 1, count - parts + 2)

    @cache
    def largest(start: int, parts: int) -> int:
        if parts == 1:
            return ends[count] - ends[start]
        return min(max(ends[end] - ends[start], largest(end, parts - 1)) for end in next_starts(start, parts))

    limit = largest(0, num_parts)

    def square(start: int, end: int) -> float:
        cost = ends[end] - ends[start]
        return cost**2 if cost <= limit else math.inf

    @cache
    def best(start: int, parts: int) -> tuple[float, tuple[int, ...]]:
        if parts == 1:
            return square(start, count), ()
        rests = ((end, *best(end, parts - 1)) for end in next_starts(start, parts))
        return min((square(start, end) + squares, (end, *starts)) for end, squares, starts in rests)

    return best(0, num_parts)[1]
