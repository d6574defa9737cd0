from __future__ import annotations

import pytest

from titan_launch.plan.memory.depth import Repeat, longest_repeat, shorten


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [
        ("", Repeat(0, 1, 0)),
        ("a", Repeat(0, 1, 1)),
        ("abc", Repeat(0, 1, 1)),
        ("aaaaaaaa", Repeat(0, 1, 8)),
        ("abbbc", Repeat(1, 1, 3)),
        ("ababab", Repeat(0, 2, 3)),
        ("ababa", Repeat(0, 2, 2)),
        ("xaaaabbbbb", Repeat(5, 1, 5)),
        ("abcabcabcd", Repeat(0, 3, 3)),
    ],
)
def test_the_longest_repeat_of_a_sequence_is_found(sequence: str, expected: Repeat) -> None:
    assert longest_repeat(sequence) == expected


def test_shortened_sequences_keep_their_ends() -> None:
    repeat = Repeat(start=1, period=1, times=80)
    assert shorten(82, repeat, 4) == [0, 1, 2, 79, 80, 81]
    assert shorten(82, repeat, 5) == [0, 1, 2, 3, 79, 80, 81]


def test_shortening_removes_whole_periods() -> None:
    assert shorten(20, Repeat(start=0, period=2, times=10), 3) == [0, 1, 2, 3, 18, 19]


def test_a_short_sequence_is_not_shortened() -> None:
    assert shorten(5, Repeat(start=0, period=1, times=5), 5) == [0, 1, 2, 3, 4]
