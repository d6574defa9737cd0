"""The parts of a run, and functions that build its meter and sinks and log its start."""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.checkpoint.manager import CheckpointManager
from titan_launch.checkpoint.state import Progress, TrainingState
from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.sections.base import Section
from titan_launch.config.sections.training import TrainingConfig
from titan_launch.core.errors import format_key
from titan_launch.data.order import Order
from titan_launch.distributed.collectives import on_rank_0
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.process_group import Ranks
from titan_launch.metrics.learned import Learned
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.sinks import ConsoleSink, GuardedSink, RunDescription, Sink, SinkContext, open_sinks
from titan_launch.metrics.tags import BEST_LOSS, WITHOUT_IMPROVEMENT
from titan_launch.metrics.timeline import Timeline
from titan_launch.optim.ema import WeightEMA
from titan_launch.parallel.fsdp import Unfreezing
from titan_launch.plan.hardware import GIB, Hardware, find_device
from titan_launch.plan.layout import Layout
from titan_launch.plan.proof.certificate import Certificate
from titan_launch.plan.proof.store import describe
from titan_launch.plan.report.table import format_gib
from titan_launch.plan.report.unit_table import KeyLocator, format_lines, format_plan, summary_of_job
from titan_launch.plan.types import ModelPlan
from titan_launch.plan.units.rule_assignment import is_batch_norm
from titan_launch.train.batches import RunData, StreamBatches, TrainBatches, ValidationBatches
from titan_launch.train.early_stopping import EarlyStopping
from titan_launch.train.health.coordination import StepCoordinator
from titan_launch.train.health.step_guard import StepGuard
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.measure import MEASURED, PREDICTED, MemoryCheck, StepMeasurements
from titan_launch.train.profiling import StepProfiler
from titan_launch.train.resolve_job import ResolvedJob
from titan_launch.train.run_folder.folder import OpenRunFolder, run_id
from titan_launch.train.run_folder.records import UNITS_FILE
from titan_launch.train.step import TrainStep


@dataclass(frozen=True)
class Run:
    """All parts of a run, as `build_run` returns them."""

    config: JobConfig
    folder: Path
    held_folder: OpenRunFolder
    ranks: Ranks
    layout: Layout
    hardware: Hardware
    mesh: Mesh
    plan: ModelPlan
    model: nn.Module
    optimizer: Optimizer
    unfreezing: Unfreezing
    ema: WeightEMA | None
    """The moving average of the weights; None without `ema.decay`."""

    step: TrainStep
    guard: StepGuard
    progress: Progress
    state: TrainingState
    """The state that a checkpoint holds."""

    control: StepCoordinator
    early_stopping: EarlyStopping | None
    """None without `validation.patience`."""

    first_step: int
    """The first step of this process: 1, or the step after the checkpoint from which the run resumed."""

    order: Order
    """The order of the training samples."""

    train_batches: TrainBatches | StreamBatches
    """An endless iterator over this rank's microbatches."""

    validation_batches: ValidationBatches | None
    checkpoints: CheckpointManager | None
    meter: Meter
    learned: Learned | None
    """The measurements of modules; None without `metrics.modules`."""

    profiler: StepProfiler
    measurements: StepMeasurements
    memory_check: MemoryCheck | None
    """None on all ranks except rank 0."""

    sinks: tuple[Sink, ...]
    console: ConsoleSink | None
    """The sink that writes to the terminal. It is also one of `sinks`. None with `--quiet`, and on all ranks except
    rank 0."""

    watchdog: Watchdog
    """Records the current activity of this rank, for hang detection."""

    locate_key: KeyLocator
    """Returns the file and line of a key of the job."""


_log = logging.getLogger(__name__)


def build_meter(job: ResolvedJob, ranks: Ranks, timeline: Timeline, flops: int | None) -> Meter:
    """Return the meter of this rank, with the FLOPs of a step and the device's peak FLOP/s. Both may be None.

    `flops`: those of one sample."""
    return Meter(
        device=ranks.device,
        timeline=timeline,
        world_size=ranks.world_size,
        unit=job.config.data.unit,
        flops_per_step_per_device=None if flops is None else flops * job.layout.global_batch_size / ranks.world_size,
        peak_flops=peak_flops(job.config, ranks.device),
    )


def peak_flops(config: JobConfig, device: torch.device) -> float | None:
    """Return the peak FLOP/s, the reference of MFU: the configured value, else the peak of a known GPU, else None."""
    if config.metrics.peak_tflops_per_device is not None:
        return config.metrics.peak_tflops_per_device * 1e12
    known = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.peak_bf16_tflops * 1e12


def build_sinks(
    job: ResolvedJob, folder: Path, progress: Progress, console: ConsoleSink | None, stack: ExitStack
) -> tuple[Sink, ...]:
    """Return the sinks, which write the reports. Collective. Only rank 0 has sinks; other ranks get an empty tuple.

    Raises ConfigError if a sink cannot be opened."""
    sinks: list[Sink] = []
    logged = set[str]()

    def add(name: str, sink: Sink, fatal: tuple[type[Exception], ...] = ()) -> None:
        sinks.append(GuardedSink(name, sink, logged, fatal))
        stack.push(partial(_close, sinks[-1]))

    def open_all() -> None:
        table = json.loads(dump_job(job.config))
        context = SinkContext(job.config.job.name, folder, run_id(folder), progress.step, table)
        for name, sink in open_sinks(job.config.metrics, context):
            add(name, sink)

    if console is not None:
        add("console", console, fatal=(BrokenPipeError,))  # `| head`
    on_rank_0(open_all)
    if not sinks:
        return ()
    description = RunDescription(settings_of(job.requested), frozenset(_later_metrics(job)))
    texts = {
        "config": f"```json\n{dump_job(job.config)}```",
        "units": f"```\n{format_plan(job.config, job.plan, job.layout, format_key)}\n```",
        **({} if job.reason is None else {"auto": job.reason}),
    }
    for sink in sinks:
        sink.describe(description)
        for tag, text in texts.items():
            sink.text(tag, text)
    return tuple(sinks)


