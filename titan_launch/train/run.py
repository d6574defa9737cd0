"""The parts of a run, and functions that build its meter and log its start."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.checkpoint.manager import CheckpointManager
from titan_launch.checkpoint.state import Progress, TrainingState
from titan_launch.config.job import JobConfig
from titan_launch.distributed.mesh import Mesh
from titan_launch.distributed.process_group import Ranks
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.timeline import Timeline
from titan_launch.parallel.fsdp import Unfreezing
from titan_launch.plan.hardware import GIB, find_device
from titan_launch.plan.mup import width_scales
from titan_launch.plan.param_groups import trained_parameters
from titan_launch.plan.proof.certificate import Certificate, describe_certificate
from titan_launch.plan.report.table import format_gib
from titan_launch.plan.report.unit_table import KeyLocator, format_lines, format_plan, summary_of_job
from titan_launch.train.batches import RunBatches, RunData
from titan_launch.train.early_stopping import EarlyStopping
from titan_launch.train.health.coordination import StepCoordinator
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.measure import PREDICTED, MemoryCheck
from titan_launch.train.observers import Observers
from titan_launch.train.output import RunOutput
from titan_launch.train.resolve_job import ResolvedJob
from titan_launch.train.run_folder.records import UNITS_FILE
from titan_launch.train.step import TrainStep


@dataclass(frozen=True)
class Run:
    """All parts of a run, as `build_run` returns them."""

    job: ResolvedJob
    ranks: Ranks
    mesh: Mesh
    model: nn.Module
    optimizer: Optimizer
    unfreezing: Unfreezing
    step: TrainStep
    progress: Progress
    first_step: int
    """The first step of this process: 1, or the step after the checkpoint from which the run resumed."""

    state: TrainingState
    """The state that checkpoints save."""

    checkpoints: CheckpointManager | None
    """None if the run saves no checkpoints."""

    batches: RunBatches
    observers: Observers
    memory_check: MemoryCheck | None
    """None on all ranks except rank 0."""

    output: RunOutput
    control: StepCoordinator
    early_stopping: EarlyStopping | None
    """None without `validation.patience`."""

    watchdog: Watchdog
    """Records the current activity of this rank, for hang detection."""

    refusals: Sequence[str]
    """The list that `use_kernels` returned: PyTorch's reasons for refusing calls of attention so far."""

    @property
    def config(self) -> JobConfig:
        """The resolved job (`ResolvedJob.config`)."""
        return self.job.config

    @cached_property
    def lr_factors(self) -> dict[str, float]:
        """Learning-rate factors by name of the optimizer group. Groups that are only on other pipeline ranks are
        included."""
        config = self.config
        trained = trained_parameters(self.job.plan.inventory, config.optimizer, width_scales(config))
        return {parameter.group: parameter.settings.lr_factor for parameter in trained.values()}


_log = logging.getLogger(__name__)


def build_meter(job: ResolvedJob, ranks: Ranks, timeline: Timeline, flops: int | None) -> Meter:
    """Return the meter of this rank. `flops`: FLOPs of one sample; None if unknown. The peak for MFU is
    `metrics.peak_tflops_per_device` or, by default, the bfloat16 peak of a known GPU."""
    peak_tflops = job.config.metrics.peak_tflops_per_device
    if peak_tflops is None and ranks.device.type == "cuda":
        known = find_device(torch.cuda.get_device_name(ranks.device))
        peak_tflops = None if known is None else known.peak_bf16_tflops
    return Meter(
        timeline=timeline,
        world_size=ranks.world_size,
        unit=job.config.data.unit,
        flops_per_step_per_device=None if flops is None else flops * job.layout.global_batch_size / ranks.world_size,
        peak_flops=None if peak_tflops is None else peak_tflops * 1e12,
    )


def log_job(job: ResolvedJob, locate_key: KeyLocator) -> None:
    """Log a summary of the job in about eight lines. Log the unit table at level DEBUG."""
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
    """Log the device, the predicted memory, the data, the proof of the layout and the run folder. Unknown values are
    omitted."""
    training, memory_gib = job.config.training, job.hardware.memory_gib
    predicted = None if memory_check is None else memory_check.scalars(None).get(PREDICTED)
    limit = "" if memory_gib is None else f", {memory_gib:.4g} GiB per rank"
    peak = "" if predicted is None else f", predicted peak memory {format_gib(predicted * GIB)} GiB"
    lines = [
        ("device", f"{device.type}{limit}{peak}"),
        *data.describe(training.total_steps * job.layout.global_batch_size),
    ]
    if training.epochs is not None:
        epochs = f"{training.epochs:g} epoch{'s' * (training.epochs != 1)}"
        lines.append(("steps", f"{training.total_steps:,}: {epochs} of {data.order.num_samples:,} samples"))
    lines += [
        ("proof", describe_certificate(certificate, job.config.prove.certificate)),
        ("folder", f"{folder} ({UNITS_FILE} has the table of the {len(job.plan.units)} FSDP2 units)"),
    ]
    for line in format_lines(lines).split("\n"):
        _log.info("%s", line)
