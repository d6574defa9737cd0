"""A run with known step times, tokens and memory: the figures that every sink then has."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.metrics.sinks.test_services import context, history, mlflow_runs
from tests.metrics.test_meter import CPU, Clock, train
from tests.train.jobs import read_metrics
from titan_launch.config.sections.run import MetricsConfig
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.sinks import Sink, SinkContext, open_sinks
from titan_launch.metrics.sinks.console import ConsoleSink
from titan_launch.metrics.timeline import Timeline

Reports = list[dict[str, float]]

WINDOWS = [
    {"steps": 1, "tokens": 400, "loss": 5.0},
    {"steps": 10, "tokens": 3000, "loss": 3.5},
    {"steps": 10, "tokens": 2000, "loss": 1.25},
]
"""Steps between two reports, and valid targets and loss of each. A step takes 2 s."""

DATA, BACKWARD, COMMUNICATION, OTHER = 0.5, 0.25, 0.25, 1.0
"""Seconds of a step, from `train`."""

EXPECTED = [
    {
        "step": step,
        "train/loss": loss,
        "train/loss_max": loss,
        "train/grad_norm": 0.5,
        "time/step_s": 2.0,
        "time/data_s": DATA,
        "time/forward_s": 0.0,
        "time/backward_s": BACKWARD,
        "time/communication_s": COMMUNICATION,
        "time/optimizer_s": 0.0,
        "time/other_s": OTHER,
        "time/validation_s": validation,
        "time/checkpoint_s": 0.0,
        "throughput/tokens_per_second": tokens / 2,
        "throughput/tokens_per_second_per_device": tokens / 2,
        "throughput/tflops_per_device": 2.0,
        "throughput/mfu_percent": 20.0,
        "memory/max_reserved_gib": gib,
    }
    for step, tokens, loss, gib, validation in [
        (1, 400, 5.0, 1.5, 0.0),
        (11, 3000, 3.5, 2.5, 0.0),
        (21, 2000, 1.25, 2.5, 3.0),
    ]
]

CONSOLE = """\
step  1/21  loss   5.0000  grad norm    0.500          200 tok/s  {speed}  reserved memory   1.50 GiB
step 11/21  loss   3.5000  grad norm    0.500        1,500 tok/s  {speed}  reserved memory   2.50 GiB
step 21/21  loss   1.2500  grad norm    0.500        1,000 tok/s  {speed}  reserved memory   2.50 GiB
""".format(speed="MFU  20.0 %     2.000 s/step")


class Kept(Sink):
    """The sink of a user, which writes numbers as Python shows them."""

    def __init__(self, run: SinkContext):
        self._file = (run.folder / "kept.txt").open("w")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        self._file.write(f"{ {'step': step, **scalars} }\n")

    def close(self, failed: bool = False) -> None:
        self._file.close()


def scripted(folder: Path, sinks: list[str], console: io.StringIO) -> None:
    """Report the windows to all sinks. A validation of 30 s precedes the last report."""
    config = MetricsConfig(sinks=sinks)
    opened = [sink for _, sink in open_sinks(config, context(folder))]
    opened.append(ConsoleSink(21, stream=console))
    clock, step = Clock(), 0
    meter = Meter(timeline=Timeline(CPU, clock), world_size=1, flops_per_step_per_device=4e12, peak_flops=10e12)
    for window, memory in zip(WINDOWS, (1.5, 2.5, 2.5), strict=True):
        train(meter, clock, **window)
        step += window["steps"]
        if step == 21:
            with meter.paused("validation"):
                clock.advance(30)
        scalars = meter.report({"memory/max_reserved_gib": memory})
        del scalars["memory/max_rss_gib"]  # of the process of the test
        scalars |= meter.pauses()
        for sink in opened:
            sink.write(step, scalars)
    for sink in opened:
        sink.close()


def of_tensorboard(folder: Path) -> Reports:
    events = EventAccumulator(str(folder / "tb"), size_guidance={"scalars": 0}).Reload()
    reports: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        if tag.startswith("Overview/"):  # the same figures again
            continue
        for event in events.Scalars(tag):
            reports.setdefault(event.step, {"step": event.step})[tag] = event.value
    return list(reports.values())


def of_mlflow(folder: Path) -> Reports:
    from mlflow import MlflowClient

    uri = f"sqlite:///{folder}/mlflow.db"
    (run,) = mlflow_runs(uri)
    reports: dict[int, dict[str, float]] = {}
    for tag in run.data.metrics:
        for metric in MlflowClient(uri).get_metric_history(run.info.run_id, tag):
            reports.setdefault(metric.step, {"step": metric.step})[tag] = metric.value
    return list(reports.values())


def of_kept(folder: Path) -> Reports:
    return [eval(line) for line in (folder / "kept.txt").read_text().splitlines()]


READERS: dict[str, Callable[[Path], Reports]] = {
    "metrics.jsonl": lambda folder: read_metrics(folder.parent),
    "TensorBoard": of_tensorboard,
    "a sink of a user": of_kept,
    "wandb": history,
    "mlflow": of_mlflow,
}


@pytest.fixture(scope="module")
def installed() -> list[str]:
    return [name for name in ("wandb", "mlflow") if find_spec(name)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, installed: list[str]) -> tuple[Path, str]:
    """Return the run folder, and what the console showed."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    folder.mkdir()
    console = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME"):
            patch.delenv(name, raising=False)
        patch.setenv("NETRC", str(folder / "netrc"))
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        scripted(folder, [*installed, f"{__name__}:Kept"], console)
    return folder, console.getvalue()


@pytest.mark.parametrize("name", READERS)
def test_a_sink_has_exactly_the_figures_of_the_script(
    name: str, recorded: tuple[Path, str], installed: list[str]
) -> None:
    if name in ("wandb", "mlflow") and name not in installed:
        pytest.skip(f"needs the package {name}")
    assert READERS[name](recorded[0]) == EXPECTED


def test_the_console_shows_the_figures_of_the_script(recorded: tuple[Path, str]) -> None:
    assert recorded[1] == CONSOLE
