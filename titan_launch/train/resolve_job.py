"""The decisions of a run, taken before anything is allocated or written."""

from __future__ import annotations

from dataclasses import dataclass

from titan_launch.config.job import JobConfig
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.build import BuiltModel
from titan_launch.optim.groups import check_param_groups
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.job import with_unsharded_parameters
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size
from titan_launch.plan.module_selection import check_shards
from titan_launch.plan.types import ModelPlan
from titan_launch.train.auto_mode import hardware_of_run, plan_precision, resolve_auto_modes
from titan_launch.train.measure import check_profiling
from titan_launch.train.model import build_on_all_ranks
from titan_launch.train.run_folder.attempt import Attempt


@dataclass(frozen=True)
class ResolvedJob:
    """The job with every decision taken, the same on all ranks.

    The job is here twice. Build and train with `config`. Use `requested` for what outlives this start of the ranks:
    the run folder, its checkpoints, and comparisons with them.
    """

    config: JobConfig
    """The job as resolved: global batch size set, modes in place of `auto`, `parallelism` completed for these ranks."""

    requested: JobConfig
    """The same job with `parallelism` as the user requested it. It resolves differently on another number of ranks."""

    reason: str | None
    """Why the modes were chosen; None if the job has no `auto`."""

    layout: Layout
    hardware: Hardware
    built: BuiltModel
    """The model, on the meta device."""

    plan: ModelPlan
    attempt: Attempt


def resolve_job(config: JobConfig, ranks: Ranks, attempt: Attempt) -> ResolvedJob:
    """Divide the ranks, build the model, decide on modes, and plan units and dtypes; collective.

    A run that resumes keeps the modes in its folder. Raises ConfigError, on all ranks alike, if the job does not go
    with the ranks, the devices or the model.
    """
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    job = with_global_batch_size(config, layout)
    config = with_unsharded_parameters(job, layout)
    built = build_on_all_ranks(config, ranks)
    check_param_groups(built.module, config.optimizer, built.head)
    check_profiling(config.comm, ranks.device)
    hardware = hardware_of_run(config, ranks)
    config, reason = resolve_auto_modes(config, layout, built, hardware, config.job.run_folder, attempt, ranks)
    plan = plan_precision(config, built)
    check_shards(config.float8, plan, layout)
    requested = config.model_copy(update={"parallelism": job.parallelism})
    return ResolvedJob(config, requested, reason, layout, hardware, built, plan, attempt)
