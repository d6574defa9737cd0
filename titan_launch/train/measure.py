"""Measurements of a run: bytes of collectives, time in which computation waits for communication, compile time, and
peak memory compared with the planner's prediction."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from torch import Tensor

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import RunError, UserError
from titan_launch.core.observer import Observer, StepResult, WatchedStep
from titan_launch.core.torch_release import is_tested_release
from titan_launch.loss.interface import Loss
from titan_launch.metrics.memory import LiveMemory, track
from titan_launch.metrics.timeline import Timeline
from titan_launch.metrics.traffic import TrafficCount, count_collectives, exposed_time_profiled
from titan_launch.optim.ema import WeightEMA
from titan_launch.optim.registry import replicas_of
from titan_launch.parallel.compile import compile_time
from titan_launch.plan.hardware import GIB, Hardware, format_memory
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.ledger import Category, Ledger, StepPoint
from titan_launch.plan.memory.recordings import NotRecordedError, Recordings
from titan_launch.plan.memory.replay_engine import ReplayEngine
from titan_launch.train.step import TrainStep
from titan_launch.train.trace_subprocess import TraceProcess, with_hardware

_log = logging.getLogger(__name__)

PREDICTED, MEASURED = "memory/predicted_active_gib", "memory/max_active_gib"
TOLERANCE = 0.1
"""Relative error of the prediction above which a warning is logged."""


@dataclass(frozen=True)
class Prediction:
    """The planner's prediction of the largest memory of live tensors in a step."""

    gib: float
    peak_point: str
    """Point of the step at which memory peaks, as text (`StepPoint`)."""


class MemoryCheck:
    """The predicted peak memory of a step, which is reported as a metric and compared once with the measured peak."""

    def __init__(self, config: JobConfig, layout: Layout, hardware: Hardware, stack: ExitStack):
        """Predict the peak from the recording that an earlier plan or run has made of this job. If there is none, a run
        on GPUs starts a process that makes a recording. Closing `stack` ends the process.

        A run on CPUs does not start this process, which would slow down the run. The memory of compiled, float8 and
        pipelined jobs is not predicted. (The plan of a pipeline predicts the highest peak of all ranks, and rank 0 may
        have a lower peak.) On an untested release of PyTorch, nothing is predicted.
        """
        self._prediction: Prediction | None = None
        self._trace: TraceProcess | None = None
        self._measured_gib: float | None = None
        self._is_compared = False
        self._advice = "do not rely on the plan of this job"
        if layout.expert > 1:
            self._advice += ", or plan for another load of the experts (planner.expert_load)"
        if not is_tested_release():
            return
        obstacles = {
            "compile.enable, because the memory depends on the compiler; the command `plan` predicts the memory "
            "without compilation": config.compile.enable,
            "float8.enable, because the memory that torchao needs is not known; the command `plan` predicts the memory "
            "with bfloat16 instead of float8": config.float8.enable,
            f"parallelism.pipeline_parallel_degree = {layout.pipeline}; the command `plan` predicts the memory": (
                layout.pipeline > 1
            ),
        }
        if obstacle := next((text for text, applies in obstacles.items() if applies), None):
            _log.info("memory is not predicted during a run with %s", obstacle)
            return
        planned = with_hardware(config, hardware)
        recordings = Recordings(planned, layout, hardware.kernels, recorder=None)
        with suppress(NotRecordedError):
            engine = ReplayEngine(planned, layout, hardware.kernels, recordings)
            footprint = engine(configured_choice(planned)).with_workspace(hardware.workspace_bytes)
            self._prediction = Prediction(footprint.peak_bytes / GIB, str(footprint.peak_point))
        if self._prediction is not None or hardware.kernels == "cpu":
            return
        try:
            self._trace = TraceProcess(config, layout.world_size, hardware, stack)
        except OSError as error:  # no space for files, or too many processes
            _log.info("memory is not predicted, because the planner's process did not start: %s", error)

    def scalars(self, measured_gib: float | None) -> dict[str, float]:
        """Return the predicted memory by tag; an empty dict if there is no prediction yet. This method never waits.
        `measured_gib`: measured peak memory in GiB, without validations and checkpoints; None if not measured. The
        first measured peak is compared with the prediction, and a large difference is logged as a warning."""
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
            _log.info("memory is not predicted, because the recording failed: %s", str(error).splitlines()[-1])
        self._trace = None

    def _compare(self) -> None:
        if self._is_compared or self._prediction is None or self._measured_gib is None:
            return
        self._is_compared = True
        predicted, measured = self._prediction, self._measured_gib
        if abs(predicted.gib - measured) > TOLERANCE * measured:
            _log.warning(
                "memory: the measured peak is %s, but the planner predicted a peak of %s (%s); %s",
                format_memory(measured * GIB),
                format_memory(predicted.gib * GIB),
                predicted.peak_point,
                self._advice,
            )


