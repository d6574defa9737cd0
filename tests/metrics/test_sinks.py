from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from titan_launch.metrics.sinks.jsonl import JsonlSink
from titan_launch.metrics.sinks.tensorboard import TensorBoardSink
from titan_launch.metrics.tags import TAGS, dashboard_layout


def read_events(folder: Path) -> EventAccumulator:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    events.Reload()
    return events


def scalar(events: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_tensorboard_holds_what_was_written_before_it_is_closed(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path / "tb")
    sink.write(1, {"train/loss": 2.5, "train/lr": 0.5})
    sink.write(2, {"train/loss": math.inf})
    sink.text("config", "seed = 1")
    events = read_events(tmp_path / "tb")
    assert scalar(events, "train/loss") == [(1, 2.5), (2, math.inf)]
    assert scalar(events, "train/lr") == [(1, 0.5)]
    assert events.Tensors("config/text_summary")[0].tensor_proto.string_val == [b"seed = 1"]
    sink.close()


@pytest.mark.parametrize("reported", [["train/loss"], ["train/loss", "experts/entropy/layers.0.moe"]])
def test_tensorboard_gets_the_dashboard_once(reported: list[str], tmp_path: Path) -> None:
    for resume_step in (0, 1):
        sink = TensorBoardSink(tmp_path / "tb", resume_step)
        sink.write(resume_step + 1, dict.fromkeys(reported, 1.0))
        sink.close()
    (event,) = read_events(tmp_path / "tb").Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(event.tensor_proto.string_val[0])
    charts = {
        group.title: {chart.title: list(chart.multiline.tag) for chart in group.chart} for group in layout.category
    }
    assert charts.keys() == dashboard_layout(reported).keys()
    names = [tag.name for tag in TAGS]
    for group, titles in dashboard_layout(reported).items():
        for title, expected in titles.items():
            shown = [name for name in names if any(re.match(pattern, name) for pattern in charts[group][title])]
            assert sorted(shown) == sorted(expected)


@pytest.mark.parametrize("resume_step", [0, 3])
def test_tensorboard_drops_the_steps_that_a_resumed_or_restarted_run_repeats(tmp_path: Path, resume_step: int) -> None:
    first = TensorBoardSink(tmp_path / "tb")
    for step in range(1, 6):
        first.write(step, {"train/loss": step})
    resumed = TensorBoardSink(tmp_path / "tb", resume_step)  # the first process was killed and did not close its sink
    resumed.write(resume_step + 1, {"train/loss": 40})
    events = read_events(tmp_path / "tb")
    kept = [(step, step) for step in range(1, resume_step + 1)]
    assert scalar(events, "train/loss") == [*kept, (resume_step + 1, 40)]
    first.close()
    resumed.close()


def read_lines(path: Path) -> list[dict[str, float | str]]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_jsonl_is_on_disk_at_once_and_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(10, {"train/loss": 5.25, "train/grad_norm": math.nan})
    sink.write(20, {"train/loss": math.inf, "train/loss_max": -math.inf})
    lines = read_lines(path)
    assert lines == [
        {"step": 10, "train/loss": 5.25, "train/grad_norm": "nan"},
        {"step": 20, "train/loss": "inf", "train/loss_max": "-inf"},
    ]
    assert math.isnan(float(lines[0]["train/grad_norm"]))
    sink.close()


def test_a_second_call_for_a_step_adds_to_its_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(1, {"train/loss": 2.0})
    for seconds in (0.123456789, 3.0, 123.25):
        sink.write(2, {"train/loss": 1.0, "time/checkpoint_s": seconds})
        lines = read_lines(path)
        assert lines == [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0, "time/checkpoint_s": seconds}]
    sink.write(3, {"train/loss": 0.5})
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3]
    sink.close()


@pytest.mark.parametrize(
    ("last_call", "kept"),
    [
        ("sink.write(2, {'time/checkpoint_s': 0.123456789})", [1, 2]),  # the line of step 2 grows
        ("sink.rewind(1)", [1]),  # the other file already has 100 bytes
    ],
)
def test_a_full_disk_leaves_whole_lines_in_order(tmp_path: Path, last_call: str, kept: list[int]) -> None:
    path = tmp_path / "metrics.jsonl"
    path.with_suffix(".rolled_back.jsonl").write_text(" " * 99 + "\n")
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (80, 80)); "
    ignore = "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    use = "from titan_launch.metrics.sinks.jsonl import JsonlSink; sink = JsonlSink(Path(sys.argv[1])); "
    writes = "sink.write(1, {'train/loss': 2.0}); sink.write(2, {'train/loss': 2.0}); "
    code = f"import sys; from pathlib import Path; {limit}{ignore}{use}{writes}{last_call}"
    result = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert "OSError: [Errno 27] File too large" in result.stderr
    assert read_lines(path) == [{"step": step, "train/loss": 2.0} for step in kept]


@pytest.mark.parametrize("torn", ["", '{"step": 7, "tra', '{"step": 7}', '{"step": 2, "train/loss": 1.0'])
def test_a_resumed_jsonl_drops_repeated_steps_and_a_torn_line(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 3, 6)) + torn)
    sink = JsonlSink(path, resume_step=3)
    sink.write(4, {"train/loss": 4.0})
    sink.close()
    assert [line["step"] for line in read_lines(path)] == [1, 2, 3, 3, 4]
    assert list(tmp_path.iterdir()) == [path]


def test_a_torn_line_alone_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "train/l')
    JsonlSink(path, resume_step=5).close()
    assert path.read_text() == '{"step": 1}\n'


def test_resuming_without_an_older_file_starts_one(tmp_path: Path) -> None:
    JsonlSink(tmp_path / "metrics.jsonl", resume_step=5).close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    tensorboard = TensorBoardSink(tmp_path / "tb", resume_step=5)
    tensorboard.write(6, {"train/loss": 1.0})
    tensorboard.close()
    assert read_events(tmp_path / "tb").Tensors("custom_scalars__config__")


def test_a_run_that_returns_before_its_first_report_has_a_dashboard(tmp_path: Path) -> None:
    tensorboard = TensorBoardSink(tmp_path)
    tensorboard.rewind(0)
    tensorboard.write(1, {"train/loss": 1.0})
    tensorboard.close()
    assert read_events(tmp_path).Tensors("custom_scalars__config__")


def test_a_run_that_returns_to_a_checkpoint_replaces_steps_and_keeps_the_old_lines(tmp_path: Path) -> None:
    jsonl, tensorboard = JsonlSink(tmp_path / "metrics.jsonl"), TensorBoardSink(tmp_path / "tb")
    for sink in (jsonl, tensorboard):
        for step in range(1, 6):
            sink.write(step, {"train/loss": step})
        sink.rewind(3)
        sink.write(4, {"train/loss": 40.0})
        sink.close()
    assert [json.loads(line)["train/loss"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2, 3, 40]
    rolled_back = tmp_path / "metrics.rolled_back.jsonl"
    assert [json.loads(line)["train/loss"] for line in rolled_back.open()] == [4, 5]
    assert scalar(read_events(tmp_path / "tb"), "train/loss") == [(1, 1), (2, 2), (3, 3), (4, 40)]
