"""The planner's engine: memory, traffic and times of a rank in a step, from recorded tapes and replays. This module
does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import NamedTuple

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.loss import frozen_job
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig, CompileConfig
from titan_launch.core.patches import garbage_collection_disabled
from titan_launch.core.process import in_forks
from titan_launch.core.torch_release import ACCUMULATES_IN_GRAD
from titan_launch.plan.communication import Traffic, on_line, rings_of
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice, plan_units, plan_untrained, with_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.clock import Clock, Seconds
from titan_launch.plan.memory.depth import Shortcut, find_shortcut, without_blocks
from titan_launch.plan.memory.ledger import Footprint, extrapolate, with_growth
from titan_launch.plan.memory.recordings import Recordings, TapesOf
from titan_launch.plan.memory.replay import RankModel, Replay, ReplayedStep, SecondModel
from titan_launch.plan.memory.tape import with_blocks
from titan_launch.plan.module_selection import checkpointed_modules
from titan_launch.plan.mup import width_scales
from titan_launch.plan.pipeline import counts_to_run, growth_factor, parts_on_rank, representative_ranks
from titan_launch.plan.speeds import Speeds, no_speeds
from titan_launch.plan.types import ModelPlan


class Parts(NamedTuple):
    """The parts of a model that one rank runs: the stages of a pipeline rank, or the whole model."""

    whole: ModelPlan
    """The plan of the whole model."""

    plans: tuple[ModelPlan, ...]
    """The plan of each part."""

    shortcut: Shortcut | None
    """The shallower models from which the prediction is extrapolated. None if there are several parts, or if the blocks
    do not repeat often enough."""


class ReplayEngine:
    """A predictor of the memory, traffic and times of a step, for the modes of each `Choice` (`plan.job`)."""

    def __init__(
        self,
        config: JobConfig,
        layout: Layout,
        kernels: Kernels,
        recordings: Recordings,
        speeds: Speeds | None = None,
    ):
        """`speeds`: None if no times are needed, or if the speeds of the device are not known."""
        # A compiled job is planned without compilation.
        self._config = config.model_copy(update={"compile": CompileConfig()})
        self._layout = layout
        self._kernels = kernels
        self._rings = rings_of(layout, config.planner.gpus_per_node)
        self._knows_times = speeds is not None and speeds.knows(self._rings.every)
        self._speeds = speeds or no_speeds()
        self._recordings = recordings
        self._counts = counts_to_run(config.parallelism, layout) if layout.pipeline > 1 else (1,)
        self._steps: dict[Choice, ReplayedStep] = {}
        self._plan = cache(self._planned)
        self._parts = cache(self._parts_of_rank)
        self._model = cache(self._model_of_rank)
        self._second = cache(self._second_model)

    def __call__(self, choice: Choice) -> Footprint:
        """Return the active memory of the rank with the highest peak. Raises ConfigError for the same jobs as a run."""
        return self._step(choice).footprint

    def traffic(self, choice: Choice) -> Traffic:
        """Return the traffic of a step, for the rank with the highest memory peak."""
        return self._step(choice).traffic

    def seconds(self, choice: Choice) -> Seconds | None:
        """Return the times of the slowest rank in a step; None if the speed of the device or of a link is not known."""
        return self._step(choice).seconds if self._knows_times else None

    def _step(self, choice: Choice) -> ReplayedStep:
        if choice not in self._steps:
            self._steps[choice] = self._predicted(choice)
        return self._steps[choice]

    def _planned(self, keep_params_unsharded: bool) -> ModelPlan:
        return plan_units(self._config, self._recordings.subject().inventory, keep_params_unsharded)

    def _parts_of_rank(
        self, keep_params_unsharded: bool, checkpointing: ActivationCheckpointConfig, rank: int
    ) -> Parts:
        plan = self._plan(keep_params_unsharded)
        plan = replace(plan, checkpointed=checkpointed_modules(plan.inventory, checkpointing))
        plans = parts_on_rank(plan, rank)
        return Parts(plan, plans, find_shortcut(plans[0]) if len(plans) == 1 else None)

    def _predicted(self, choice: Choice) -> ReplayedStep:
        plan = self._plan(bool(choice.accumulation.keep_params_unsharded))
        with garbage_collection_disabled():  # reference counts free all objects of a replay
            ranks = [self._of_rank(choice, rank) for rank in self._ranks(plan)]
        fullest = max(ranks, key=lambda step: step.footprint.peak_bytes)
        return replace(fullest, seconds=max(step.seconds for step in ranks))

    def _ranks(self, plan: ModelPlan) -> list[int]:
        return representative_ranks(plan, with_times=self._knows_times)

    def predict_ahead(self, choices: Sequence[Choice]) -> None:
        """Predict several choices, in up to four processes (`in_forks`), and keep the results for later calls."""
        self._steps |= zip(choices, in_forks(self._predicted, choices), strict=True)

    def record_ahead(self, choices: Iterable[Choice]) -> None:
        """Record the tapes and FLOPs for the predictions of several choices (`Recordings.record_ahead`)."""
        plans = [(choice, self._plan(bool(choice.accumulation.keep_params_unsharded))) for choice in choices]
        wanted = (self._wanted(choice, rank) for choice, plan in plans for rank in self._ranks(plan))
        self._recordings.record_ahead([tapes for tapes in dict.fromkeys(chain.from_iterable(wanted)) if tapes])

    def _wanted(self, choice: Choice, rank: int) -> tuple[TapesOf, TapesOf | None]:
        """Return the arguments of `Recordings.tapes` for a pipeline rank: for all microbatches, and for the first one.
        The second entry is None if the first microbatch does not differ from later ones."""
        checkpointing, layout = choice.activation_checkpoint, self._layout
        own, first = TapesOf(checkpointing, rank, self._counts), TapesOf(checkpointing, is_deferred=True)
        is_deferred = layout.num_microbatches > 1 and not choice.accumulation.row.reduce_scatters_each
        if not (ACCUMULATES_IN_GRAD and is_deferred and layout.pipeline == 1):
            return own, None
        # A shared parameter gets a gradient from each of its uses. In a microbatch without a reduction, autograd
        # converts each of these gradients to the reduce dtype before it adds them.
        modules = self._plan(bool(choice.accumulation.keep_params_unsharded)).inventory.modules
        is_tied = any(p.tied_to is not None and p.requires_grad for module in modules for p in module.parameters)
        return own, first if is_tied else None

    def _of_rank(self, choice: Choice, rank: int) -> ReplayedStep:
        layout, counts = self._layout, self._counts
        if layout.pipeline == 1:
            return self._replayed(choice, rank, 0, layout.num_microbatches)
        steps = [self._replayed(choice, rank, index, count) for index, count in enumerate(counts)]
        first, last, factor = steps[0], steps[-1], growth_factor(counts, layout.num_microbatches)
        footprint = with_growth(first.footprint, last.footprint, factor)
        traffic, seconds = on_line(first.traffic, last.traffic, factor), first.seconds.on_line(last.seconds, factor)
        return ReplayedStep(replace(footprint, pipeline_rank=rank), traffic, seconds)

    def _replayed(self, choice: Choice, rank: int, index: int, num_microbatches: int) -> ReplayedStep:
        """Return the prediction from the tape at `index` of the recording: extrapolated from replays of two shallower
        models if possible, else from a replay of the whole model."""
        config, is_kept = with_choice(self._config, choice), bool(choice.accumulation.keep_params_unsharded)
        wanted, first = self._wanted(choice, rank)
        shortcut = self._parts(is_kept, wanted.checkpointing, rank).shortcut

        def at(removed: tuple[str, ...]) -> ReplayedStep:
            model, clock = self._model(is_kept, wanted, first, index, removed), Clock(self._speeds, self._rings)
            return Replay(config, model, self._kernels, self._second(), clock).step(num_microbatches)

        if shortcut is not None and self._recordings.tapes(wanted)[index].parts[0].likes:
            shorter, longer = at(shortcut.removed_from_shorter), at(shortcut.removed_from_longer)
            footprint = extrapolate(shorter.footprint, longer.footprint, shortcut.factor)
            if footprint is not None:
                # Blocks with equal signatures may compute differently: attention may have a window in some blocks. So
                # the operations of all blocks are summed, instead of extrapolated.
                work, microbatches = self._recordings.tapes(wanted)[index].work, num_microbatches
                recorded = self._speeds.of_work(work, microbatches if self._layout.pipeline == 1 else 1)
                seconds = shorter.seconds.on_line(longer.seconds, shortcut.factor).with_recorded(*recorded)
                return ReplayedStep(footprint, on_line(shorter.traffic, longer.traffic, shortcut.factor), seconds)
        return at(())

    def _model_of_rank(
        self, keep_params_unsharded: bool, wanted: TapesOf, first: TapesOf | None, index: int, removed: tuple[str, ...]
    ) -> RankModel:
        """Return the input of a replay of one rank, without the `removed` blocks. `wanted`, `first`: result of
        `_wanted`. `index`: index of the tape in the recording `wanted`."""
        parts = self._parts(keep_params_unsharded, wanted.checkpointing, wanted.pipeline_rank)
        plans = tuple(without_blocks(plan, removed) for plan in parts.plans) if removed else parts.plans
        tape = with_blocks(self._recordings.tapes(wanted)[index], removed)
        begin = None if first is None else with_blocks(self._recordings.tapes(first)[0], removed)
        scales = width_scales(self._config)
        return RankModel(parts.whole, plans, tape, begin, self._layout, self._config.optimizer, scales)

    def _second_model(self) -> SecondModel | None:
        found, inventory = self._config.loss.frozen_model(), self._recordings.subject().second
        if found is None or inventory is None:
            return None
        own = frozen_job(self._config, found)
        return SecondModel(own, plan_untrained(own, inventory))
