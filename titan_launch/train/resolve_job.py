"""What a run is, settled before anything is allocated or written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_launch.config.job import JobConfig
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.build import BuiltModel
from titan_launch.optim.groups import check_param_groups
from titan_launch.plan.float8 import check_shards
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.job import with_whole_parameters
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size
from titan_launch.plan.types import ModelPlan
from titan_launch.train.auto_mode import hardware_of_run, plan_precision, resolve_auto_modes
from titan_launch.train.measure import check_profiling
from titan_launch.train.model import build_on_all_ranks
from titan_launch.train.run_folder.attempt import Attempt


@dataclass(frozen=True)
class ResolvedJob:
    """What all ranks know of a run when they begin to build it."""

    config: JobConfig
    """With its global batch size, with modes in the place of `auto`, and with what follows from the number of ranks."""

    recorded: JobConfig
    """The same without that: on other ranks something else follows."""

    reason: str | None
    """Why the modes are what they are; None where the job left nothing open."""

    layout: Layout
    hardware: Hardware
    built: BuiltModel
    """The model, on the meta device."""

    plan: ModelPlan


def resolve_job(config: JobConfig, ranks: Ranks, folder: Path, attempt: Attempt) -> ResolvedJob:
    """Divide the ranks, build the model, decide on modes, and plan units and dtypes; collective.

    `folder`: the run's, whose modes are kept where it goes on. Raises ConfigError, on all ranks alike, for whatever of
    the job does not go with the ranks, the devices or the model.
    """
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    job = with_global_batch_size(config, layout)
    config = with_whole_parameters(job, layout)
    built = build_on_all_ranks(config, ranks)
    check_param_groups(built.module, config.optimizer, built.head)
    check_profiling(config.comm, ranks.device)
    hardware = hardware_of_run(config, ranks)
    config, reason = resolve_auto_modes(config, layout, built, hardware, folder, attempt, ranks)
    plan = plan_precision(config, built)
    check_shards(config.float8, plan, layout)
    recorded = config.model_copy(update={"parallelism": job.parallelism})
    return ResolvedJob(config, recorded, reason, layout, hardware, built, plan)
