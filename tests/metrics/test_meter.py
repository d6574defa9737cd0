from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed import run_ranks
from tests.tensors import Operations
from titan_launch.core.observer import StepResult, WatchedStep
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.tags import OTHER, STEP_PARTS, TAGS
from titan_launch.metrics.timeline import Timeline

CPU = torch.device("cpu")


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def build(clock: Clock, **keys: Any) -> Meter:
    return Meter(timeline=Timeline(CPU, clock), **{"world_size": 1, **keys})


ZERO = torch.tensor(0)


def end_step(meter: Meter, targets: Tensor, loss: Tensor, skipped: Tensor, **others: Any) -> None:
    values = {"loss_sum": loss, "targets_global": targets, "is_skipped": skipped, "grad_norm": torch.tensor(0.5)}
    items = {"items_local": torch.tensor(1000), "items_global": torch.tensor(1000)}
    meter.after_step(STEP, StepResult(parts={}, **{**values, **items, **others}))


STEP = WatchedStep(1, is_reported=True, microbatches=())


def train(meter: Meter, clock: Clock, *, steps: int, tokens: int = 1000, loss: float = 2.5, skipped: int = 0) -> None:
    """Train steps of 2 s. Half a second of each is a wait for data, a quarter communication within backward."""
    for _ in range(steps):
        meter.timeline.begin("data")
        clock.advance(0.5)
        meter.timeline.begin("backward")
        clock.advance(0.125)
        with meter.timeline.inner("communication"):
            clock.advance(0.25)
        clock.advance(0.125)
        meter.timeline.begin(OTHER)
        clock.advance(1.0)
        end_step(meter, torch.tensor(tokens), torch.tensor(loss), torch.tensor(skipped))


def report(meter: Meter, *, loss: float = 2.5, valid: int = 1000, valid_global: int = 1000) -> dict[str, float]:
    """Report, with these values of the last step."""
    if meter._last is not None:
        items = {"items_local": torch.tensor(valid), "items_global": torch.tensor(valid_global)}
        meter._last = replace(meter._last, loss_sum=torch.tensor(loss), **items)
    return meter.report({}) | meter.pauses()


def test_a_window_reports_means_and_throughput_of_its_steps() -> None:
    clock = Clock()
    meter = build(clock, flops_per_step_per_device=4e12, peak_flops=10e12)
    train(meter, clock, steps=3)
    scalars = report(meter)
    assert scalars.pop("memory/max_rss_gib") > 0
    assert scalars == {
        "train/loss": 2.5,
        "train/loss_max": 2.5,
        "train/grad_norm": 0.5,
        "time/step_s": 2.0,
        "time/data_s": 0.5,
        "time/forward_s": 0.0,
        "time/backward_s": 0.25,
        "time/communication_s": 0.25,
        "time/optimizer_s": 0.0,
        "time/other_s": 1.0,
        "time/validation_s": 0.0,
        "time/checkpoint_s": 0.0,
        "throughput/tokens_per_second": 500.0,
        "throughput/tokens_per_second_per_device": 500.0,
        "throughput/tflops_per_device": 2.0,
        "throughput/mfu_percent": 20.0,
    }
    assert set(scalars) < {tag.name for tag in TAGS}


def test_every_window_counts_its_own_steps_tokens_and_time() -> None:
    clock = Clock()
    meter = build(clock)
    train(meter, clock, steps=1, tokens=400)
    assert report(meter)["throughput/tokens_per_second"] == 200
    train(meter, clock, steps=10, tokens=100)
    scalars = report(meter)
    assert scalars["throughput/tokens_per_second"] == 50
    assert scalars["time/step_s"] == 2
    assert scalars["time/data_s"] == 0.5


def test_paused_time_is_not_part_of_the_step_time() -> None:
    clock = Clock()
    meter = build(clock, flops_per_step_per_device=4e12)
    train(meter, clock, steps=1)
    with meter.paused("validation"):
        clock.advance(1000)
    train(meter, clock, steps=1)
    scalars = report(meter)
    assert scalars["time/step_s"] == 2
    assert scalars["time/validation_s"] == 500
    assert sum(scalars[f"time/{part}_s"] for part in (*STEP_PARTS, "other")) == 2
    assert scalars["throughput/tokens_per_second"] == 500
    assert scalars["throughput/tflops_per_device"] == 2


