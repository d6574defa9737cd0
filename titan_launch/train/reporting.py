"""What a run tells of itself: rates, and where reports go."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from titan_launch.checkpoint.state import Progress
from titan_launch.collective import on_main
from titan_launch.config.job import JobConfig
from titan_launch.config.load import dump_job
from titan_launch.data.sources import SampleSource
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.sinks import ConsoleSink, JsonlSink, Sink, TensorBoardSink
from titan_launch.models.build import BuiltModel
from titan_launch.parallel.distributed import Ranks
from titan_launch.plan.devices import find_device
from titan_launch.plan.layout import Layout
from titan_launch.plan.report import format_batches
from titan_launch.train.records import METRICS_FILE

_log = logging.getLogger(__name__)


def build_meter(config: JobConfig, built: BuiltModel, layout: Layout, ranks: Ranks) -> Meter:
    """The meter, which knows the FLOPs of a step and, on known hardware, the peak."""
    flops = built.flops_per_sample
    return Meter(
        device=ranks.device,
        world_size=ranks.world_size,
        unit=config.data.unit,
        flops_per_step_per_device=None if flops is None else flops * layout.global_batch_size / ranks.world_size,
        peak_flops=peak_flops(config, ranks.device),
    )


def peak_flops(config: JobConfig, device: torch.device) -> float | None:
    """FLOP/s that the MFU is relative to: as configured, else those of a known GPU, else none."""
    if config.metrics.peak_tflops_per_device is not None:
        return config.metrics.peak_tflops_per_device * 1e12
    known = find_device(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if known is None else known.peak_bf16_tflops * 1e12


def build_sinks(
    config: JobConfig,
    reason: str | None,
    folder: Path,
    progress: Progress,
    console: ConsoleSink | None,
    stack: ExitStack,
) -> tuple[Sink, ...]:
    """Return where reports go; collective. Only the main rank, which has a console, has sinks. `reason`: why the modes
    are what they are, where the job left them open."""
    sinks: list[Sink] = [] if console is None else [console]

    def open_files() -> None:
        sinks.append(JsonlSink(folder / METRICS_FILE, resume_step=progress.step))
        if config.metrics.enable_tensorboard:
            sinks.append(TensorBoardSink(folder / "tb", resume_step=progress.step))

    on_main(open_files)
    for sink in sinks:
        stack.callback(sink.close)
        sink.text("config", f"```json\n{dump_job(config)}```")
        if reason is not None:
            sink.text("auto", reason)
    return tuple(sinks)


def log_batches(
    config: JobConfig, layout: Layout, ranks: Ranks, source: SampleSource, held_out: SampleSource | None, folder: Path
) -> None:
    """Log how the run divides its batch, what data it has, and where it writes. `held_out`: the validation source."""
    _log.info("%s", format_batches(config, layout))
    _log.info("data: %s", source.describe())
    if held_out is not None:
        most = config.validation.max_samples
        used = f"; the first {most:,} samples are used" if most is not None and most < len(held_out) else ""
        _log.info("validation data: %s%s", held_out.describe(), used)
    _log.info("device: %s", ranks.device.type)
    _log.info("folder: %s", folder)
