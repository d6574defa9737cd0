"""Measurements beside step times: traffic, compile time, and peak memory next to the planner's prediction."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.run import CommConfig
from titan_launch.core.errors import RunError, UserError, config_error
from titan_launch.core.torch_release import is_tested_release
from titan_launch.metrics.memory import track
from titan_launch.metrics.traffic import TrafficCount, count_collectives, profile_exposed_time
from titan_launch.parallel.compile import compile_time
from titan_launch.plan.hardware import GIB, Hardware
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.analytic.engine import analytic_engine, unknown_part
from titan_launch.plan.memory.ledger import Category, Ledger, StepPoint
from titan_launch.train.step import Microbatch, TrainStep
from titan_launch.train.trace_subprocess import TraceProcess

_log = logging.getLogger(__name__)

PREDICTED, MEASURED = "memory/predicted_active_gib", "memory/max_active_gib"
TOLERANCE = 0.1
"""A larger difference, as a share of what was measured, is worth a warning."""


@dataclass(frozen=True)
class Prediction:
    """The active memory that a step is predicted to take, at its peak."""

    gib: float
    place: str
    """Where in the step that is, in words."""


class MemoryCheck:
    """Reports what the planner predicts for a run, and compares it once with what is measured."""

    def __init__(self, config: JobConfig, layout: Layout, hardware: Hardware, stack: ExitStack):
        """A job that the analytic engine does not know is traced by another process, while the run goes on; `stack`
        ends it. Not where it would be the memory of another rank (of a pipeline), or take more than the run (on CPUs,
        with matrices or sequences divided)."""
        self._prediction: Prediction | None = None
        self._trace: TraceProcess | None = None
        self._measured_gib: float | None = None
        self._is_compared = False
        if not is_tested_release():
            return
        if config.compile.enable:
            _log.info("memory is not predicted: the compiler decides what is kept; `plan` shows it without one")
            return
        if config.float8.enable:
            _log.info("memory is not predicted: the planner does not know what torchao keeps; `plan` shows it without")
            return
        if unknown_part(config) is None:
            footprint = analytic_engine(config, layout, hardware.kernels)(configured_choice(config))
            self._prediction = Prediction(footprint.peak_bytes / GIB, str(footprint.place))
            return
        if layout.pipeline > 1 or (layout.model_parallel > 1 and hardware.kernels == "cpu"):
            _log.info("memory is not predicted beside a run with %s: see `plan`", unknown_part(config))
            return
        try:
            self._trace = TraceProcess(config, layout.world_size, hardware, stack)
        except OSError as error:  # no room for files or processes
            _log.info("memory is not predicted: %s", error)

    def scalars(self, measured_gib: float | None) -> dict[str, float]:
        """What there is to report by now; never waits. `measured_gib`: the peak of a window, or of a step, in which
        nothing but training has happened, if there is one."""
        self._read_trace()
        if self._measured_gib is None:
            self._measured_gib = measured_gib
        self._compare()
        return {} if self._prediction is None else {PREDICTED: self._prediction.gib}

    def _read_trace(self) -> None:
        if self._trace is None or self._trace.is_running:
            return
        try:
            rows = self._trace.result()["rows"]
            row = next(row for row in rows if row["is_chosen"])
            self._prediction = Prediction(row["active_bytes"] / GIB, row["peak"]["text"])
        except (UserError, RunError) as error:
            _log.info("memory is not predicted: %s", str(error).splitlines()[-1])
        self._trace = None

    def _compare(self) -> None:
        if self._is_compared or self._prediction is None or self._measured_gib is None:
            return
        self._is_compared = True
        predicted, measured = self._prediction, self._measured_gib
        if abs(predicted.gib - measured) > TOLERANCE * measured:
            _log.warning(
                "memory: the peak is %s in use, and %s were predicted (%s); do not rely on the plan of this job",
                *(_format_memory(measured), _format_memory(predicted.gib), predicted.place),
            )


def _format_memory(gib: float) -> str:
    return f"{gib:.2f} GiB" if gib >= 0.1 else f"{gib * 1024:.2f} MiB"


STEADY_STEP = 3
"""The step of this process whose memory is measured on a CPU: the optimizer's state is there from the second on."""


