"""The time of a step: what overlaps, what waits, and that shallow models and few microbatches stand for the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.sampling import rest_is_slow
from titan_launch.commands.parser import recordings_of
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import load_job
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.plan.communication import Ring, Rings
from titan_launch.plan.hardware import hardware_of
from titan_launch.plan.job import configured_choice, with_unsharded_parameters
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.memory.clock import Clock, Seconds
from titan_launch.plan.memory.fsdp import Context, ShardedUnit
from titan_launch.plan.memory.ledger import Ledger
from titan_launch.plan.memory.recordings import Recordings, TapesOf
from titan_launch.plan.memory.replay_engine import ReplayEngine
from titan_launch.plan.memory.tape import Work, with_blocks
from titan_launch.plan.replica_shards import ExchangedUnit
from titan_launch.plan.speeds import DataSheetSpeeds, Link
from titan_launch.plan.step_time import step_time
from titan_launch.plan.types import Policy, Unit

SPEEDS = DataSheetSpeeds(
    source="a test",
    flops_per_s={"bfloat16": 100e12, "float32": 100e12},
    shares={},
    memory_bytes_per_s=1e12,
    within=Link(100e9, 0.0, 0.0),
    across=Link(100e9, 0.0, 0.0),
)
PAIR, ALONE = Ring(2, 0), Ring(1, 0)
UNIT = Unit("", (), Policy(None, None), None, "float32", "root")
RINGS = Rings(PAIR, PAIR, PAIR, {"tensor": PAIR, "context": ALONE, "pipeline": PAIR, "expert": ALONE})
COMPUTE = Work("convolution", "bfloat16", (100 * 10**12,))
"""One second, and the least time of an operation."""


def of_sending(seconds: float) -> int:
    """Return the bytes of a buffer whose all-gather among two ranks takes `seconds`."""
    return round(2 * seconds * 100e9)


def test_an_all_gather_runs_ahead_by_two_units_and_a_reduce_scatter_by_one() -> None:
    clock = Clock(SPEEDS, RINGS)
    ends = []
    for _ in range(4):
        ends.append(clock.all_gather(of_sending(0.5), UNIT))
        clock.wait(ends[-1])
        clock.copied_out()
        clock.work(COMPUTE)
    assert ends == pytest.approx([0.5, 1.0, 1.5, 2.0], abs=1e-3)  # the last begins with the copy of the second unit
    assert clock.seconds.total == pytest.approx(4.5, abs=1e-3)  # only the first one is waited for
    begun = clock.reduce_scatter(of_sending(3), UNIT)
    assert begun == pytest.approx(7.5, abs=1e-3) and clock.seconds.total == pytest.approx(4.5, abs=1e-3)
    clock.wait_for_all()
    assert clock.seconds.total == pytest.approx(7.5, abs=1e-3)
    assert clock.seconds.communication == pytest.approx(5, abs=1e-3) and clock.seconds.exposed == 0


def test_computation_waits_for_tensor_parallelism_which_delays_other_collectives() -> None:
    clock = Clock(SPEEDS, RINGS)
    end = clock.all_gather(of_sending(2), UNIT)
    clock.exchange("tensor", round(100e9))
    assert clock.seconds.total == pytest.approx(1) and clock.seconds.exposed == pytest.approx(1)
    clock.wait_for_all()
    assert clock.seconds.total == pytest.approx(end + 1)
    clock.exchange("pipeline", round(100e9))  # does not wait
    assert clock.seconds.total == pytest.approx(3) and clock.seconds.exposed == pytest.approx(1)


def test_the_exchange_of_gradients_between_replicas_overlaps_with_backward() -> None:
    clock, layout = Clock(SPEEDS, RINGS), Layout(2, 2, local_batch_size=1, num_microbatches=1, shards_optimizer=True)
    context = Context(Ledger(), layout, GradientAccumulationConfig(), {}, splits_backward=False, clock=clock)
    width = of_sending(1) // 8
    sizes = ExchangedUnit(2 * width, width, "float32", "float32")
    for _ in range(2):
        context.start_exchange(ShardedUnit(context, UNIT, []), sizes)
    clock.work(COMPUTE)
    assert clock.seconds.total == pytest.approx(1, abs=1e-3)
    context.finish_backward()
    assert clock.seconds.total == pytest.approx(2, abs=1e-3)


def test_nothing_overlaps_on_cpus() -> None:
    clock = Clock(replace(SPEEDS, overlaps=False), RINGS)
    clock.all_gather(of_sending(1), UNIT)
    clock.work(COMPUTE)
    clock.all_reduce(of_sending(0.5))
    clock.exchange("pipeline", round(100e9))
    assert clock.seconds.total == pytest.approx(4, abs=1e-3)


def test_the_bubble_adds_to_what_a_rank_does() -> None:
    time = step_time(
        Seconds(total=12, compute=8, communication=6, exposed=2, least_exposed=1, recorded=6, least_recorded=5), 0.5
    )
    assert (time.compute, time.bubble, time.expected, time.interval) == (13, 5, 17, (13, 19))
    assert time.least == 6 * 1.5 + 1 and time.least_with_replicas(20, shards=2) == 20
    assert [time.least_with_replicas(0, shards) for shards in (2, 1)] == [13 + 2, 9 + 2]


def job(*options: str) -> JobConfig:
    shown = ["--data.kind=synthetic", "--training.seq_len=64", "--planner.device=h100-80gb"]
    return load_job("llama_debug", [*shown, *options]).config


def replayed(config: JobConfig, ranks: int) -> tuple[Seconds, Recordings]:
    layout = plan_layout(config.parallelism, config.training, ranks)
    config = with_unsharded_parameters(config, layout)
    hardware = hardware_of(config, ranks)
    recordings = recordings_of(config, layout, hardware.kernels, is_silent=True)
    seconds = ReplayEngine(config, layout, hardware.kernels, recordings, hardware.speeds).seconds(
        configured_choice(config)
    )
    assert seconds is not None
    return seconds, recordings


def in_depth(seconds: Seconds, other: Seconds, factor: float) -> Any:
    return pytest.approx(seconds.on_line(other, factor), rel=1e-6)


FULL = ["--activation_checkpoint.mode=full", "--training.global_batch_size=64"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], FULL, ["--parallelism.tensor_parallel_degree=2", "--lora.targets=['*.wq']"]])
def test_times_grow_with_blocks_and_microbatches_as_those_of_whole_models(options: list[str]) -> None:
    """Three depths, of which only the last is extrapolated, and four numbers of microbatches."""
    at = [replayed(job(f"--model.args.n_layers={layers}", *options), 4)[0] for layers in (4, 5, 9)]
    assert at[2] == in_depth(at[0], at[1], 5)
    sizes = [4 * 4, 4 * 5, 4 * 9]
    own = [f"--training.local_batch_size={1}", *options]
    steps = [replayed(job(*own, f"--training.global_batch_size={size}"), 4)[0] for size in sizes]
    assert steps[2] == in_depth(steps[0], steps[1], 5)


H200 = ["--planner.device=h200", "--training.seq_len=2048", "--training.local_batch_size=4", "--loss.chunks=1"]
H200 += ["--model.args.n_layers=8", "--activation_checkpoint.mode=none", "--data.kind=synthetic"]


@pytest.mark.parametrize(
    ("batch", "mode", "tokens_per_s"), rest_is_slow([(16, "deferred", 35452), (4, "immediate", 32609)])
)
def test_steps_measured_on_an_h200_take_as_long_as_expected(batch: int, mode: str, tokens_per_s: int) -> None:
    """The eager rows of docs/verification/gpu.md, to which the speed of products in a step was fitted."""
    options = [*H200, f"--training.global_batch_size={batch}", f"--gradient_accumulation.mode={mode}"]
    seconds, _ = replayed(load_job("llama3_8b", options).config, 1)
    assert batch * 2048 / seconds.total == pytest.approx(tokens_per_s, rel=0.05)


@pytest.mark.parametrize(
    "options",
    rest_is_slow(
        [
            ["--activation_checkpoint.mode=selective", "--loss.chunks=4"],
            ["--activation_checkpoint.mode=full"],
            [],
            ["--model.name=qwen3_moe", "--model.flavor=debug"],
            ["--model.name=gemma3", "--model.flavor=debug", "--model.args.n_layers=9"],
            ["--model.name=deepseek_v3", "--model.flavor=debug"],
        ],
        3,
    ),
)
def test_the_recorded_operations_have_the_flops_of_the_model(options: list[str]) -> None:
    config = job("--training.local_batch_size=2", "--training.global_batch_size=2", *options)
    _, recordings = replayed(config, 1)
    (tape,) = recordings.tapes(TapesOf(config.activation_checkpoint))
    counted = recordings.flops(config.activation_checkpoint)
    assert counted is not None
    assert flops_of(tape.work) == pytest.approx(2 * counted.per_sample, rel=1e-3)
    assert with_blocks(tape).work == tape.work


def flops_of(work: dict[Work, int]) -> int:
    total = 0
    for one, times in work.items():
        if one.kind == "product":
            products, rows, inner, columns = one.sizes
            total += 2 * products * rows * inner * columns * times
        elif one.kind != "memory":
            total += one.sizes[0] * times
    return total
