"""The finished parts of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from titan_launch.checkpoint.manager import CheckpointManager
from titan_launch.checkpoint.state import Progress, TrainingState
from titan_launch.config.job import JobConfig
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.sinks import ConsoleSink, Sink
from titan_launch.parallel.distributed import Ranks
from titan_launch.parallel.mesh import Mesh
from titan_launch.plan.layout import Layout
from titan_launch.plan.report import Place
from titan_launch.plan.types import ModelPlan
from titan_launch.train.batches import TrainBatches
from titan_launch.train.control import Control
from titan_launch.train.folder import HeldFolder
from titan_launch.train.guard import StepGuard
from titan_launch.train.measure import StepMeasurements
from titan_launch.train.prediction import MemoryCheck
from titan_launch.train.step import Microbatch, TrainStep
from titan_launch.train.watchdog import Watchdog


@dataclass(frozen=True)
class Run:
    """The finished parts of a run."""

    config: JobConfig
    folder: Path
    held_folder: HeldFolder
    ranks: Ranks
    layout: Layout
    mesh: Mesh
    plan: ModelPlan
    model: nn.Module
    optimizer: Optimizer
    step: TrainStep
    guard: StepGuard
    progress: Progress
    state: TrainingState
    """All that goes into a checkpoint."""

    control: Control
    first_step: int
    """The first step of this process: 1, or the one after the checkpoint it resumed from."""

    epoch_size: int
    """Samples in an epoch."""

    train_batches: TrainBatches
    """This rank's microbatches, without end."""

    validation_batches: Iterable[Microbatch] | None
    checkpoints: CheckpointManager | None
    meter: Meter
    measurements: StepMeasurements
    memory_check: MemoryCheck | None
    """On the main rank."""

    sinks: tuple[Sink, ...]
    console: ConsoleSink | None
    """The terminal, on the main rank; also among the sinks."""

    watchdog: Watchdog
    """Is told what this rank does."""

    place: Place
    """Where a key of the job was given."""