def test_a_restarted_window_has_no_earlier_step() -> None:
    clock = Clock()
    meter = build(clock)
    train(meter, clock, steps=3, loss=9.0)
    clock.advance(100)
    meter.restart_window()
    train(meter, clock, steps=2, loss=2.0)
    scalars = report(meter)
    assert scalars["train/loss"] == scalars["time/step_s"] == 2
    assert (scalars["time/data_s"], scalars["throughput/tokens_per_second"]) == (0.5, 500)


def test_pauses_after_a_report_count_in_it_until_the_next_one() -> None:
    clock = Clock()
    meter = build(clock)
    assert not meter.pauses() and not meter.late_pauses()
    train(meter, clock, steps=2)
    assert report(meter)["time/checkpoint_s"] == 0
    with meter.paused("checkpoint"):
        clock.advance(8)
    train(meter, clock, steps=4)
    scalars = report(meter)
    assert (scalars["time/step_s"], scalars["time/checkpoint_s"]) == (2, 2)
    assert not meter.late_pauses()
    with meter.paused("checkpoint"):
        clock.advance(4)
    assert meter.late_pauses() == {"time/checkpoint_s": 3}
    train(meter, clock, steps=4)
    meter.report({})
    for _ in range(2):  # `pauses` has not been called
        assert not meter.late_pauses()
        with meter.paused("checkpoint"):
            clock.advance(4)
    train(meter, clock, steps=4)
    assert report(meter)["time/checkpoint_s"] == 2


def test_communication_in_a_pause_belongs_to_the_pause() -> None:
    clock = Clock()
    meter = build(clock)
    with meter.paused("validation"), meter.timeline.inner("communication"):
        clock.advance(100)
    train(meter, clock, steps=1)
    scalars = report(meter)
    assert scalars["time/validation_s"] == 100
    assert scalars["time/communication_s"] == 0.25
    assert sum(scalars[f"time/{part}_s"] for part in (*STEP_PARTS, "other")) == scalars["time/step_s"] == 2


def test_throughput_without_known_flops_is_not_reported() -> None:
    clock = Clock()
    no_flops, no_peak = build(clock, peak_flops=1e12), build(clock, flops_per_step_per_device=1e12)
    for meter in (no_flops, no_peak):
        train(meter, clock, steps=1)
    assert not {"throughput/tflops_per_device", "throughput/mfu_percent"} & set(report(no_flops))
    assert "throughput/mfu_percent" not in report(no_peak)


def test_images_are_counted_under_their_own_tags() -> None:
    clock = Clock()
    meter = build(clock, unit="images", world_size=1)
    train(meter, clock, steps=2, tokens=64)
    rates = {name: value for name, value in report(meter).items() if name.startswith("throughput/")}
    assert rates == {"throughput/images_per_second": 32, "throughput/images_per_second_per_device": 32}
    assert set(rates) < {tag.name for tag in TAGS}


def test_token_counts_above_2_to_24_are_exact() -> None:
    clock = Clock()
    meter = build(clock)
    train(meter, clock, steps=1, tokens=2**24 + 1)
    assert report(meter)["throughput/tokens_per_second"] == (2**24 + 1) / 2


def test_a_report_accepts_tensors_that_require_gradients() -> None:
    clock = Clock()
    meter = build(clock)
    train(meter, clock, steps=1)
    loss = torch.tensor(1.0, requires_grad=True)
    one = torch.tensor(1)
    end_step(meter, one, loss, ZERO, grad_norm=loss)
    assert meter.report({})["train/loss"] == 1.75


def test_the_loss_is_the_mean_of_the_steps_that_were_not_skipped() -> None:
    clock = Clock()
    meter = build(clock)
    for loss, skipped in ((1.0, 0), (math.nan, 1), (4.0, 0)):
        train(meter, clock, steps=1, loss=loss, skipped=skipped)
    assert report(meter, loss=4.0)["train/loss"] == 2.5
    train(meter, clock, steps=2, loss=math.inf, skipped=1)
    assert report(meter, loss=math.inf)["train/loss"] == math.inf


