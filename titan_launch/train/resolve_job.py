"""Decisions about a run, made before anything is allocated or written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from titan_launch.checkpoint.state import Progress
from titan_launch.config.job import JobConfig
from titan_launch.distributed.process_group import Ranks
from titan_launch.loss.user_function import import_loss
from titan_launch.models.build import BuiltModel
from titan_launch.optim.groups import check_param_groups, check_stacks
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.job import with_unsharded_parameters
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size
from titan_launch.plan.module_selection import check_shards
from titan_launch.plan.types import ModelPlan
from titan_launch.train.batches import RunData, with_steps
from titan_launch.train.mode_choice import hardware_of_run, plan_precision, resolve_auto_modes, resolve_batch_size
from titan_launch.train.model import build_on_all_ranks
from titan_launch.train.run_folder.attempt import Attempt


@dataclass(frozen=True)
class ResolvedJob:
    """The job after all decisions. It is equal on all ranks, except for the memory of the host in `hardware` (on CPUs).

    Build and train with `config`. Use `requested` for the run folder, its checkpoints and comparisons with them,
    because a later start may have another number of ranks.
    """

    config: JobConfig
    """The resolved job: the global batch size is set, `parallelism` is complete, and the chosen modes of gradient
    accumulation and activation checkpointing replace `auto`. After `resolve_steps`, `training.steps` is also set."""

    requested: JobConfig
    """The same job with `parallelism` as the user wrote it: unset degrees still depend on the number of ranks."""

    reason: str | None
    """Text with the reason for the chosen modes; None if the job has no `auto`."""

    layout: Layout
    hardware: Hardware
    plan: ModelPlan
    attempt: Attempt


def resolve_job(config: JobConfig, ranks: Ranks, attempt: Attempt) -> tuple[ResolvedJob, BuiltModel]:
    """Choose the microbatch size, divide the ranks, build the model on the meta device, choose the modes, and plan
    units and dtypes. Return the job and the model. Collective.

    A resumed run keeps the modes that its run folder records, if the job still allows them. Raises ConfigError on all
    ranks if the job does not fit the ranks, the devices or the model, and UserError if the job does not fit into
    memory.
    """
    hardware = hardware_of_run(config, ranks)
    config = resolve_batch_size(config, hardware, ranks)
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    job = with_global_batch_size(config, layout)
    config = with_unsharded_parameters(job, layout)
    built = build_on_all_ranks(config, ranks)
    check_param_groups(built.module, config.optimizer, built.head)
    check_stacks(built.module, config.optimizer, built.head, layout)
    import_loss(config.loss)
    config, reason = resolve_auto_modes(config, layout, built, hardware, attempt)
    plan = plan_precision(config, built)
    check_shards(config.float8, plan, layout)
    requested = config.model_copy(update={"parallelism": job.parallelism})
    return ResolvedJob(config, requested, reason, layout, hardware, plan, attempt), built


def resolve_steps(job: ResolvedJob, data: RunData, progress: Progress | None = None) -> ResolvedJob:
    """Return the job with `training.steps` computed from `training.epochs`. A job without epochs is unchanged. Call
    this function when the data is open, and again with the progress after a resume. Raises ConfigError as `with_steps`
    does."""
    config, requested = (
        with_steps(each, data, job.layout.global_batch_size, progress) for each in (job.config, job.requested)
    )
    return replace(job, config=config, requested=requested)
