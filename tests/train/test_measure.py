"""Traffic and memory measured by a run, compared with the plan."""

from __future__ import annotations

import json
import logging
import math
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import run_command, run_ranks
from tests.parallel.conv_model import ConvNet
from tests.sampling import rest_is_slow
from tests.tensors import assert_equal
from tests.train.jobs import read_metrics, record, run_job, run_measured, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.observer import WatchedStep
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.metrics.tags import STEP_PARTS
from titan_launch.metrics.timeline import Timeline
from titan_launch.models.decoder import mixture_of_experts
from titan_launch.models.decoder.mixture_of_experts import ExpertChoice
from titan_launch.plan.hardware import GIB, hardware_of
from titan_launch.plan.layout import plan_layout
from titan_launch.report.figures import time_parts
from titan_launch.report.recorded_run import load_run
from titan_launch.train import measure
from titan_launch.train.measure import MEASURED, PREDICTED, MemoryCheck, StepMeasurements

VALIDATION = {
    "freq": 2,
    "local_batch_size": 3,
    "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 7, "seed": 1},
}
SHARDED_OPTIMIZER = {"data_parallel_replicate_degree": 2, "shard_optimizer_over_replicas": True}
MODES: list[tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    (2, {}, {"mode": "deferred"}, {"mode": "full"}),
    (2, {}, {"mode": "immediate"}, {}),
    (4, {"data_parallel_replicate_degree": 2}, {"mode": "deferred_all_reduce"}, {"mode": "selective"}),
    (1, {}, {"mode": "immediate"}, {}),
    (2, SHARDED_OPTIMIZER, {"mode": "deferred"}, {}),
    (2, {}, {"mode": "deferred", "keep_params_unsharded": True}, {}),
    (4, SHARDED_OPTIMIZER, {"mode": "immediate"}, {}),
]


@pytest.mark.parametrize(("ranks", "parallelism", "accumulation", "checkpointing"), rest_is_slow(MODES, 4))
def test_measured_traffic_and_memory_of_a_run_are_the_planned_ones(
    tmp_path: Path, ranks: int, parallelism: dict[str, Any], accumulation: dict[str, Any], checkpointing: dict[str, Any]
) -> None:
    job = tiny_job(
        tmp_path,
        training={"global_batch_size": 8},
        precision={"param_dtype": "bfloat16", "rules": [{"type": "RMSNorm", "param_dtype": "float32"}]},
        parallelism=parallelism,
        gradient_accumulation=accumulation,
        activation_checkpoint=checkpointing,
        comm={"count_traffic": True},
        debug={"audit_precision": True},
        ema={"decay": 0.9},
        validation=VALIDATION,
    )
    _, planned = record(job, ranks)
    reports = run_measured(job, ranks, 0.02)
    assert len(reports) == 4
    for report in reports:
        assert report["comm/collectives"] == planned.collectives.total
        assert report["comm/all_gather_gib"] * GIB == planned.all_gather_bytes
        assert report["comm/reduce_scatter_gib"] * GIB == planned.reduce_scatter_bytes
        assert report["comm/all_reduce_gib"] * GIB == planned.all_reduce_bytes
    assert [MEASURED in report for report in reports] == [False, False, True, False]
    assert reports[2][MEASURED] == pytest.approx(reports[2][PREDICTED], rel=0.02)


MIXTURE: dict[str, Any] = {
    "model": {
        "name": "qwen3_moe",
        "args": {"head_dim": 8, "experts": {"num_experts": 8, "top_k": 2, "hidden_dim": 64}},
    },
    "training": {"seq_len": 128, "local_batch_size": 2, "global_batch_size": 8},
    "comm": {"count_traffic": True},
}


def train_with_equal_choices(job: dict[str, Any]) -> dict[str, Tensor]:
    """Train a mixture whose tokens choose all experts equally often."""
    choose = mixture_of_experts.choose

    def choose_in_turn(logits: Tensor, *args: Any) -> ExpertChoice:
        choice = choose(logits, *args)
        in_turn = torch.arange(choice.experts.numel()).view_as(choice.experts) % logits.shape[-1]
        return choice._replace(experts=in_turn, weights=choice.scores.gather(-1, in_turn))

    mixture_of_experts.choose = choose_in_turn  # the rank ends with the test
    return run_job(job)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "degree"), [(2, 2), (2, 1), (4, 2)])
def test_measured_traffic_and_memory_of_a_mixture_are_the_planned_ones(tmp_path: Path, ranks: int, degree: int) -> None:
    """With expert parallelism the choices are equal, because memory depends on them. Otherwise they are the router's:
    a rank computes all its rows, whichever experts they choose."""
    job = tiny_job(tmp_path, parallelism={"expert_parallel_degree": degree}, **MIXTURE)
    _, planned = record(job, ranks)
    report = run_measured(job, ranks, 0.01, run_job if degree == 1 else train_with_equal_choices)[2]
    assert report["comm/collectives"] == planned.collectives.total
    assert report["comm/all_gather_gib"] * GIB == planned.all_gather_bytes
    assert report[MEASURED] == pytest.approx(report[PREDICTED], rel=0.01)