def test_a_report_copies_its_numbers_once_in_each_direction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of copies does not depend on the number of host values, because each copy would wait for a GPU."""
    counts, reads = [], []
    tolist = Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda tensor: (reads.append(len(tensor)), tolist(tensor))[1])
    for size in (1, 20):
        clock = Clock()
        meter = build(clock)
        train(meter, clock, steps=1)
        measured = {f"measured/{number}": 0.1 * number for number in range(size)}
        with Operations() as operations:
            scalars = meter.report(measured)
        assert {name: scalars[name] for name in measured} == measured  # in float64
        counts.append(operations.counts)
    assert counts[0] == counts[1] and not counts[0]["_local_scalar_dense"]
    assert len(reads) == 2


def test_a_report_without_a_step_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="without a step"):
        report(build(Clock()))


def test_the_maximum_loss_is_omitted_without_targets() -> None:
    clock = Clock()
    meter = build(clock)
    train(meter, clock, steps=1)
    assert "train/loss_max" not in report(meter, loss=math.nan, valid=0, valid_global=0)


def test_a_time_that_no_rank_could_measure_is_omitted() -> None:
    clock = Clock()
    meter = build(clock)
    train(meter, clock, steps=1)
    assert "comm/exposed_s" not in meter.report({"comm/exposed_s": -math.inf})


def _unequal_ranks() -> dict[str, float]:
    # 600 targets of mean 2, 200 of mean 5, none.
    rank = dist.get_rank()
    valid, mean, waited = [(600, 2.0, 1.0), (200, 5.0, 7.0), (0, 0.0, 3.0)][rank]
    clock = Clock()
    meter = build(clock, world_size=3)
    meter.timeline.begin("data")
    clock.advance(waited)
    meter.timeline.begin(OTHER)
    clock.advance(10 - waited)
    end_step(meter, torch.tensor(800), torch.tensor(mean * valid / 800), ZERO)
    return report(meter, loss=mean * valid / 800, valid=valid, valid_global=800)


def test_metrics_of_all_ranks_are_combined() -> None:
    for waited, scalars in zip((1, 7, 3), run_ranks(_unequal_ranks, 3), strict=True):
        assert scalars["train/loss"] == pytest.approx((600 * 2 + 200 * 5) / 800)
        assert scalars["train/loss_max"] == pytest.approx(5)
        assert scalars["train/grad_norm"] == 0.5
        assert scalars["time/data_s"] == waited
        assert scalars["throughput/tokens_per_second"] == 80
        assert scalars["throughput/tokens_per_second_per_device"] == pytest.approx(80 / 3)


def _one_bad_rank(bad: int) -> dict[str, float]:
    clock = Clock()
    meter = build(clock, world_size=2)
    loss = math.nan if dist.get_rank() == bad else 1.0
    train(meter, clock, steps=1, loss=loss)
    return report(meter, loss=loss, valid=500)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_nan_loss_of_one_rank_is_reported(bad: int) -> None:
    for scalars in run_ranks(_one_bad_rank, 2, bad):
        assert math.isnan(scalars["train/loss"])
        assert scalars["train/loss_max"] == math.inf


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_memory_is_per_window() -> None:
    device = torch.device("cuda")
    meter = Meter(timeline=Timeline(device), world_size=1)
    one = torch.ones((), device=device)
    before = torch.cuda.memory_stats(device)["active_bytes.all.current"] / 2**30  # held by earlier tests

    def window(gib: float) -> dict[str, float]:
        torch.empty(int(gib * 2**30), dtype=torch.uint8, device=device)
        end_step(meter, one, one, torch.zeros_like(one), items_local=one, items_global=one, grad_norm=one)
        return meter.report({})

    first, second = window(1.0), window(0.25)
    assert first["memory/max_active_gib"] == pytest.approx(before + 1.0, abs=0.01)
    assert second["memory/max_active_gib"] == pytest.approx(before + 0.25, abs=0.01)
    assert second["memory/max_reserved_gib"] >= 0.25
    assert {"memory/alloc_retries", "memory/ooms"} < set(first)
