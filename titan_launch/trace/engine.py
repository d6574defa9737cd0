"""The memory and traffic of any model's step, from a trace: the engine of the planner that needs torch."""

from __future__ import annotations

from dataclasses import replace

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import CompileConfig
from titan_launch.core.errors import UserError
from titan_launch.core.torch_release import NEWEST_TESTED, is_tested_release, torch_release
from titan_launch.models.build import build_model
from titan_launch.plan.communication import Traffic
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice, plan_job, with_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.ledger import Footprint
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.trace.depth import trace_rank
from titan_launch.trace.step import TracedStep
from titan_launch.train.auto_mode import inspect_model


class TraceEngine:
    """Traces a job's step for each choice, once; the operations of the model itself, also where it is compiled."""

    def __init__(self, config: JobConfig, layout: Layout, kernels: Kernels):
        self._config = config.model_copy(update={"compile": CompileConfig()})
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
        """What that rank communicates in a step, counted: the collectives that FSDP2 called for its units, and what it
        exchanged with ranks that work on the same samples.

        Raises as `__call__` does.
        """
        return self._step(choice).traffic

    def _step(self, choice: Choice) -> TracedStep:
        if choice not in self._known:
            config = with_choice(self._config, choice)
            if self._inventory is None:
                self._inventory = inspect_model(config, build_model(config.model, config.training.seq_len))
            plan = plan_job(config, self._inventory)
            self._known[choice] = max(
                (self._trace(config, plan, pipeline_rank) for pipeline_rank in representative_ranks(plan)),
                key=lambda traced: traced.footprint.peak_bytes,
            )
        return self._known[choice]

    def _trace(self, config: JobConfig, plan: ModelPlan, pipeline_rank: int) -> TracedStep:
        rank = pipeline_rank * self._layout.ranks_per_stage
        traced = trace_rank(config, plan, self._layout, self._kernels, rank)
        if not plan.stages:
            return traced
        return replace(traced, footprint=replace(traced.footprint, pipeline_rank=pipeline_rank))


def representative_ranks(plan: ModelPlan) -> list[int]:
    """The ranks along the pipeline one of which holds the most: the first, where most microbatches have begun before a
    backward ends, the last, which has the logits, and the one with the most parameters."""
    parameters: dict[int, int] = {}
    for stage in plan.stages:
        parameters[stage.rank] = parameters.get(stage.rank, 0) + stage.num_parameters
    if not parameters:
        return [0]
    return sorted({0, max(parameters), max(parameters, key=lambda rank: parameters[rank])})


def trace_engine(config: JobConfig, layout: Layout, kernels: Kernels) -> TraceEngine:
    """Return an engine for any model that the job can build. The process must have no process group.

    `kernels`: the device family whose memory is predicted. `trace.cuda_kernels` stands in for CUDA's.
    Raises UserError on an untested release of PyTorch.
    """
    if not is_tested_release():
        release, newest = (".".join(map(str, numbers)) for numbers in (torch_release(), NEWEST_TESTED))
        reason = f"torch {release} is newer than the newest release that was tested, {newest}, so jobs cannot be traced"
        raise UserError(f"{reason}; plan with an older release")
    return TraceEngine(config, layout, kernels)