STEADY_STEP = 3
"""Number of the step of this process (from 1) in which memory is measured on a CPU. The optimizer state is complete
before this step."""


def hold_frozen(memory: LiveMemory, loss: Loss) -> None:
    """Count the shards of the loss's teacher or reference model, if there is one, as tensors in use."""
    if loss.frozen is not None:
        memory.hold(loss.frozen.parameters(), Category.PARAMETERS)
        memory.hold(loss.frozen.buffers(), Category.BUFFERS)


class StepMeasurements(Observer):
    """Measurements of steps, collected between two reports."""

    def __init__(
        self, config: JobConfig, train_step: TrainStep, timeline: Timeline, ema: WeightEMA | None, stack: ExitStack
    ):
        """Start to count traffic (`comm.count_traffic`) and compile time. Closing `stack` removes all hooks. On a CPU,
        the memory of a compiled model cannot be measured."""
        self._profile_freq = config.comm.profile_freq
        self._ema = ema
        self._train_step = train_step
        self._timeline = timeline
        is_compiled = config.compile.enable
        self._tracks_memory = train_step.device.type == "cpu" and not is_compiled and is_tested_release()
        self._traffic: TrafficCount | None = None
        if config.comm.count_traffic and is_tested_release():
            frozen = train_step.loss.frozen
            models = [train_step.model] if frozen is None else [train_step.model, frozen]
            replicas = replicas_of(train_step.optimizer)
            counted = count_collectives(*models, watch_replicas=None if replicas is None else replicas.watched)
            self._traffic = stack.enter_context(counted)
        self._compile_time = stack.enter_context(compile_time()) if is_compiled else None
        self._seen: dict[str, float] = {}
        self._watched = ExitStack()
        """The context managers that measure the current step."""

        self._first_step: int | None = None  # of this process
        self._steps = self._window_start = 0
        self._only_training = True

    def before_step(self, step: WatchedStep) -> None:
        """Begin the measurements that are due in this step: peak memory, or the time of exposed communication."""
        if self._first_step is None:
            self._first_step = self._window_start = step.number
        if self._tracks_memory and step.number == self._first_step + STEADY_STEP - 1:
            self._watched.enter_context(self._memory_tracked(step.microbatches))
        if self._profile_freq and step.number % self._profile_freq == 0:
            if self._timeline.is_profiled:  # PyTorch can run only one profiler at a time
                self._seen.setdefault("comm/exposed_s", -math.inf)  # all ranks must report the same tags
            else:
                self._watched.enter_context(exposed_time_profiled(self._train_step.device, self._seen))

    def after_step(self, step: WatchedStep, result: StepResult) -> None:
        """End the measurements of the step. `take_metrics` returns their results."""
        self._watched.close()
        self._steps += 1

    def abandon_step(self, error: BaseException) -> None:
        """Drop the measurements of the step."""
        self._watched.__exit__(type(error), error, error.__traceback__)

    def take_metrics(self) -> dict[str, float]:
        """Return this rank's measurements since the last call, by tag, and reset them. The traffic is the mean per
        step."""
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
        """True if neither a validation, nor a checkpoint, nor the first step of this process has run since the last
        report."""
        return self._only_training and self._first_step is not None and self._window_start > self._first_step

    def end_window(self, step: int, only_training: bool) -> None:
        """Begin the measurements for the next report, after the report of `step`. Drop the traffic since the last
        `take_metrics`. `only_training`: True if no validation and no checkpoint runs between this step and the next."""
        if self._traffic is not None:
            self._traffic.take()
        self._steps, self._window_start, self._only_training = 0, step + 1, only_training

    @contextmanager
    def _memory_tracked(self, microbatches: Sequence[Sequence[Tensor | None]]) -> Iterator[None]:
        """Measure the memory of live tensors. As in a plan, the inputs of only one microbatch count."""
        ledger = Ledger()
        ledger.enter(StepPoint(0, "step", ""))
        with track(self._train_step.model, ledger, self._train_step.optimizer) as memory:
            if self._ema is not None:
                memory.hold(self._ema.tensors, Category.EMA)
            memory.hold([self._train_step.statistics.saved], Category.BUFFERS)
            memory.hold(microbatches[0], Category.INPUTS)
            memory.ignore(tensor for microbatch in microbatches[1:] for tensor in microbatch)
            hold_frozen(memory, self._train_step.loss)
            memory.hold(self._train_step.gradients.receive_buffers(), Category.ACTIVATIONS)
            yield
            self._seen[MEASURED] = ledger.footprint().peak_bytes / GIB
