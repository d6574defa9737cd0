"""Weights & Biases in its offline mode, and MLflow with a database in a folder: what a person finds there later."""

from __future__ import annotations

import json
import logging
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.metrics.sinks import SinkContext

CONFIG = {"job": {"name": "tiny"}, "optimizer": {"lr": 0.5}}


def context(folder: Path, step: int = 0) -> SinkContext:
    return SinkContext("tiny", folder, "01234567", step, CONFIG)


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def records(folder: Path) -> Iterator[Any]:
    """Yield the records of all offline runs in a folder. A file has a header of 7 bytes, and blocks of 32 KiB with
    chunks: checksum (4 bytes), length (2), type (1; 1 or 4: the last chunk of a record), content."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        data, position, record = path.read_bytes(), 7, b""
        while position + 7 <= len(data):
            if 32768 - position % 32768 < 7:
                position += 32768 - position % 32768
            length, kind = struct.unpack_from("<HB", data, position + 4)
            record += data[position + 7 : position + 7 + length]
            position += 7 + length
            if kind in (1, 4):
                yield wandb_internal_pb2.Record.FromString(record)
                record = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """Return the reports that wandb recorded."""
    found = [record.history for record in records(folder) if record.WhichOneof("record_type") == "history"]
    items = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.item} for one in found]
    return [{key: value for key, value in one.items() if not key.startswith("_")} for one in items]


@pytest.mark.usefixtures("no_login")
def test_wandb_without_a_login_records_offline_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("wandb")
    from titan_launch.metrics.sinks.wandb import WandbSink

    caplog.set_level(logging.INFO, logger="titan_launch")
    sink = WandbSink(context(tmp_path))
    sink.write(10, {"train/loss": 5.25, "train/grad_norm": math.nan})
    sink.write(20, {"train/loss": math.inf})
    sink.close()
    (message,) = [message for message in caplog.messages if message.startswith("wandb: ")]
    assert "not logged in" in message and f"wandb sync {tmp_path}/wandb/offline-run-" in message
    first, second = history(tmp_path)
    assert (first["step"], first["train/loss"], second) == (10, 5.25, {"step": 20, "train/loss": math.inf})
    assert math.isnan(first["train/grad_norm"])
    (run,) = [record.run for record in records(tmp_path) if record.WhichOneof("record_type") == "run"]
    assert (run.run_id, run.display_name, run.project) == ("01234567", "tiny", "titan_launch")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert config["optimizer"] == {"lr": 0.5}


@pytest.fixture
def tracking_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    monkeypatch.chdir(tmp_path)  # MLflow stores artifacts in the working directory
    return uri


def mlflow_runs(uri: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("titan_launch")
    return list(client.search_runs([experiment.experiment_id]))


def test_mlflow_has_parameters_metrics_texts_and_one_run_after_a_resume(tmp_path: Path, tracking_uri: str) -> None:
    mlflow = pytest.importorskip("mlflow")
    from titan_launch.metrics.sinks.mlflow import MlflowSink

    first = MlflowSink(context(tmp_path))
    first.write(10, {"train/loss": 5.25, **{f"experts/unused/layers.{n}": 0.5 for n in range(1200)}})
    first.text("config", "the job")
    first.close(failed=True)
    assert [run.info.status for run in mlflow_runs(tracking_uri)] == ["FAILED"]
    resumed = MlflowSink(context(tmp_path, step=10))
    assert [run.info.status for run in mlflow_runs(tracking_uri)] == ["RUNNING"]
    resumed.write(20, {"train/loss": 4.5})
    resumed.close()
    (run,) = mlflow_runs(tracking_uri)
    assert (run.info.status, run.info.run_name) == ("FINISHED", "tiny")
    assert run.data.params == {"job.name": "tiny", "optimizer.lr": "0.5"}
    assert len(run.data.metrics) == 1201
    client = mlflow.MlflowClient(tracking_uri)
    assert [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "train/loss")] == [
        (10, 5.25),
        (20, 4.5),
    ]
    assert client.list_artifacts(run.info.run_id)[0].path == "config.md"


@pytest.mark.usefixtures("no_login")
def test_a_run_writes_the_same_losses_to_all_sinks(tmp_path: Path, tracking_uri: str) -> None:
    pytest.importorskip("wandb")
    mlflow = pytest.importorskip("mlflow")
    metrics = {"log_freq": 1, "enable_tensorboard": False, "sinks": ["wandb", "mlflow"]}
    run_ranks(run_job, 2, tiny_job(tmp_path, metrics=metrics))
    losses = [(report["step"], report["train/loss"]) for report in read_metrics(tmp_path)]
    assert [(one["step"], one["train/loss"]) for one in history(tmp_path / "tiny")] == losses
    (run,) = mlflow_runs(tracking_uri)
    in_mlflow = mlflow.MlflowClient(tracking_uri).get_metric_history(run.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in in_mlflow] == losses
    assert run.info.status == "FINISHED"
