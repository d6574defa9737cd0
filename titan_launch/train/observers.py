"""The list of the objects that watch the steps of a run, in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import format_key
from titan_launch.core.observer import Observer
from titan_launch.distributed.process_group import Ranks
from titan_launch.metrics.learned import Learned
from titan_launch.metrics.meter import Meter
from titan_launch.metrics.sinks.console import ConsoleSink
from titan_launch.models.blocks import PassThrough
from titan_launch.optim.ema import WeightEMA
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import ModelPlan
from titan_launch.plan.units.rule_assignment import matched_modules
from titan_launch.train.measure import StepMeasurements
from titan_launch.train.precision_audit import PrecisionAudit
from titan_launch.train.profiling import StepProfiler


@dataclass(frozen=True)
class Observers:
    """The observers of a run. An observer that the job does not need is None.

    `before_step` and `before_update` are called from the first observer of this class to the last. `after_step` and
    `abandon_step` are called from the last to the first. So an observer also measures the work of the observers below
    it. The guard that decides whether to skip a step is not an observer, because it changes the step (`TrainStep`).
    """

    # The progress bar shows a step after all other observers have seen it.
    console: ConsoleSink | None

    # The meter adds to its sums on the device after the observers below it have ended. So the sums are not part of a
    # profile or of the measured memory.
    meter: Meter

    # A profile contains the work of the observers below it. PyTorch can run only one profiler at a time, so
    # `measurements` come later, and check `Timeline.is_profiled`.
    profiler: StepProfiler

    # The measured memory includes the update of the average, as the planner's prediction does.
    measurements: StepMeasurements

    # The audit watches the first step, and `measurements` watch a later step. So neither counts allocations of the
    # other.
    audit: PrecisionAudit | None

    # Learned metrics copy the parameters. If the audit raises an error for a wrong step, nothing is copied.
    learned: Learned | None

    # After a step, the average is updated first, before another observer can fail.
    ema: WeightEMA | None

    def __iter__(self) -> Iterator[Observer]:
        yield from (observer for observer in vars(self).values() if observer is not None)


def build_learned(
    config: JobConfig, plan: ModelPlan, model: nn.Module, ranks: Ranks, stack: ExitStack, layout: Layout
) -> Learned | None:
    """Return the observer that measures the modules in `metrics.modules`; None if the key is empty. Raises ConfigError
    for a glob that matches no module."""
    if not config.metrics.modules:
        return None
    paths = matched_modules(plan.inventory, config.metrics.modules, ("metrics", "modules"))
    groups: dict[str, list[str]] = {}
    for unit in plan.boundaries:
        if unit.key is not None:
            groups.setdefault(format_key(unit.key), []).extend(unit.modules)
    modules = {path: module for path, module in model.named_modules() if not isinstance(module, PassThrough)}
    return Learned(modules, paths, None if config.compile.enable else groups, ranks.device, stack, layout)
