"""The sinks that metrics are written to."""

from collections.abc import Callable, Iterator
from importlib import import_module

from titan_launch.config.sections.run import MetricsConfig
from titan_launch.core.errors import config_error
from titan_launch.core.import_string import import_factory, user_traceback
from titan_launch.core.packages import install
from titan_launch.metrics.sinks.interface import Sink, SinkContext
from titan_launch.metrics.sinks.jsonl import METRICS_FILE, JsonlSink
from titan_launch.metrics.sinks.tensorboard import TensorBoardSink

__all__ = ["SINKS", "Sink", "SinkContext", "import_sinks", "open_sinks"]

SINKS: dict[str, Callable[[MetricsConfig, SinkContext], Sink | None]] = {
    METRICS_FILE: lambda config, run: JsonlSink(run.folder / METRICS_FILE, run.step),
    "TensorBoard": lambda config, run: (
        TensorBoardSink(run.folder / "tb", run.step) if config.enable_tensorboard else None
    ),
}
"""The built-in sinks by name. Each function takes the section `[metrics]` and the run. It opens the sink, or returns
None if the job disables the sink. Only rank 0 opens sinks. A job names further sinks in `metrics.sinks`."""

_EXTRAS = {"wandb": "WandbSink", "mlflow": "MlflowSink"}
"""The sinks that need the Python package of their name, each with its class in this package. The module of a sink is
imported only if a job names the sink."""


def import_sinks(config: MetricsConfig) -> dict[str, Callable[[SinkContext], Sink]]:
    """Return the sink factories that `metrics.sinks` names, by name. Raises ConfigError if a factory cannot be
    imported."""
    factories: dict[str, Callable[[SinkContext], Sink]] = {}
    for index, name in enumerate(config.sinks):
        key = ("metrics", "sinks", index)
        if name not in _EXTRAS:
            factories[name] = import_factory(name, key)
            continue
        try:
            module = import_module(f"titan_launch.metrics.sinks.{name}")
        except ImportError as error:
            reason = f"needs {name}, which cannot be imported ({error}): {install(name)}"
            raise config_error(key, reason, name) from None
        factories[name] = getattr(module, _EXTRAS[name])
    return factories


def open_sinks(config: MetricsConfig, run: SinkContext) -> Iterator[tuple[str, Sink]]:
    """Yield the sinks of a job by name. Raises ConfigError if one of `metrics.sinks` cannot be imported or opened, or
    is not a `Sink`. Raises UserError if the run's `metrics.jsonl` is invalid."""
    for name, build in SINKS.items():
        if (sink := build(config, run)) is not None:
            yield name, sink
    for index, (name, factory) in enumerate(import_sinks(config).items()):
        key = ("metrics", "sinks", index)
        try:
            opened = factory(run)
        except Exception as error:
            trace = f"{type(error).__name__}: {error}" if name in _EXTRAS else user_traceback(error)
            raise config_error(key, f"the sink cannot be opened:\n{trace}", name) from error
        if not isinstance(opened, Sink):
            reason = f"must return a titan_launch.metrics.sinks.Sink, but returns a {type(opened).__name__}"
            raise config_error(key, reason, name)
        yield name, opened
