"""Measured speeds on gloo ranks: their file, their bytes, and a plain timing beside them. The command's errors."""

from __future__ import annotations

import os
import time
from itertools import product
from pathlib import Path
from statistics import median
from typing import get_args

import pytest
import torch
import torch.distributed as dist

from tests.distributed import run_command, run_ranks
from tests.sampling import rest_is_slow
from titan_launch.config.axes import CollectiveKind
from titan_launch.distributed.process_group import Ranks
from titan_launch.metrics.device_speeds import Scope, measure
from titan_launch.plan.speeds import Measured, read_measured

BYTES = (4096, 32768)
SCOPE = Scope((64, 256), (1, 2), (16, 32), (16, 64), (2, 8, 8), BYTES, BYTES, budget_seconds=0.01)


def measure_here(scope: Scope = SCOPE, ranks_per_host: int | None = None) -> tuple[Measured, list[str], float]:
    """Return the measurements, the lines of progress, and the FLOP/s of the largest product by a plain timing.
    `ranks_per_host`: those that torchrun would tell; None without torchrun."""
    rank, size, lines = dist.get_rank(), dist.get_world_size(), list[str]()
    if ranks_per_host is not None:
        os.environ |= {"LOCAL_WORLD_SIZE": str(ranks_per_host), "LOCAL_RANK": str(rank % ranks_per_host)}
    measured = measure(Ranks(rank, size, torch.device("cpu")), scope, lines.append)
    x, times = torch.randn(scope.sizes[-1], scope.sizes[-1]), []
    for _ in range(20):
        begin = time.perf_counter()
        _ = x @ x
        times.append(time.perf_counter() - begin)
    return measured, lines, 2 * scope.sizes[-1] ** 3 / median(times)


def test_measurements_of_two_ranks_are_complete_and_plausible(tmp_path: Path) -> None:
    (measured, lines, plain_rate), (_, silent, _) = run_ranks(measure_here, 2)
    file = tmp_path / "speeds.json"
    file.write_text(measured.dumps())
    assert read_measured(str(file)) == measured
    assert (measured.device, measured.ranks, measured.sizes) == ("cpu", 2, SCOPE.sizes)
    assert measured.versions["torch"] == str(torch.__version__)
    dtypes = {"float32", "bfloat16"}
    assert {*measured.products} == {*measured.convolution} == dtypes
    assert {(one.dtype, one.width) for one in measured.attention} == set(product(dtypes, SCOPE.widths))
    assert plain_rate / 10 < measured.products["float32"][-1][-1][-1] < plain_rate * 10
    assert [num_bytes for num_bytes, _ in measured.memory] == [num_bytes / 4 * 26 / 3 for num_bytes in BYTES]
    sent = {c.kind: [num_bytes for num_bytes, _ in c.points] for c in measured.collectives}
    half, whole = [2048, 16384], [4096, 32768]  # all-reduce sends half of the buffer twice
    assert sent == {"all_gather": half, "reduce_scatter": half, "all_reduce": whole, "all_to_all": half, "send": whole}
    assert measured.unit_seconds > 0
    assert measured.stage_seconds >= 0 and measured.ranks_per_core >= 1  # 0: under load, the sends took longer
    assert "measuring collectives of 2 ranks" in lines and silent == []


@pytest.mark.parametrize(("world_size", "groups"), rest_is_slow([(1, {}), (3, {3: 2}), (4, {2: 0, 4: 2})], 3))
def test_groups_divide_the_ranks_and_know_whether_they_cross_nodes(world_size: int, groups: dict[int, int]) -> None:
    scope = Scope((16, 32), (1, 1), (8,), (16,), (1, 4, 4), BYTES[:1], BYTES[:1], budget_seconds=0.001)
    measured, _, _ = run_ranks(measure_here, world_size, scope, 2)[0]
    found = {(c.kind, c.ranks, c.crossings) for c in measured.collectives}
    assert found == {(kind, *group) for kind in get_args(CollectiveKind) for group in groups.items()}


@pytest.mark.parametrize(
    ("out", "words"),
    [
        ("missing/speeds.json", "there is no folder missing"),
        ("notes.txt", "exists, and is not a file of measurements, so it is not replaced"),
        ("folder", "folder is a folder; name a file"),
        ("weights/speeds.json", "a folder with weights"),
        ("", "--out needs a value"),
    ],
)
def test_a_file_that_must_not_be_written_is_refused_before_the_measurements(
    out: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text('{"device": "cpu"}')
    (tmp_path / "folder").mkdir()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.safetensors").touch()
    status, printed, error = run_command(["measure-device", f"--out={out}"], tmp_path)
    assert (status, printed, len(error.splitlines())) == (2, "", 1) and words in error
    assert (tmp_path / "notes.txt").read_text() == '{"device": "cpu"}'


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_one_error_of_the_option(tmp_path: Path) -> None:
    status, printed, error = run_command(["measure-device", "--out=speeds.json", "--device=cuda"], tmp_path)
    assert (status, printed, len(error.splitlines())) == (2, "", 1) and error.startswith("error: --device cuda: ")


@pytest.mark.slow
def test_the_command_replaces_older_measurements_and_prints_a_summary(tmp_path: Path) -> None:
    measured, _, _ = run_ranks(measure_here, 1)[0]
    file = tmp_path / "speeds.json"
    file.write_text(measured.dumps())
    status, printed, progress = run_command(["measure-device", "--out=speeds.json", "--device=cpu"], tmp_path)
    assert status == 0 and "products (bfloat16): " in printed and "file: speeds.json" in printed
    assert progress.startswith("measuring matrix products: 128 combinations of shapes and dtypes")
    assert read_measured(str(file)).sizes == (16, 64, 256, 1024)