@pytest.mark.parametrize("compute", rest_is_slow(["bfloat16", "float32"]))
def test_measured_memory_of_the_z_loss_is_the_planned_one(tmp_path: Path, compute: str) -> None:
    """Almost all of the memory is that of the logits."""
    args = {"args": {"vocab_size": 2000, "n_layers": 1}}
    sizes = {"seq_len": 128, "local_batch_size": 2}
    precision = {"param_dtype": compute}
    job = tiny_job(tmp_path, model=args, training=sizes, loss={"z_loss": 1e-4}, precision=precision)
    record(job, 1)
    run_ranks(run_job, 1, job)
    report = read_metrics(tmp_path)[2]
    assert report[MEASURED] == pytest.approx(report[PREDICTED], rel=0.01)
    assert report[MEASURED] * GIB > 20 * 256 * 2000


FINE_TUNED: dict[str, dict[str, Any]] = {
    "frozen": {
        "training": {"trainable": ["layers.1.**", "norm.*", "output.*"]},
        "precision": {"param_dtype": "bfloat16", "frozen_storage_dtype": "bfloat16"},
    },
    "frozen, deferred": {
        "training": {"frozen": ["tok_embeddings.*", "layers.0.**"]},
        "gradient_accumulation": {"mode": "deferred"},
        "activation_checkpoint": {"mode": "full"},
    },
    "LoRA": {"lora": {"targets": ["layers.*.attention.*", "layers.*.feed_forward.*"], "rank": 4}},
    "LoRA in fp32, deferred": {
        "lora": {"targets": ["layers.**", "output"], "rank": 8},
        "precision": {
            "param_dtype": "bfloat16",
            "frozen_storage_dtype": "bfloat16",
            "rules": [{"type": "LoRA", "param_dtype": "float32"}],
        },
        "gradient_accumulation": {"mode": "deferred"},
    },
}


@pytest.mark.parametrize(
    ("name", "ranks"),
    rest_is_slow(
        [
            ("LoRA in fp32, deferred", 2),
            ("frozen", 2),
            ("LoRA", 1),
            ("frozen, deferred", 2),
        ],
        4,
    ),
)
def test_measured_memory_of_fine_tuning_is_the_planned_one(name: str, ranks: int, tmp_path: Path) -> None:
    sections = FINE_TUNED[name]
    sizes = {"seq_len": 128, "local_batch_size": 2, "global_batch_size": 8, **sections.get("training", {})}
    job = tiny_job(tmp_path, **{**sections, "training": sizes})
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = ["plan", "--config", "job.json", "--world-size", str(ranks), "--rows", "own", "--json"]
    status, printed, reported = run_command(command, tmp_path)
    assert status == 0, reported
    (row,) = json.loads(printed)["rows"]
    planned = row["active_bytes"] / GIB
    measured = run_measured(job, ranks, 0.01, planned=planned)[2][MEASURED]
    assert measured == pytest.approx(planned, rel=0.01)


def train_unwatched(job: dict[str, Any]) -> dict[str, Tensor]:
    measure.STEADY_STEP = 1000  # the rank ends with the test
    return run_job(job)


def test_measuring_changes_no_bit(tmp_path: Path) -> None:
    plain = run_ranks(train_unwatched, 2, tiny_job(tmp_path / "plain", training={"steps": 3}))
    watched = tiny_job(tmp_path / "watched", training={"steps": 3}, comm={"count_traffic": True})
    assert_equal(run_ranks(run_job, 2, watched)[0], plain[0])
    assert MEASURED in read_metrics(tmp_path / "watched")[2]


def test_pauses_of_a_run_are_reported_and_the_parts_of_a_step_add_up(tmp_path: Path) -> None:
    """The run validates and saves after its last step alone."""
    job = tiny_job(tmp_path, training={"steps": 4}, validation={**VALIDATION, "freq": 4}, checkpoint={"enable": True})
    start = time.perf_counter()
    run_ranks(run_job, 2, job)
    elapsed = time.perf_counter() - start
    reports = read_metrics(tmp_path)
    assert [report["step"] for report in reports] == [1, 2, 3, 4]
    for pause in ("validation", "checkpoint"):
        spent = [report[f"time/{pause}_s"] for report in reports]
        assert spent[:3] == [0, 0, 0]
        assert 0 < spent[3] < elapsed
    for report in reports:
        parts = {name: report[f"time/{name}_s"] for name in (*STEP_PARTS, "other")}
        assert sum(parts.values()) == pytest.approx(report["time/step_s"])
        assert min(parts.values()) > 0
    shown = time_parts(load_run(tmp_path / "tiny"))
    assert shown["validation"] == pytest.approx(reports[3]["time/validation_s"] / 4)
    assert shown["checkpoint"] == pytest.approx(reports[3]["time/checkpoint_s"] / 4)