def _close(sink: Sink, kind: type[BaseException] | None, *_: object) -> None:
    sink.close(failed=kind is not None)


_NOT_SETTINGS = ("job", "metrics", "profiling", "planner", "comm")
"""Sections whose keys change neither the result of a run nor its speed."""

_LONGEST_SETTING = 100


def settings_of(config: JobConfig) -> dict[str, int | float | str]:
    """Return the values with which runs are compared, by key. A long value is cut off."""
    return {key: value for key, value in _settings(config) if key.partition(".")[0] not in _NOT_SETTINGS}


def _settings(section: Section, prefix: str = "") -> Iterator[tuple[str, int | float | str]]:
    """Yield the keys and values of a section and of the sections in it. A key has a value also if it is unset, because
    TensorBoard finds out that runs differ in a key only if all of them have it."""
    table = section.model_dump(mode="json", exclude_none=True)
    for name in type(section).model_fields:
        field = getattr(section, name)
        if isinstance(field, Section):
            yield from _settings(field, f"{prefix}{name}.")
            continue
        value = table.get(name, "unset")
        text = toml_value(value)
        if len(text) > _LONGEST_SETTING:  # a different value must stay a different text
            value = f"{text[: _LONGEST_SETTING - 13]} ... {zlib.crc32(text.encode()):08x}"
        yield f"{prefix}{name}", value if type(value) in (int, float, str) else text


def _later_metrics(job: ResolvedJob) -> Iterator[str]:
    """Yield the tags that the run reports, but perhaps not in its first report."""
    config = job.config
    if config.validation.freq:
        kinds = ["loss", "accuracy", *(["perplexity"] if config.data.unit == "tokens" else [])]
        shown = config.ema.validate_with if config.ema.decay is not None else "parameters"
        prefixes = [prefix for prefix, other in (("", "ema"), ("ema_", "parameters")) if shown != other]
        yield from (f"validation/{prefix}{kind}" for prefix in prefixes for kind in kinds)
        if config.validation.patience is not None:
            yield from (BEST_LOSS, WITHOUT_IMPROVEMENT)
        if config.data.kind == "mixture":
            yield from ("validation/loss/<source>", "validation/accuracy/<source>")
    has_norms = any(map(is_batch_norm, job.plan.inventory.modules))
    if has_norms and job.layout.world_size > 1 and (config.validation.freq or config.checkpoint.enable):
        yield from ("batchnorm/running_mean_divergence", "batchnorm/running_var_divergence")
    if config.comm.profile_freq:
        yield "comm/exposed_s"
    if not (config.compile.enable or config.float8.enable):
        yield from (PREDICTED, MEASURED)


def log_job(job: ResolvedJob, locate_key: KeyLocator) -> None:
    """Log the job in about eight lines, and at level DEBUG the table of units."""
    for line in format_lines(summary_of_job(job.config, job.plan, job.layout)).split("\n"):
        _log.info("%s", line)
    for line in format_plan(job.config, job.plan, job.layout, locate_key).split("\n"):
        _log.debug("%s", line)


def log_run(
    job: ResolvedJob,
    device: torch.device,
    memory_check: MemoryCheck | None,
    data: RunData,
    folder: Path,
    certificate: Certificate | None,
) -> None:
    """Log the device, the predicted memory, the data, the proof of the layout and the run folder."""
    lines = [
        ("device", f"{device.type}{_memory(job.hardware, memory_check)}"),
        *data.describe(job.config.training.total_steps * job.layout.global_batch_size),
        *_steps_of_epochs(job.config.training, data),
        ("proof", describe(certificate)),
        ("folder", f"{folder} ({UNITS_FILE} has the table of the {len(job.plan.units)} FSDP2 units)"),
    ]
    for line in format_lines(lines).split("\n"):
        _log.info("%s", line)


def _steps_of_epochs(training: TrainingConfig, data: RunData) -> list[tuple[str, str]]:
    """Return the line about the steps that the epochs of the job are; none for a job without epochs."""
    if training.epochs is None:
        return []
    epochs = f"{training.epochs:g} epoch{'s' * (training.epochs != 1)}"
    return [("steps", f"{training.total_steps:,}: {epochs} of {data.order.num_samples:,} samples")]


def _memory(hardware: Hardware, memory_check: MemoryCheck | None) -> str:
    """Return a text with the memory per rank and the predicted peak memory. Unknown values are omitted."""
    predicted = None if memory_check is None else memory_check.scalars(None).get(PREDICTED)
    peak = "" if predicted is None else f", predicted peak memory {format_gib(predicted * GIB)} GiB"
    limit = "" if hardware.memory_gib is None else f", {hardware.memory_gib:.4g} GiB per rank"
    return limit + peak
