"""The sinks that metrics are written to."""

from collections.abc import Callable
from pathlib import Path

from titan_launch.config.sections.run import MetricsConfig
from titan_launch.metrics.sinks.base import Sink
from titan_launch.metrics.sinks.console import ConsoleSink
from titan_launch.metrics.sinks.jsonl import METRICS_FILE, JsonlSink
from titan_launch.metrics.sinks.tensorboard import TensorBoardSink

__all__ = ["SINKS", "ConsoleSink", "JsonlSink", "Sink", "TensorBoardSink"]

SINKS: list[Callable[[MetricsConfig, Path, int], Sink | None]] = [
    lambda config, folder, step: JsonlSink(folder / METRICS_FILE, step),
    lambda config, folder, step: TensorBoardSink(folder / "tb", step) if config.enable_tensorboard else None,
]
"""Functions of (`[metrics]`, run folder, resume step) that open a sink, or return None if the job disables the sink.

Only rank 0 opens sinks. The resume step is that of the checkpoint from which the run resumes, or 0."""