def checked(config: dict[str, Any], factor: float) -> list[str]:
    """Return the log lines of a run that measures `factor` times the predicted value."""
    job = JobConfig.model_validate(config)
    layout = plan_layout(job.parallelism, job.training, 1)
    with ExitStack() as stack, Log() as log:
        check = MemoryCheck(job, layout, hardware_of(job, 1, "cpu"), stack)
        predicted = check.scalars(None)[PREDICTED]
        for _ in range(2):
            assert check.scalars(predicted * factor) == {PREDICTED: predicted}
        return log.warnings


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())

    def __enter__(self) -> Log:
        logging.getLogger("titan_launch").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("titan_launch").removeHandler(self)


@pytest.mark.parametrize(("factor", "warns"), [(1.0, False), (1.05, False), (0.95, False), (1.2, True), (0.8, True)])
def test_a_peak_memory_that_differs_from_the_plan_by_more_than_10_percent_is_logged_once(
    tmp_path: Path, factor: float, warns: bool
) -> None:
    job = tiny_job(tmp_path)
    record(job, 1)
    warnings = checked(job, factor)
    assert len(warnings) == warns
    for warning in warnings:
        assert "the planner predicted a peak of" in warning and "microbatch" in warning
        assert warning.count("MiB") == 2


def test_windows_without_validation_or_checkpoint_are_steady_after_the_first() -> None:
    """The first window includes allocations of the first step. Others may include the memory of a validation or a
    checkpoint."""
    device = torch.device("cuda")  # whose memory is not measured in single steps
    step: Any = SimpleNamespace(device=device, loss=CrossEntropy())
    with ExitStack() as stack:
        job = JobConfig.model_validate({"model": {"name": "llama3"}})
        measurements = StepMeasurements(job, step, Timeline(torch.device("cpu")), None, stack)
        measurements.before_step(WatchedStep(5, is_reported=False, microbatches=()))
        steady = [measurements.is_steady]
        for last, only_training in ((6, True), (8, False), (10, True)):
            measurements.end_window(last, only_training)
            steady.append(measurements.is_steady)
    assert steady == [False, True, False, True]


def test_a_rank_that_writes_a_profile_reports_the_same_tags_as_the_others() -> None:
    step: Any = SimpleNamespace(device=torch.device("cuda"), loss=CrossEntropy())
    timeline = Timeline(torch.device("cpu"))
    timeline.is_profiled = True
    with ExitStack() as stack:
        job = JobConfig.model_validate({"model": {"name": "llama3"}, "comm": {"profile_freq": 5}})
        measurements = StepMeasurements(job, step, timeline, None, stack)
        measurements.before_step(WatchedStep(5, is_reported=False, microbatches=()))
    assert measurements.take_metrics() == {"comm/exposed_s": -math.inf}


def test_a_job_on_gpus_is_recorded_in_the_background(tmp_path: Path) -> None:
    job = JobConfig.model_validate(
        {
            "job": {"device": "cpu"},
            "model": {"name": f"{__name__}:talks"},
            "training": {"seq_len": 16, "local_batch_size": 2},
            "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 40},
        }
    )
    layout = plan_layout(job.parallelism, job.training, 2)
    with ExitStack() as stack:
        check = MemoryCheck(job, layout, hardware_of(job, 2, "cuda"), stack)
        assert check.scalars(None) == {}
        assert check._trace is not None
        check._trace._process.wait(timeout=120)
        predicted = check.scalars(None)
        assert predicted[PREDICTED] > 0
    with ExitStack() as stack:  # the next run finds the recording
        check = MemoryCheck(job, layout, hardware_of(job, 2, "cuda"), stack)
        assert check._trace is None and check.scalars(None) == predicted
    longer = job.model_copy(update={"training": job.training.model_copy(update={"seq_len": 32})})
    with ExitStack() as stack:
        check = MemoryCheck(longer, layout, hardware_of(job, 2, "cuda"), stack)
        assert check._trace is not None
        process = check._trace._process
    assert process.poll() is not None  # the trace process does not outlive the run


def test_nothing_is_recorded_during_a_run_on_cpus(tmp_path: Path) -> None:
    job = JobConfig.model_validate(tiny_job(tmp_path, training={"seq_len": 12}))
    with ExitStack() as stack:
        check = MemoryCheck(job, plan_layout(job.parallelism, job.training, 1), hardware_of(job, 1, "cpu"), stack)
        assert check._trace is None and check.scalars(None) == {}


def talks() -> torch.nn.Module:
    print("{\nhere I am")
    return ConvNet()


@pytest.mark.slow
def test_a_model_that_cannot_be_traced_still_trains(caplog: pytest.LogCaptureFixture) -> None:
    job = JobConfig.model_validate({"job": {"device": "cpu"}, "model": {"name": f"{__name__}:fails"}})
    layout = plan_layout(job.parallelism, job.training, 1)
    with ExitStack() as stack, caplog.at_level(logging.INFO, "titan_launch"):
        check = MemoryCheck(job, layout, hardware_of(job, 1, "cuda"), stack)
        assert check._trace is not None
        check._trace._process.wait(timeout=120)
        assert check.scalars(None) == {}
        assert check.scalars(1.0) == {}
    assert "memory is not predicted" in caplog.text


def fails() -> torch.nn.Module:
    raise ValueError("not on a Saturday")
