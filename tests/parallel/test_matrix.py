"""Every way to divide a model over ranks trains like one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parallel.matrix import TOLERANCE, Case, differences, sample
from tests.sampling import sampled

NUM_STEPS = 2
"""The second step starts from the result of the first: updated parameters, optimizer state, and no gradients."""


@pytest.mark.parametrize("ranks", [2, 4])
@sampled("cases", sample(), 23)
def test_every_combination_of_parallelisms_equals_one_process(
    ranks: int, cases: tuple[Case, ...], tmp_path: Path
) -> None:
    found = differences([case for case in cases if case.division.ranks == ranks], tmp_path, NUM_STEPS)
    assert {case: difference for case, difference in found.items() if max(difference) > TOLERANCE} == {}
