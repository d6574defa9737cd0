"""The data of charts: parts of a step, peak memory, and differences of losses, as numbers and as drawn."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.report.recorded import record
from titan_launch.cli import main
from titan_launch.metrics.tags import STEP_PARTS
from titan_launch.report.charts import Bar, Column, bar_chart, line_chart, stacked_chart, text_chart
from titan_launch.report.comparison import RunComparison
from titan_launch.report.figures import part_colors, step_columns, time_parts
from titan_launch.report.page import COLORS
from titan_launch.report.recorded_run import load_run
from titan_launch.report.run_page import run_page

PARTS = (*STEP_PARTS, "other")


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def timed(steps: range) -> dict[int, dict[str, float]]:
    """Return reports with six parts of a step, which add up to its time."""
    found = {}
    for step in steps:
        parts = {f"time/{name}_s": index + step % 3 for index, name in enumerate(PARTS, start=1)}
        found[step] = {"time/step_s": float(sum(parts.values())), **parts, "time/validation_s": 5.0}
    return found


def test_the_parts_of_each_report_add_up_to_the_time_of_a_step(tmp_path: Path) -> None:
    folder = record(tmp_path / "run", {1: timed(range(1, 2))[1], **timed(range(4, 20, 3))})
    columns = step_columns(load_run(folder))
    reports = metrics(folder)
    assert [(column.first, column.last) for column in columns] == [
        (1, 1),
        *((step - 2, step) for step in range(4, 20, 3)),
    ]
    for column, report in zip(columns, reports, strict=True):
        assert column.parts == {name: report[f"time/{name}_s"] for name in PARTS}  # without the pauses
        assert column.height == pytest.approx(report["time/step_s"])


def test_a_long_run_has_few_columns_with_the_same_total_time(tmp_path: Path) -> None:
    run = load_run(record(tmp_path / "run", timed(range(1, 1001))))
    columns = step_columns(run)
    assert len(columns) <= 120 and (columns[0].first, columns[-1].last) == (1, 1000)
    for before, column in pairwise(columns):
        assert column.first == before.last + 1
    total = sum(column.height * (column.last - column.first + 1) for column in columns)
    assert total == pytest.approx(sum(value for _, value in run.values("time/step_s")))


def test_time_that_no_metric_measures_and_bad_numbers_are_no_gap_in_the_sum(tmp_path: Path) -> None:
    reports = {
        1: {"time/step_s": 2.0, "time/data_s": 0.5},
        2: {"time/step_s": math.nan, "time/data_s": 0.5},
        3: {"time/step_s": 2.0, "time/data_s": math.inf},
        4: {"time/step_s": 2.0, "time/data_s": 3.0},
    }
    columns = step_columns(load_run(record(tmp_path / "run", reports)))
    assert columns == [Column(1, 1, {"data": 0.5, "not measured": 1.5}), Column(4, 4, {"data": 3.0})]


def drawn(chart: str, color: int) -> list[tuple[float, float, float, float]]:
    """Return (left, top, width, bottom) of each rectangle of a part of a stacked chart."""
    paths = re.findall(rf'class="area part{color}" d="(M[^"]+V[^"]+)"', chart)
    shapes = re.findall(r"M([\d.]+) ([\d.]+)V([\d.]+)h([\d.]+)V", "".join(paths))
    return [(float(left), float(top), float(width), float(end)) for left, end, top, width in shapes]


def test_a_stacked_chart_draws_its_data() -> None:
    columns = [Column(1, 2, {"data": 1.0, "forward": 2.0}), Column(3, 4, {"data": 0.5, "forward": 3.5})]
    chart = stacked_chart("time of a step (s)", columns, "s", {"data": 0, "forward": 1})
    data, forward = drawn(chart, 0), drawn(chart, 1)
    scale = (data[0][3] - data[0][1]) / 1.0  # pixels per second
    for column, low, high in zip(columns, data, forward, strict=True):
        assert low[3] - high[1] == pytest.approx(column.height * scale, abs=0.2)
        assert low[1] == high[3]  # one stands on the other
        assert low[3] - low[1] == pytest.approx(column.parts["data"] * scale, abs=0.2)
    assert data[0][0] + data[0][2] == pytest.approx(data[1][0], abs=0.2)  # the columns have no gap
    assert "steps 3 to 4: 4 s\ndata: 0.5 s (12.5 %)\nforward: 3.5 s (87.5 %)" in chart


def test_a_slow_column_does_not_make_the_others_small() -> None:
    columns = [Column(1, 1, {"forward": 60.0}), *(Column(step, step, {"forward": 1.0}) for step in range(2, 9))]
    chart = stacked_chart("time of a step (s)", columns, "s", {"forward": 1})
    heights = [end - top for _, top, _, end in drawn(chart, 1)]
    assert ">^ 60 s</text>" in chart and heights[1] >= heights[0] * 0.6


def test_a_part_has_the_same_color_in_all_charts_and_neighbors_differ_in_gray() -> None:
    assert part_colors(["other", "data", "mine"]) == {"data": 0, "other": 5, "mine": 0}
    assert [*part_colors([*PARTS, "not measured", "validation", "checkpoint"]).values()] == [*range(9)]
    for kinds in COLORS.values():
        shades = [lightness(color) for color in kinds["part"]]
        assert all(abs(one - other) >= 15 for one, other in pairwise(shades))


def lightness(color: str) -> float:
    """Return L* of CIELAB, from 0 (black) to 100 (white)."""
    channels = [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 116 * (0.2126 * red + 0.7152 * green + 0.0722 * blue) ** (1 / 3) - 16


def test_bars_have_the_scale_of_their_axis_and_a_limit() -> None:
    bars = [Bar("planned: 2 GiB", {"tensors": 2.0}), Bar("measured: 6 GiB", {"tensors": 6.0})]
    chart = bar_chart("peak memory of a rank (GiB)", bars, "GiB", {"tensors": 0}, limit=7.0)
    first, second = (
        (float(start), float(end)) for start, end in re.findall(r'part0" d="M([\d.]+) [\d.]+H([\d.]+)', chart)
    )
    ticks = {
        float(text): float(x) for x, text in re.findall(r'class="tick \w+" x="([\d.]+)" y="\d+">([\d.]+)</text>', chart)
    }
    assert first == (ticks[0], ticks[2]) and second == (ticks[0], ticks[6])
    (limit,) = re.findall(r'class="limit" d="M([\d.]+) ', chart)
    assert float(limit) == pytest.approx((ticks[6] + ticks[8]) / 2, abs=0.2) and "limit 7 GiB" in chart
    far = bar_chart("peak memory of a rank (GiB)", bars, "GiB", {"tensors": 0}, limit=70.0)
    assert 'class="limit"' not in far and "(the limit of 70 GiB is far to the right)" in far
    assert bar_chart("nothing (s)", [Bar("none", {})], "s", {}) == ""


def test_the_page_shows_memory_beside_the_limit(tmp_path: Path) -> None:
    report = {"memory/predicted_active_gib": 2.0, "memory/max_active_gib": 2.5, "memory/max_rss_gib": 9.0}
    gpu = {**report, "memory/max_reserved_gib": 3.0, "memory/limit_gib": 8.0}
    page = run_page(load_run(record(tmp_path / "gpu", {1: {"time/step_s": 1.0, **gpu}})))
    chart = page.partition("peak memory of a rank (GiB)")[2].partition("</figure>")[0]
    for text in (
        "tensors, predicted by the planner: 2.00 GiB",
        "tensors, measured: 2.50 GiB",
        "reserved by the CUDA allocator, measured: 3.00 GiB",
        "limit 8 GiB",
    ):
        assert text in chart
    assert "the process" not in chart  # its memory is not that of the GPU
    page = run_page(load_run(record(tmp_path / "cpu", {1: {"time/step_s": 1.0, **report}})))
    chart = page.partition("peak memory of a rank (GiB)")[2].partition("</figure>")[0]
    assert "the process, measured: 9.00 GiB" in chart and "limit" not in chart


def losses(values: Mapping[int, float], batch: int = 4) -> dict[int, dict[str, float]]:
    return {step: {"train/loss": value, "train/samples_seen": step * batch} for step, value in values.items()}


def test_differences_of_losses_are_those_of_the_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = record(tmp_path / "a", losses({1: 5.0, 2: 4.0, 4: 3.5, 6: math.nan, 8: 3.0}))
    b = record(tmp_path / "b", losses({1: 5.0, 2: 4.5, 4: 3.0, 6: 2.0, 8: 2.5, 10: 2.0}))
    c = record(tmp_path / "c", losses({2: 7.0, 3: 6.0}))
    assert main(["compare", str(a), str(b), str(c), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["loss_differences"]
    reference = {report["step"]: float(report["train/loss"]) for report in metrics(a)}
    of_b = {report["step"]: report["train/loss"] for report in metrics(b)}
    assert found["axis"] == "step"
    assert [step for step, _ in found["runs"]["b"]] == [1, 2, 4, 6, 8]  # the reference has no step 10
    for step, value in found["runs"]["b"]:
        assert float(value) == pytest.approx(of_b[step] - reference[step], nan_ok=True)
    assert found["runs"]["c"] == [[2, 3.0], [3, 6.0 - 3.75]]  # step 3 lies between steps 2 and 4


def test_runs_with_different_batches_are_compared_over_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sections = {"seq_len": 16, "steps": 8}
    a = record(tmp_path / "a", losses({2: 5.0, 4: 4.0, 6: 3.0, 8: 2.5}), training={**sections, "global_batch_size": 4})
    b = record(
        tmp_path / "b",
        losses({1: 5.5, 2: 4.5, 3: 3.5, 4: 2.0}, batch=8),
        training={**sections, "global_batch_size": 8},
    )
    assert main(["compare", str(a), str(b), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["loss_differences"] == {
        "axis": "tokens",
        "runs": {"b": [[128, 0.5], [256, 0.5], [384, 0.5], [512, -0.5]]},
    }
    assert data["figures"]["loss at 512 tokens"] == [2.5, 2.0]
    page = RunComparison([load_run(a), load_run(b)]).as_page()
    assert "differ in the tokens per step" in page and ">tokens</text>" in page


def test_a_difference_has_a_line_at_zero() -> None:
    chart = line_chart("difference of the training loss", {"b minus a": [(1.0, 0.5), (2.0, 1.0)]}, is_difference=True)
    (zero,) = re.findall(r'class="zero" d="M[\d.]+ ([\d.]+)H', chart)
    points, _ = re.findall(r'class="line line1 solid" d="M([^"]+)"', chart)  # the other is in the legend
    first, second = (float(point.split()[1]) for point in points.split("L"))
    assert float(zero) - first == pytest.approx((float(zero) - second) / 2, abs=0.2)
    assert "<title>step 2\nb minus a: 1</title>" in chart and "b minus a</span>" in chart


def test_a_difference_as_text_has_a_scale_and_a_line_at_zero() -> None:
    lines = text_chart({"B": [(1, 0.0), (40, 2.0)], "C": [(1, 0.0), (20, -2.0)]}, "step")
    assert re.fullmatch(r" +\+2 \| +B+", lines[0]) and len(lines[0]) == 76
    assert lines[4].startswith(f"{'0':>10} |C") and lines[4].endswith("-" * 50)
    assert lines[8].startswith(f"{'-2':>10} |") and lines[8].rstrip().endswith("C")
    assert lines[9].split() == ["step", "1", "40"] and len(lines) == 10
    below = text_chart({"C": [(1, -1.0), (40, -2.0)]}, "step")
    assert below[0] == f"{'0':>10} |{'-' * 64}" and below[4].startswith(f"{'':>10} |C") and below[8].endswith("C")
    assert text_chart({"B": [(1, math.nan)]}, "step") == []


def test_keys_that_change_the_result_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = losses({1: 2.0, 2: 1.0})
    a = record(tmp_path / "a", values, optimizer={"lr": 0.1})
    b = record(tmp_path / "b", values, comm={"count_traffic": True}, optimizer={"lr": 0.2})
    assert main(["compare", str(a), str(b), "--out", str(tmp_path / "x.html")]) == 0
    printed = capsys.readouterr().out
    keys = [line.split()[0] for line in printed.splitlines()[2:4]]
    assert printed.startswith("configuration: 2 different keys\n")
    assert keys == ["optimizer.lr", "comm.count_traffic"]
    assert "training loss of B minus that of A: 0 everywhere" in printed
    page = (tmp_path / "x.html").read_text()
    places = [page.index(text) for text in ("2 different keys", 'class="scroll marked"', *keys, "<h2>Loss", "<svg")]
    assert places == sorted(places)


def test_one_key_that_differs_is_named_beside_the_curves(tmp_path: Path) -> None:
    runs = [load_run(record(tmp_path / name, losses({1: 2.0, 2: lr}), optimizer={"lr": lr})) for name, lr in
            (("a", 0.1), ("b", 0.2))]  # fmt: skip
    page = RunComparison(runs).as_page()
    assert "b (optimizer.lr = 0.2)</span>" in page and "b minus a</span>" in page


def test_the_table_has_the_parts_in_the_order_of_the_chart(tmp_path: Path) -> None:
    run = load_run(record(tmp_path / "run", timed(range(1, 5))))
    assert [*time_parts(run)] == [*PARTS, "validation"]
