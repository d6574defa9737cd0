"""The events that a run writes, read by TensorBoard's own reader."""

from __future__ import annotations

import errno
import itertools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote
from urllib.request import Request, urlopen

import pytest
from tensorboard import program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, record, run_job, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.files import RecordFile
from titan_launch.metrics.sinks.interface import RunDescription
from titan_launch.metrics.sinks.tensorboard import _OVERVIEW, TensorBoardSink
from titan_launch.metrics.tags import TAGS, tag_of
from titan_launch.train.output import settings_of

T = TypeVar("T")

SOURCES = [{"kind": "synthetic", "name": name, "vocab_size": 61, "num_samples": 7, "noise": 0.5} for name in "ab"]
HELD_OUT = {"kind": "mixture", "sources": [source | {"seed": 1} for source in SOURCES]}
VALIDATION = {"freq": 2, "patience": 9, "data": HELD_OUT}
METRICS = {"enable_tensorboard": True, "peak_tflops_per_device": 0.5, "log_freq": 1, "modules": ["layers.*"]}


def job(folder: Path, steps: int) -> dict[str, dict[str, object]]:
    job = tiny_job(
        folder,
        model={"args": {"norm": "batchnorm"}},
        validation=VALIDATION,
        metrics=METRICS,
        checkpoint={"enable": True, "interval": 2, "keep_best": 1},
        comm={"count_traffic": True},
        planner={"memory_gib": 3.0},
        training={"steps": steps},
        ema={"decay": 0.9},
        loss={"z_loss": 1e-3},
        optimizer={"param_groups": [{"match": "output.*", "lr_factor": 0.5}]},
    )
    return {**job, "data": {"kind": "mixture", "sources": SOURCES}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run of two ranks that stopped at step 2 and resumed to step 4."""
    folder = tmp_path_factory.mktemp("runs")
    record(job(folder, 2), 2)
    run_ranks(run_job, 2, job(folder, 2))
    run_ranks(run_job, 2, job(folder, 4))
    return folder


@pytest.fixture(scope="module")
def events(folder: Path) -> EventAccumulator:
    accumulator = EventAccumulator(str(folder / "tiny" / "tb"), size_guidance={"scalars": 0, "tensors": 0})
    return accumulator.Reload()


CUDA_ONLY = {"memory/max_reserved_gib", "memory/alloc_retries", "memory/ooms", "comm/exposed_s"}
OF_THE_THIRD_STEP = {"memory/max_active_gib"}  # on a CPU from a process's third step on; these have two steps each
OF_IMAGES = {"throughput/images_per_second", "throughput/images_per_second_per_device"}
OF_COMPILED = {"time/compile_s"}
OF_EXPERTS = {tag.name for tag in TAGS if tag.name.startswith("experts/")}  # see tests/parallel/test_expert_balance.py
OF_LOSSES = {
    tag.name for tag in TAGS if tag.name.startswith(("preference/", "distillation/"))
}  # tests/loss/test_losses.py
NOT_WRITTEN = CUDA_ONLY | OF_IMAGES | OF_THE_THIRD_STEP | OF_COMPILED | OF_EXPERTS | OF_LOSSES
PARTS = {"<source>": "b", "<module>": "layers.1", "<group>": "param_groups.0, weight decay 0.1"}
ON_CPU = [re.sub("<.*>", lambda m: PARTS[m[0]], tag.name) for tag in TAGS if tag.name not in NOT_WRITTEN]


@pytest.mark.parametrize("tag", ON_CPU)
def test_a_run_writes_every_tag(events: EventAccumulator, folder: Path, tag: str) -> None:
    scalars = events.Scalars(tag)
    expected = [2, 4] if tag.startswith(("validation/", "batchnorm/")) else [1, 2, 3, 4]
    steps, last = [event.step for event in scalars], {event.step: event.value for event in scalars}
    if tag == "time/checkpoint_s":  # the last report of each start is complete only after its checkpoint
        assert steps == [1, 2, 2, 3, 4, 4]
        steps = [*last]
    assert steps == expected  # a resumed run continues the same folder, without repeats
    in_file = {report["step"]: report[tag] for report in read_metrics(folder) if tag in report}
    assert [*last.values()] == pytest.approx([in_file[step] for step in expected], rel=1e-6)


def test_every_metric_of_a_run_has_a_tag(folder: Path) -> None:
    written = {name for report in read_metrics(folder) for name in report}
    assert {name for name in written if tag_of(name) is None} == {"step"}


def test_a_run_writes_its_config_and_a_dashboard(events: EventAccumulator) -> None:
    assert b'"tiny"' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"FSDP2 units" in events.Tensors("units/text_summary")[0].tensor_proto.string_val[0]
    assert events.Tensors("custom_scalars__config__")


def test_the_overview_has_the_values_of_its_metrics(events: EventAccumulator) -> None:
    shown = {tag for tag in events.Tags()["scalars"] if tag.startswith("Overview/")}
    assert sorted(events.Tags()["scalars"])[: len(shown)] == sorted(shown)  # "HParams" shows the first by name
    of_metric = {tag: name for tag, name in _OVERVIEW.items() if name in shown}
    assert of_metric.keys() == _OVERVIEW.keys() - OF_IMAGES - OF_THE_THIRD_STEP
    for tag, name in of_metric.items():
        assert [(e.step, e.value) for e in events.Scalars(name)] == [(e.step, e.value) for e in events.Scalars(tag)]


def test_a_clock_that_was_set_back_does_not_change_the_order_of_files(tmp_path: Path) -> None:
    earlier = tmp_path / f"events.out.tfevents.{int(time.time()) + 1000}.host.1.0"
    earlier.touch()
    sink = TensorBoardSink(tmp_path, resume_step=2)
    for step in (3, 2):
        sink.write(step, {"train/loss": 1.0})
        sink.rewind(1)
    assert [path == earlier for path in sorted(tmp_path.iterdir())] == [True, False, False]


@pytest.mark.parametrize("full_at", range(6))
def test_a_full_disk_neither_loses_nor_repeats_what_opens_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full_at: int
) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.describe(RunDescription({"lr": 0.1}, frozenset()))
    sink.text("config", "a")
    sink.text("units", "b")
    append, calls = RecordFile.append, itertools.count()

    def append_if_room(file: RecordFile, data: bytes) -> None:
        if next(calls) == full_at:
            raise OSError(errno.ENOSPC, "full")
        append(file, data)

    monkeypatch.setattr(RecordFile, "append", append_if_room)
    with pytest.raises(OSError, match="full"):
        sink.write(1, {"train/loss": 1.0})
    sink.write(2, {"train/loss": 1.0})
    (file,) = tmp_path.iterdir()
    tags = [value.tag for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    texts = ["config/text_summary", "units/text_summary"]
    assert tags == ["custom_scalars__config__", "_hparams_/session_start_info", *texts, "train/loss", "Overview/loss"]


def test_the_memory_limit_is_that_of_the_planner(events: EventAccumulator) -> None:
    assert {event.value for event in events.Scalars("memory/limit_gib")} == {3.0}


def answer(url: str, **question: Any) -> Any:
    """Return the answer of a server to a question, which is sent as JSON if there is one."""
    data = json.dumps(question).encode() if question else None
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=60) as response:
        return json.load(response)


def served(folder: Path) -> str:
    """Return the address of a TensorBoard of a folder."""
    server = program.TensorBoard()
    server.configure(("tensorboard", "--logdir", str(folder), "--port", "0", "--load_fast", "false"))
    return str(server.launch())


def when_read(ask: Callable[[], T]) -> T:
    """Return the first answer that is not empty. A server reads the files in a thread."""
    deadline = time.monotonic() + 60
    while not (found := ask()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def test_the_tab_hparams_shows_the_keys_that_differ_and_the_last_metrics(tmp_path: Path) -> None:
    """The first job leaves defaults where the others set keys, because that is how people compare."""
    runs: dict[str, dict[str, dict[str, object]]] = {
        "base": {"optimizer": {"lr": 0.01}},
        "other": {
            "optimizer": {"lr": 0.02, "weight_decay": 0.1, "param_groups": [{"match": "output.*", "lr_factor": 0.5}]},
            "precision": {"param_dtype": "float32", "rules": [{"type": "RMSNorm", "param_dtype": "float32"}]},
            "compile": {"enable": True},
            "lora": {"targets": ["layers.*.attention.wq"], "rank": 4},
            "checkpoint": {"keep_latest": 3},
            "metrics": {"log_freq": 3},
        },
    }
    for name, sections in runs.items():
        job = JobConfig.model_validate(tiny_job(tmp_path, **{"precision": {"param_dtype": "bfloat16"}, **sections}))
        sink = TensorBoardSink(tmp_path / name)
        sink.describe(RunDescription(settings_of(job), frozenset()))
        for step in (1, 2):
            sink.write(step, {"activations/rms/x": 1.0, "train/loss": 3.0 - step, "time/step_s": 0.5})
        sink.close()
    plugin = f"{served(tmp_path)}data/plugin/hparams"
    allowed = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]
    question = {"experimentName": "x", "allowedStatuses": allowed, "colParams": [], "startIndex": 0, "sliceSize": 9}
    groups = when_read(
        lambda: found if len(found := answer(f"{plugin}/session_groups", **question)["sessionGroups"]) == 2 else None
    )
    assert groups is not None
    experiment = answer(f"{plugin}/experiment", experimentName="x", hparamsLimit=1000)
    columns = [(column["name"], column["type"]) for column in experiment["hparamInfos"] if column["differs"]]
    assert columns == [
        ("checkpoint.keep_latest", "DATA_TYPE_FLOAT64"),
        ("compile.enable", "DATA_TYPE_STRING"),
        ("lora.rank", "DATA_TYPE_FLOAT64"),
        ("lora.targets", "DATA_TYPE_STRING"),
        ("optimizer.lr", "DATA_TYPE_FLOAT64"),
        ("optimizer.param_groups", "DATA_TYPE_STRING"),
        ("optimizer.weight_decay", "DATA_TYPE_STRING"),  # a number in one run, unset in the other
        ("precision.param_dtype", "DATA_TYPE_STRING"),
        ("precision.rules", "DATA_TYPE_STRING"),
    ]
    assert [column["differs"] for column in experiment["hparamInfos"]][: len(columns) + 1] == [*[True] * 9, False]
    cells = {group["name"]: group["hparams"] for group in groups}
    assert [cells[name]["optimizer.lr"] for name in runs] == [0.01, 0.02]
    assert [cells[name]["compile.enable"] for name in runs] == ["false", "true"]
    assert [cells[name]["lora.targets"] for name in runs] == ["[]", '["layers.*.attention.wq"]']
    assert cells["base"]["optimizer.weight_decay"] == "unset"
    metrics = [column["name"]["tag"] for column in experiment["metricInfos"]]
    assert metrics[:3] == ["Overview/loss", "Overview/seconds per step", "activations/rms/x"]
    for group in groups:
        values = {value["name"]["tag"]: value["value"] for value in group["metricValues"]}
        assert values["Overview/loss"] == values["train/loss"] == 1.0


def test_two_long_values_that_differ_are_two_settings() -> None:
    jobs = [
        JobConfig.model_validate({"training": {"frozen": ["a" * 300 + end]}, "model": {"args": {"dim": 64}}})
        for end in ("", "b")
    ]
    first, second = (settings_of(job)["training.frozen"] for job in jobs)
    assert first != second and len(str(first)) <= 100
    assert settings_of(jobs[0])["model.args"] == "{dim = 64}"


def test_the_real_server_has_data_for_every_chart(events: EventAccumulator, folder: Path) -> None:
    plugin = f"{served(folder / 'tiny')}data/plugin/custom_scalars"
    layout = when_read(lambda: answer(f"{plugin}/layout"))
    charts = {
        (page["title"], chart["title"]): chart["multiline"]["tag"]
        for page in layout["category"]
        for chart in page["chart"]
    }
    assert {page for page, _ in charts} >= {"Learning", "Speed", "Memory", "Precision", "Data", "Health"}

    def has_data(tag: str) -> bool:
        return bool(answer(f"{plugin}/scalars?run=tb&tag={quote(tag)}")["tag_to_events"])

    assert [chart for chart, tags in charts.items() if not any(map(has_data, tags))] == []
