from __future__ import annotations

import pytest
import torch
from torch import nn

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.models.build import take_inventory
from titan_launch.plan.memory.depth import Repeat, block_signatures, longest_repeat, shorten
from titan_launch.plan.units.fsdp_units import plan_model
from titan_launch.plan.units.order import Resharding


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("values", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_a_block_with_another_buffer_dtype_has_another_signature() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), Table()) for _ in range(4)))
    precision = PrecisionConfig(rules=(PrecisionRule(match="2.1", buffer_dtype="bfloat16"),))
    plan = plan_model(take_inventory(model, ("0", "1", "2", "3")), precision, Resharding(blocks=True, late=True))
    one, same, other, last = block_signatures(plan)
    assert one == same == last != other


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
