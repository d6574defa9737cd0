"""The events that a run writes, read by TensorBoard's own reader."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import pytest
from tensorboard import program
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.metrics.tags import TAGS

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
OF_LOSSES = {tag.name for tag in TAGS if tag.name.startswith(("dpo/", "distillation/"))}  # tests/train/test_losses.py
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


def test_a_run_writes_its_config_and_a_dashboard(events: EventAccumulator) -> None:
    assert b'"tiny"' in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"FSDP2 units" in events.Tensors("units/text_summary")[0].tensor_proto.string_val[0]
    assert events.Tensors("custom_scalars__config__")
    assert {
        "_hparams_/experiment",
        "_hparams_/session_start_info",
    } <= events.summary_metadata.keys()


def answer(url: str) -> Any:
    with urlopen(url, timeout=20) as response:
        return json.load(response)


def test_the_real_server_has_data_for_every_chart(events: EventAccumulator, folder: Path) -> None:
    server = program.TensorBoard()
    server.configure(("tensorboard", "--logdir", str(folder / "tiny"), "--port", "0", "--load_fast", "false"))
    plugin = f"{server.launch()}data/plugin/custom_scalars"
    deadline = time.monotonic() + 60
    while not (layout := answer(f"{plugin}/layout")) and time.monotonic() < deadline:
        time.sleep(0.2)  # the server reads the files in a thread
    charts = {
        (page["title"], chart["title"]): chart["multiline"]["tag"]
        for page in layout["category"]
        for chart in page["chart"]
    }
    assert {page for page, _ in charts} >= {"Learning", "Speed", "Memory", "Precision", "Data", "Health"}

    def has_data(tag: str) -> bool:
        return bool(answer(f"{plugin}/scalars?run=tb&tag={quote(tag)}")["tag_to_events"])

    assert [chart for chart, tags in charts.items() if not any(map(has_data, tags))] == []
