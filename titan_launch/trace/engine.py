"""The memory and traffic of any model's step, from a trace: the engine of the planner that needs torch."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from titan_launch.config.job import JobConfig
from titan_launch.models.build import BuiltModel, build_model
from titan_launch.plan.choices import Choice, with_choice
from titan_launch.plan.depth import Shortcut, block_signatures, find_shortcut, without_blocks
from titan_launch.plan.footprint import Footprint, extrapolate
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout
from titan_launch.plan.recomputation import chosen_blocks
from titan_launch.plan.traffic import Collectives, Traffic
from titan_launch.plan.types import Inventory, ModelPlan, outermost
from titan_launch.trace.depth import remove_blocks
from titan_launch.trace.failure import failures_explained
from titan_launch.trace.step import TracedStep, trace_step
from titan_launch.train.plan import inspect_model

_log = logging.getLogger(__name__)

_ON_THE_LINE = 1e-4
"""How far the peak of a third depth may be off, relatively. (Where memory is affine in depth it is off by no byte.)"""


class TraceEngine:
    """Traces a job's step for each choice, once."""

    def __init__(self, config: JobConfig, layout: Layout, kernels: Kernels):
        self._config = config
        self._layout = layout
        self._kernels = kernels
        self._inventory: Inventory | None = None
        self._known: dict[Choice, TracedStep] = {}

    def __call__(self, choice: Choice) -> Footprint:
        """The active memory of the rank that holds the most.

        Raises ConfigError as a run would, and where the model cannot be traced.
        """
        return self._step(choice).footprint

    def traffic(self, choice: Choice) -> Traffic:
        """What the units of that rank communicate in a step: the collectives that FSDP2 called, counted.

        Raises as `__call__` does.
        """
        seen = self._step(choice).traffic
        left_out = self._layout.num_microbatches - len(seen)
        total = sum(seen, start=Traffic())
        return _on_line(total, total + seen[-2], left_out) if left_out else total

    def _step(self, choice: Choice) -> TracedStep:
        if choice not in self._known:
            config = with_choice(self._config, choice)
            self._inventory = self._inventory or inspect_model(config, _build(config))
            self._known[choice] = _trace(config, plan_job(config, self._inventory), self._layout, self._kernels)
        return self._known[choice]


def trace_engine(config: JobConfig, layout: Layout, kernels: Kernels) -> TraceEngine:
    """What answers for any model the job can build, in a process that has no process group.

    `kernels`: whose memory is meant, CUDA's, for which some stand in (see `titan_launch.trace.kernels`), or the CPU's.
    """
    return TraceEngine(config, layout, kernels)


def _build(config: JobConfig) -> BuiltModel:
    return build_model(config.model, config.training.seq_len)


def _trace(config: JobConfig, plan: ModelPlan, layout: Layout, kernels: Kernels) -> TracedStep:
    """At two depths where one block repeats often, and extrapolated; else whole."""
    again = chosen_blocks(plan.inventory.blocks, config.activation_checkpoint)
    shortcut = find_shortcut(block_signatures(plan), outermost(plan.inventory.blocks), again)
    if shortcut is not None:
        short = _trace_short(config, plan, layout, kernels, shortcut)
        if short is not None:
            return short
    with failures_explained(config.model):
        return _trace_without(config, plan, layout, kernels, ())


def _trace_short(
    config: JobConfig, plan: ModelPlan, layout: Layout, kernels: Kernels, shortcut: Shortcut
) -> TracedStep | None:
    """Two depths, extrapolated; None where the model does not run without some of its blocks, or where a third depth is
    not on the line (blocks that read what all blocks before them made). The models of this package are."""
    try:
        shorter = _trace_without(config, plan, layout, kernels, shortcut.removed_from_shorter)
        longer = _trace_without(config, plan, layout, kernels, shortcut.removed_from_longer)
        if ":" in config.model.name:
            seen = _trace_without(config, plan, layout, kernels, shortcut.removed_for_check)
            if not _are_alike(_extrapolated(shorter, longer, 2), seen):
                _log.warning("traced whole, which takes longer: the model's memory does not grow evenly with its depth")
                return None
    except Exception as error:  # whatever a model raises that counts its blocks; if it cannot run at all, we will see
        _log.warning("traced whole, which takes longer: without some of its blocks the model does not run (%s)", error)
        return None
    return _extrapolated(shorter, longer, shortcut.factor)


def _are_alike(a: TracedStep, b: TracedStep) -> bool:
    return a.traffic == b.traffic and abs(a.footprint.peak_bytes / b.footprint.peak_bytes - 1) < _ON_THE_LINE


def _trace_without(
    config: JobConfig, plan: ModelPlan, layout: Layout, kernels: Kernels, removed: Sequence[str]
) -> TracedStep:
    built = _build(config)
    remove_blocks(built.module, removed)
    return trace_step(config, built, without_blocks(plan, removed), layout, kernels)


def _extrapolated(shorter: TracedStep, longer: TracedStep, factor: float) -> TracedStep:
    traffic = tuple(_on_line(a, b, factor) for a, b in zip(shorter.traffic, longer.traffic, strict=True))
    return TracedStep(extrapolate(shorter.footprint, longer.footprint, factor), traffic)


def _on_line(a: Traffic, b: Traffic, factor: float) -> Traffic:
    """`a + factor * (b - a)`, in whole calls and bytes."""

    def line(x: int, y: int) -> int:
        return round(x + factor * (y - x))

    x, y = a.collectives, b.collectives
    return Traffic(
        Collectives(
            line(x.all_gathers, y.all_gathers),
            line(x.reduce_scatters, y.reduce_scatters),
            line(x.all_reduces, y.all_reduces),
        ),
        line(a.all_gather_bytes, b.all_gather_bytes),
        line(a.reduce_scatter_bytes, b.reduce_scatter_bytes),
        line(a.all_reduce_bytes, b.all_reduce_bytes),
    )
