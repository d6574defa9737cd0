"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
from pydantic import TypeAdapter

from titan_launch.config.sections.training import SchedulerConfig
from titan_launch.optim.schedule import describe_clipping, lr_factor


def _schedule(**config: Any) -> SchedulerConfig:
    schedule: SchedulerConfig = TypeAdapter(SchedulerConfig).validate_python({"kind": "warmup_stable_decay", **config})
    return schedule


def _curve(total_steps: int, **config: Any) -> list[float]:
    schedule = _schedule(**config)
    return [lr_factor(schedule, step, total_steps) for step in range(1, total_steps + 2)]


def test_warm_up_plateau_and_decay() -> None:
    """The last value belongs to the step after the last one, where the decay ends."""
    curve = _curve(10, warmup_steps=4, decay_ratio=0.3, min_lr_factor=0.2)
    assert curve == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


@pytest.mark.parametrize(
    ("decay_type", "fall"),
    [
        ("linear", lambda t: 1 - t),
        ("sqrt", lambda t: 1 - math.sqrt(t)),
        ("cosine", lambda t: (1 + math.cos(math.pi * t)) / 2),
    ],
)
def test_decay_types_have_their_formulas(decay_type: str, fall: Any) -> None:
    curve = _curve(8, decay_ratio=0.5, decay_type=decay_type, min_lr_factor=0.1)
    assert curve[:4] == [1, 1, 1, 1]
    assert curve[4:] == pytest.approx([0.1 + 0.9 * fall(step / 5) for step in (1, 2, 3, 4, 5)])


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_over_the_whole_run(kind: str) -> None:
    curve = _curve(100, kind=kind, warmup_steps=10)
    assert curve[9] == 1
    assert all(later < earlier for earlier, later in pairwise(curve[9:]))
    assert curve[-2] > 0 and curve[-1] == pytest.approx(0)
    assert _curve(100, kind=kind)[0] == 1


def test_schedules_without_decay_and_of_warm_up_only() -> None:
    assert _curve(5, decay_ratio=0) == [1, 1, 1, 1, 1, 0]
    assert _curve(4, warmup_steps=4, decay_ratio=0)[:4] == [0.25, 0.5, 0.75, 1]


def test_a_constant_schedule_stays_at_the_peak_after_warm_up() -> None:
    assert _curve(5, kind="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]


def test_phases_are_clipped_to_the_run() -> None:
    """Warm-up takes at most all steps, and the decay takes at most the rest."""
    assert _curve(4, warmup_steps=8, decay_ratio=0.5)[:4] == [0.25, 0.5, 0.75, 1]
    assert _curve(4, warmup_steps=3, decay_ratio=0.5)[:4] == pytest.approx([1 / 3, 2 / 3, 1, 0.5])
    assert _curve(4, kind="cosine", warmup_steps=8)[:4] == [0.25, 0.5, 0.75, 1]
    assert describe_clipping(_schedule(warmup_steps=8, decay_ratio=0.5), 4) == (
        "learning rate: warm-up is clipped from 8 to 4 steps and decay is clipped from 2 to 0 steps, because "
        "the run has 4 steps"
    )
    decay = "learning rate: decay is clipped from 2 to 1 steps, because the run has 4 steps"
    assert describe_clipping(_schedule(warmup_steps=3, decay_ratio=0.5), 4) == decay
    warm_up = "learning rate: warm-up is clipped from 8 to 4 steps, because the run has 4 steps"
    assert describe_clipping(_schedule(kind="cosine", warmup_steps=8), 4) == warm_up
    assert describe_clipping(_schedule(warmup_steps=2, decay_ratio=0.5), 4) is None


@pytest.mark.parametrize("kind", ["warmup_stable_decay", "cosine", "linear", "constant"])
def test_a_run_of_one_step_uses_the_peak_learning_rate(kind: str) -> None:
    assert _curve(1, kind=kind)[0] == 1
