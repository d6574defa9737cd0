"""The planner's engine: memory and traffic of a rank in a step, from recorded tapes and a replay of FSDP2. No torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.loss import frozen_job
from titan_launch.plan.communication import Traffic, on_line, traffic_of_step
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice, plan_job, plan_untrained, with_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.depth import find_shortcut, without_blocks
from titan_launch.plan.memory.ledger import Footprint, extrapolate, with_growth
from titan_launch.plan.memory.recordings import Recordings
from titan_launch.plan.memory.replay import Replay, ReplayedStep, SecondModel, local_plan
from titan_launch.plan.memory.tape import Tape, whole_shapes, with_blocks
from titan_launch.plan.pipeline import parts_on_rank, representative_ranks, sufficient_microbatches
from titan_launch.plan.types import ModelPlan


class ReplayEngine:
    """Predicts a job's step under the modes of a `Choice`."""

    def __init__(self, config: JobConfig, layout: Layout, kernels: Kernels, recordings: Recordings):
        self._config = config
        self._layout = layout
        self._kernels = kernels
        self._recordings = recordings
        self._step = cache(self._predicted)

    def __call__(self, choice: Choice) -> Footprint:
        """Return the active memory of the rank with the highest peak. Raises ConfigError as a run would."""
        return self._step(choice)[0]

    def traffic(self, choice: Choice) -> Traffic:
        """Return the traffic of the same rank in a step."""
        return self._step(choice)[1]

    def _predicted(self, choice: Choice) -> tuple[Footprint, Traffic]:
        config = with_choice(self._config, choice)
        plan = plan_job(config, self._recordings.subject().inventory)
        with _without_garbage_collection():
            ranks = [self._of_rank(config, plan, rank) for rank in representative_ranks(plan)]
        return max(ranks, key=lambda predicted: predicted[0].peak_bytes)

    def _of_rank(self, config: JobConfig, plan: ModelPlan, rank: int) -> tuple[Footprint, Traffic]:
        """Return the prediction for a pipeline rank."""
        layout, checkpointing = self._layout, config.activation_checkpoint
        plans = parts_on_rank(plan, rank)
        if layout.pipeline == 1:
            tape = self._recordings.tape(checkpointing)
            step = self._replayed(config, plans, tape, layout.num_microbatches)
        else:
            enough = sufficient_microbatches(config.parallelism, layout)
            tape = self._recordings.tape(checkpointing, rank, enough)
            step = self._replayed(config, plans, tape, enough)
            untraced = layout.num_microbatches - enough
            if untraced:
                more = min(untraced, layout.pipeline)  # interleaved schedules take multiples
                longer = self._recordings.tape(checkpointing, rank, enough + more)
                grown = self._replayed(config, plans, longer, enough + more).footprint
                step = replace(step, footprint=with_growth(step.footprint, grown, untraced / more))
        shapes = whole_shapes(tape)
        units = (traffic_of_step(local_plan(part, shapes), layout, config.gradient_accumulation) for part in plans)
        footprint = replace(step.footprint, pipeline_rank=rank) if plan.stages else step.footprint
        return footprint, sum(units, start=step.traffic)

    def _replayed(
        self, config: JobConfig, plans: Sequence[ModelPlan], tape: Tape, num_microbatches: int
    ) -> ReplayedStep:
        """Replay the model at two smaller depths and extrapolate, or at its own depth."""

        def at(removed: tuple[str, ...]) -> ReplayedStep:
            own = [without_blocks(plan, removed) for plan in plans] if removed else plans
            shallow = with_blocks(tape, removed)
            return Replay(config, own, self._layout, self._kernels, shallow, self._second()).step(num_microbatches)

        shortcut = find_shortcut(plans[0]) if len(plans) == 1 and tape.parts[0].repeat is not None else None
        if shortcut is not None:
            shorter, longer = at(shortcut.removed_from_shorter), at(shortcut.removed_from_longer)
            footprint = extrapolate(shorter.footprint, longer.footprint, shortcut.factor)
            if footprint is not None:
                return ReplayedStep(footprint, on_line(shorter.traffic, longer.traffic, shortcut.factor))
        return at(())

    def _second(self) -> SecondModel | None:
        found, inventory = self._config.loss.frozen_model(), self._recordings.subject().second
        if found is None or inventory is None:
            return None
        own = frozen_job(self._config, found)
        return SecondModel(own, plan_untrained(own, inventory))


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the block. A replay makes many objects, which their reference counts free, so
    collections would find nothing and take a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
