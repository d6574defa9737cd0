"""Speeds of operations and collectives: of a data sheet, and measured ones, which are read strictly."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.communication import Ring
from titan_launch.plan.hardware import Hardware, hardware_of
from titan_launch.plan.speeds import (
    OPERATION_SECONDS,
    DataSheetSpeeds,
    Measured,
    MeasuredAttention,
    MeasuredCollective,
    Speeds,
    Work,
    read_measured,
)

MEASURED = Measured(
    device="cpu",
    ranks=2,
    versions={"torch": "2.13.0"},
    created="2026-11-28",
    sizes=(16, 64, 256),
    products={
        "float32": tuple(tuple(tuple(1e9 * (1 + i + j + k) for k in range(3)) for j in range(3)) for i in range(3))
    },
    attention=(
        MeasuredAttention("float32", 128, ((64, 4e9), (256, 16e9)), ((64, 2e9), (256, 8e9))),
        MeasuredAttention("float32", 32, ((64, 1e9), (256, 4e9)), ((64, 5e8), (256, 2e9))),
    ),
    convolution={"float32": 3e9},
    memory=((1000.0, 1e-6), (1e6, 1e-4)),
    collectives=(
        MeasuredCollective("all_gather", 2, 0, ((1000.0, 1e-4), (1e6, 1e-3))),
        MeasuredCollective("all_gather", 8, 0, ((1000.0, 4e-4), (1e6, 4e-3))),
    ),
    unit_seconds=1e-3,
    parameter_seconds=1e-4,
    operation_seconds=1e-5,
    exchange_seconds=1e-3,
    stage_seconds=1e-2,
    ranks_per_core=1.5,
)


def planned(**planner: Any) -> Hardware:
    return hardware_of(JobConfig.model_validate({"job": {"device": "cpu"}, "planner": planner}), 2)


def h100(**planner: Any) -> DataSheetSpeeds:
    config = JobConfig.model_validate({"planner": {"device": "h100-80gb", **planner}})
    speeds = hardware_of(config, 8).speeds
    assert isinstance(speeds, DataSheetSpeeds)
    return speeds


def written(measured: Measured, folder: Path) -> str:
    (folder / "speeds.json").write_text(measured.dumps())
    return str(folder / "speeds.json")


@pytest.fixture
def measured_speeds(tmp_path: Path) -> Speeds:
    speeds = planned(speeds=written(MEASURED, tmp_path)).speeds
    assert speeds is not None
    return speeds


def test_an_operation_takes_as_long_as_its_flops_or_its_bytes() -> None:
    speeds = h100()
    large = Work("product", "bfloat16", (1, 8192, 8192, 8192))
    reached = 2 * 8192**3 / speeds.seconds(large)
    assert 0.6 * 989e12 < reached < 0.8 * 989e12
    assert speeds.seconds(large._replace(times=3)) == pytest.approx(3 * speeds.seconds(large))
    assert speeds.seconds(large._replace(dtype="float32")) > 10 * speeds.seconds(large)
    narrow = Work("product", "bfloat16", (1, 8192, 16, 8192))  # its result takes longer to write than to compute
    moved = 2 * (2 * 8192 * 16 + 8192 * 8192)
    assert speeds.seconds(narrow) == pytest.approx(OPERATION_SECONDS + moved / speeds.memory_bytes_per_s)
    assert speeds.seconds(Work("memory", "", (8,))) == pytest.approx(OPERATION_SECONDS, rel=1e-3)
    small = [
        Work("memory", "", (8,)),
        Work("convolution", "bfloat16", (8,)),
        Work("attention", "bfloat16", (8, 2, 2, 1)),
    ]
    for work in (large, narrow, *small, *(work._replace(times=3) for work in small)):
        assert speeds.least_seconds(work) < speeds.seconds(work)
        many = work._replace(sizes=(1000 * work.sizes[0], *work.sizes[1:]))  # a larger microbatch
        assert 1000 * speeds.least_seconds(work) <= speeds.seconds(many)


def test_a_collective_takes_the_time_of_its_slowest_link_and_of_its_hops() -> None:
    speeds = h100(intra_node_gb_per_s=100.0, inter_node_gb_per_s=10.0)
    seconds = speeds.collective_seconds
    within, across = seconds("all_gather", Ring(8, 0), 1e9), seconds("all_gather", Ring(16, 2), 1e9)
    all_to_all = seconds("all_to_all", Ring(2, 1, is_all_to_all=True), 1e9)
    assert all_to_all == pytest.approx(1e9 / 9.3e9, rel=0.01)  # all of it leaves the node
    assert within == pytest.approx(1e9 / 80e9, rel=0.01)
    assert across == pytest.approx(1e9 / 8 / 9.3e9, rel=0.01)  # two of sixteen hops leave the node
    many = Ring(512, 64)
    assert seconds("all_gather", many, 0) > seconds("all_reduce", many, 0) > seconds("send", Ring(2, 0), 0)
    assert speeds.least_collective_seconds(["all_gather"], many, 1e6) < seconds("all_gather", many, 1e6)


def test_measured_operations_are_interpolated(measured_speeds: Speeds) -> None:
    def rate(*sizes: int) -> float:
        rows, inner, columns = sizes
        return 2 * rows * inner * columns / measured_speeds.seconds(Work("product", "float32", (1, *sizes)))

    assert rate(64, 64, 64) == pytest.approx(4e9)
    assert rate(32, 16, 16) == pytest.approx((1e9 * 2e9) ** 0.5)  # in the middle of two sizes, by logarithms
    assert rate(9999, 256, 256) == pytest.approx(7e9) and rate(1, 16, 16) == pytest.approx(1e9)
    batch = Work("product", "bfloat16", (4, 16, 16, 16))  # another dtype, and as one of four times the rows
    assert measured_speeds.seconds(batch) == pytest.approx(2 * 4 * 16**3 / 2e9)
    assert measured_speeds.seconds(Work("attention", "float32", (10**9, 128, 32, 1))) == pytest.approx(0.5)
    assert measured_speeds.seconds(Work("attention", "float32", (10**9, 64, 64, 1))) == pytest.approx(0.5)
    assert measured_speeds.seconds(Work("attention_backward", "float32", (10**9, 1024, 16, 1))) == pytest.approx(0.5)
    assert measured_speeds.seconds(Work("convolution", "float32", (3 * 10**9,))) == pytest.approx(1)
    memory = [measured_speeds.memory_seconds(size) for size in (10, 1000, 31622.7766, 1e6, 1e7)]
    assert memory == pytest.approx([1e-6, 1e-6, 1e-5, 1e-4, 1e-3])


def test_a_group_has_the_speed_of_the_nearest_measured_one(measured_speeds: Speeds) -> None:
    seconds = measured_speeds.collective_seconds
    times = [seconds("all_gather", Ring(ranks, 0), 1e6) for ranks in (2, 3, 8, 64)]
    assert times == pytest.approx([1e-3, 1e-3, 4e-3, 4e-3])
    assert seconds("reduce_scatter", Ring(2, 0), 1e6) == pytest.approx(1e-3)  # not measured: as another kind
    assert measured_speeds.knows([Ring(2, 0), Ring(1, 0)])
    assert not measured_speeds.knows([Ring(2, 0), Ring(2, 1)])  # a link across nodes was not measured


def test_only_known_devices_and_measurements_have_speeds(tmp_path: Path) -> None:
    assert planned().speeds is None and planned().mfu == 0.38
    known = hardware_of(JobConfig.model_validate({"planner": {"device": "h200"}}), 8)
    assert known.speeds is not None and known.mfu is None
    chosen = hardware_of(JobConfig.model_validate({"planner": {"device": "h200", "mfu": 0.5}}), 8)
    assert (chosen.speeds, chosen.mfu) == (None, 0.5)
    measured = planned(speeds=written(MEASURED, tmp_path))
    assert measured.speeds is not None and "measured by 2 ranks on cpu" in measured.speeds.source


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("NVIDIA H100 80GB HBM3", "was measured on NVIDIA H100 80GB HBM3, but the job is planned for cpu kernels"),
        ("NVIDIA H200", "was measured on NVIDIA H200, not on h100-80gb"),
    ],
)
def test_speeds_of_another_device_are_refused(device: str, words: str, tmp_path: Path) -> None:
    file = written(replace(MEASURED, device=device), tmp_path)
    planner = {"speeds": file} if "cpu kernels" in words else {"speeds": file, "device": "h100-80gb"}
    with pytest.raises(ConfigError) as error:
        planned(**planner)
    assert words in str(error.value) and file in repr(error.value.problems)


def test_speeds_of_another_device_are_refused_on_a_device_outside_of_the_table(tmp_path: Path) -> None:
    file = written(replace(MEASURED, device="NVIDIA A30"), tmp_path)
    config = JobConfig.model_validate({"planner": {"speeds": file}})
    assert hardware_of(config, 1, "cuda", "NVIDIA A30", 24.0).speeds is not None
    with pytest.raises(ConfigError, match="was measured on NVIDIA A30, not on Tesla T4"):
        hardware_of(config, 1, "cuda", "Tesla T4", 15.0)


Change = Callable[[dict[str, Any]], object]
CHANGES: dict[str, Change] = {
    "speeds: Unexpected": lambda value: value.update(speeds=1),
    "ranks: Field required": lambda value: value.pop("ranks"),
    "ranks: Input should be a valid integer": lambda value: value.update(ranks="2"),
    "sizes: must be": lambda value: value.update(sizes=[64, 16, 256]),
    "products: float32 is missing": lambda value: value.update(products={}),
    "products.float32: needs a positive number": lambda value: value["products"]["float32"][0][0].pop(),
    "memory: needs pairs": lambda value: value.update(memory=[]),
    "attention.float32: needs pairs": lambda value: value["attention"][0]["forward"].reverse(),
    "collectives.all_gather: needs pairs": lambda value: value["collectives"][0].update(points=[[1, -1]]),
    "collectives.0.kind: Input should be": lambda value: value["collectives"][0].update(kind="scatter"),
    "attention: float32 is missing": lambda value: value.update(attention=[]),
    "ranks: must be at least 1": lambda value: value["collectives"][0].update(ranks=0),
    "convolution: needs positive": lambda value: value.update(convolution={"float32": 0}),
    "ranks_per_core: must be at least 1": lambda value: value.update(ranks_per_core=0.5),
    "unit_seconds: must not be negative": lambda value: value.update(unit_seconds=-1.0),
}


@pytest.mark.parametrize("words", CHANGES)
def test_a_file_of_speeds_that_is_not_understood_is_refused(words: str, tmp_path: Path) -> None:
    value = json.loads(MEASURED.dumps())
    CHANGES[words](value)
    (tmp_path / "speeds.json").write_text(json.dumps(value))
    with pytest.raises(ConfigError) as error:
        read_measured(str(tmp_path / "speeds.json"))
    assert words.removeprefix("speeds: Unexpected") in str(error.value) and "planner.speeds" in str(error.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_measured(str(tmp_path / "missing.json"))


def test_measurements_are_read_as_they_are_written(tmp_path: Path) -> None:
    assert read_measured(written(MEASURED, tmp_path)) == MEASURED


def test_ranks_that_share_cores_wait_less_in_a_pipeline(measured_speeds: Speeds) -> None:
    """With 1.5 ranks per core, computation takes 1.5 times as long as that of a rank alone, so a core is idle in a
    bubble of 100 % for only a third of the time of the computation."""
    assert [measured_speeds.idle_share(share) for share in (1, 0.5, 0)] == pytest.approx([1 / 3, 0, 0])
    assert h100().idle_share(0.75) == 0.75
