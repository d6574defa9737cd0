"""Padding. (Counts and buffers are checked against real collectives in tests/accumulation.)"""

from __future__ import annotations

import pytest

from titan_launch.plan.communication import padded_numel
from titan_launch.plan.types import TensorInfo


@pytest.mark.parametrize(
    ("shape", "shard", "expected"), [((61, 32), 2, 62 * 32), ((3,), 8, 8), ((64, 3, 3, 3), 7, 70 * 27), ((8, 0), 3, 0)]
)
def test_the_first_axis_is_padded(shape: tuple[int, ...], shard: int, expected: int) -> None:
    assert padded_numel(TensorInfo("weight", shape, "float32", True, True), shard) == expected
