"""What some or all steps of a run are watched for, beside the meter's times: traffic, compiling, memory on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.config.comm import CommConfig
from titan_launch.errors import config_error
from titan_launch.metrics.exposed import profile_exposed_time
from titan_launch.metrics.tracking import track
from titan_launch.metrics.traffic import TrafficCount, count_collectives
from titan_launch.parallel.compile_cache import compile_time
from titan_launch.plan.footprint import Category, Ledger, Place
from titan_launch.plan.hardware import GIB
from titan_launch.torch_release import is_tested_release
from titan_launch.train.prediction import MEASURED
from titan_launch.train.step import Microbatch, TrainStep

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
                stack.enter_context(self._tracked(microbatches))
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
    def _tracked(self, microbatches: Sequence[Microbatch]) -> Iterator[None]:
        """Measures active memory as the planner counts it: of a step's microbatches one is on the device at a time."""
        ledger = Ledger()
        ledger.enter(Place(0, "step", ""))
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