def check_profiling(config: CommConfig, device: torch.device) -> None:
    """Raise ConfigError where kernels are to be profiled and there are none."""
    if config.profile_freq and device.type != "cuda":
        reason = f"profiles CUDA kernels, and this run is on a device of type {device.type}; set 0, or job.device"
        raise config_error(("comm", "profile_freq"), reason, config.profile_freq)


class StepMeasurements:
    """Watches steps, and tells at the next report what it saw.

    with measurements.watching(step, microbatches):
        run.step(microbatches)
    scalars = measurements.take()
    """

    def __init__(
        self,
        config: CommConfig,
        model: nn.Module,
        optimizer: Optimizer,
        train_step: TrainStep,
        device: torch.device,
        first_step: int,
        is_compiled: bool,
        stack: ExitStack,
    ):
        """`is_compiled`: whether graphs run, whose memory on a CPU no one sees from outside. `stack` takes what is left
        on the model for the whole run away again."""
        self._profile_freq = config.profile_freq
        self._model = model
        self._optimizer = optimizer
        self._train_step = train_step
        self._device = device
        self._first_step = first_step
        self._tracks_memory = device.type == "cpu" and not is_compiled and is_tested_release()
        self._traffic: TrafficCount | None = None
        if config.count_traffic and is_tested_release():
            self._traffic = stack.enter_context(count_collectives(model))
        self._compile_time = stack.enter_context(compile_time()) if is_compiled else None
        self._seen: dict[str, float] = {}
        self._begin_window(first_step, only_training=True)

    @contextmanager
    def watching(self, step: int, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Around a training step, the `step`-th of the run."""
        with ExitStack() as stack:
            if self._tracks_memory and step == self._first_step + STEADY_STEP - 1:
                stack.enter_context(self._memory_tracked(microbatches))
            if self._profile_freq and step % self._profile_freq == 0:
                stack.enter_context(self._profiled())
            yield
        self._steps += 1

    def take(self) -> dict[str, float]:
        """What was seen on this rank since the last call, by tag."""
        seen, self._seen = self._seen, {}
        if self._compile_time is not None:
            seen["time/compile_s"] = self._compile_time.take()
        if self._traffic is not None:
            traffic = self._traffic.take()
            seen |= {
                "comm/collectives": traffic.collectives.total / self._steps,
                "comm/all_gather_gib": traffic.all_gather_bytes / self._steps / GIB,
                "comm/reduce_scatter_gib": traffic.reduce_scatter_bytes / self._steps / GIB,
                "comm/all_reduce_gib": traffic.all_reduce_bytes / self._steps / GIB,
            }
        return seen

    @property
    def is_steady(self) -> bool:
        """Whether the peak memory of the window that ends now is that of training alone, the first step aside."""
        return self._only_training and self._window_start > self._first_step

    def end_window(self, step: int, only_training: bool) -> None:
        """A report is done, after that `step`. `only_training`: whether neither a validation nor a checkpoint comes
        between it and the next step. What these communicate does not count."""
        if self._traffic is not None:
            self._traffic.take()
        self._begin_window(step + 1, only_training)

    def _begin_window(self, next_step: int, only_training: bool) -> None:
        self._steps = 0
        self._window_start = next_step
        self._only_training = only_training

    @contextmanager
    def _memory_tracked(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Measures active memory as the planner counts it: of a step's microbatches one is on the device at a time."""
        ledger = Ledger()
        ledger.enter(StepPoint(0, "step", ""))
        with track(self._model, ledger, self._optimizer) as memory:
            memory.hold([self._train_step.kept_statistics], Category.BUFFERS)
            memory.hold(microbatches[0], Category.INPUTS)
            yield
            self._seen[MEASURED] = ledger.footprint().peak_bytes / GIB

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        with profile_exposed_time(self._device) as exposed:
            yield
        self._seen["comm/exposed_s"] = exposed.seconds
