"""The places that metrics go to."""

from titan_launch.metrics.sinks.base import Sink
from titan_launch.metrics.sinks.console import ConsoleSink
from titan_launch.metrics.sinks.jsonl import JsonlSink
from titan_launch.metrics.sinks.tensorboard import TensorBoardSink

__all__ = ["ConsoleSink", "JsonlSink", "Sink", "TensorBoardSink"]
