"""Decisions about a run, which are made before anything is allocated or written, and are equal on all ranks. They
include the values that replace "auto": gradient accumulation mode, activation checkpointing mode, microbatch size."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from titan_launch.checkpoint.state import Progress
from titan_launch.config.job import JobConfig
from titan_launch.config.rules.precision import ACCUMULATION_RULES
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import ConfigError, RunError, UserError, config_error, format_key
from titan_launch.core.terminal import counted
from titan_launch.core.torch_release import is_tested_release
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0
from titan_launch.distributed.process_group import Ranks
from titan_launch.loss.user_function import import_loss
from titan_launch.models.build import BuiltModel
from titan_launch.plan.auto_mode import no_possible_choice, possible_batch_sizes
from titan_launch.plan.hardware import GIB, Hardware, hardware_of
from titan_launch.plan.job import (
    Choice,
    check_plan,
    configured_choice,
    is_auto,
    is_auto_batch,
    plan_job,
    plan_units,
    possible_choices,
    with_choice,
    with_local_batch_size,
    with_unsharded_parameters,
)
from titan_launch.plan.layout import Layout, plan_layout, with_global_batch_size
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.train.batches import RunData, with_steps
from titan_launch.train.model import build_on_all_ranks, inspect_model
from titan_launch.train.run_folder.attempt import Attempt
from titan_launch.train.run_folder.folder import recorded_modes
from titan_launch.train.trace_subprocess import TraceProcess

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ResolvedJob:
    """The job after all decisions. It is equal on all ranks, except for the memory of the host in `hardware` (on CPUs).

    Build and train with `config`. Use `requested` for everything that is written to the run folder or compared with it,
    because a later start may have another number of ranks.
    """

    config: JobConfig
    """The resolved job: the global batch size is set, `parallelism` is complete, and the chosen modes of gradient
    accumulation and activation checkpointing replace `auto`. After `resolve_steps`, `training.steps` is also set."""

    requested: JobConfig
    """The same job with `parallelism` as the user wrote it: unset degrees still depend on the number of ranks."""

    reason: str | None
    """Text with the reason for the chosen modes; None if no mode of the job is `auto`."""

    layout: Layout
    hardware: Hardware
    plan: ModelPlan
    attempt: Attempt


def resolve_job(config: JobConfig, ranks: Ranks, attempt: Attempt) -> tuple[ResolvedJob, BuiltModel]:
    """Choose the microbatch size, divide the ranks, build the model on the meta device, choose the modes, and plan
    units and dtypes. Return the job and the model. Collective.

    A resumed run keeps the modes that its run folder records, if the job still allows them. Raises ConfigError on all
    ranks if the job does not fit the ranks, the devices or the model. Raises UserError on all ranks if the job does not
    fit into memory.
    """
    hardware = _hardware_of_run(config, ranks)
    config = _resolve_batch_size(config, hardware, ranks)
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    job = with_global_batch_size(config, layout)
    config = with_unsharded_parameters(job, layout)
    built = build_on_all_ranks(config, ranks)
    import_loss(config.loss)
    inventory = inspect_model(config, built)
    check_plan(config, plan_units(config, inventory, keep_params_unsharded=False), layout)
    config, reason = _resolve_auto_modes(config, layout, inventory, hardware, attempt)
    plan = plan_job(config, inventory)
    requested = config.model_copy(update={"parallelism": job.parallelism})
    return ResolvedJob(config, requested, reason, layout, hardware, plan, attempt), built


def resolve_steps(job: ResolvedJob, data: RunData, progress: Progress | None = None) -> ResolvedJob:
    """Return the job with `training.steps` computed from `training.epochs`. A job without epochs is unchanged. Call
    this function when the data is open, and again with the progress after a resume. Raises ConfigError as `with_steps`
    does."""
    config, requested = (with_steps(each, data, progress) for each in (job.config, job.requested))
    return replace(job, config=config, requested=requested)


_Decision = tuple[Choice, str]
"""The modes that replace `auto`, and a text that names them and the reason."""


def _hardware_of_run(config: JobConfig, ranks: Ranks) -> Hardware:
    """Return the planner's assumptions about the devices of this run. Collective. On GPUs, the memory limit is the
    memory of the smallest device. On CPUs, the memory limit is the host's memory divided by the number of ranks on the
    host, or a lower limit of this process (`ulimit`). Keys of `[planner]` may set another limit."""
    if ranks.device.type != "cuda":
        return hardware_of(config, ranks.on_host, kernels="cpu")
    properties = torch.cuda.get_device_properties(ranks.device)
    memory = torch.tensor(properties.total_memory, dtype=torch.int64, device=ranks.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN)
    return hardware_of(config, ranks.on_host, "cuda", properties.name, memory.item() / GIB)


def _resolve_batch_size(config: JobConfig, hardware: Hardware, ranks: Ranks) -> JobConfig:
    """Return the job with a number in place of `training.local_batch_size = "auto"`. A job with another value is
    unchanged. Collective.

    Rank 0 chooses the largest microbatch that fits by the plan. Then each rank starts a trial of this microbatch:
    three training steps in a separate process. As long as a rank runs out of memory, all ranks try the next smaller
    microbatch. With expert parallelism there is no trial. Raises UserError on all ranks if no microbatch fits.
    """
    if not is_auto_batch(config):
        return config
    if ranks.is_rank_0:
        _log.info("auto: planning the job with each possible microbatch size")
    size = on_rank_0(lambda: int(_planned(config, hardware, ranks.world_size)["local_batch_size"]))
    if config.parallelism.expert_parallel_degree > 1:
        reason = "with expert parallelism, a trial gets no tokens from other ranks"
        _log.info("auto: microbatches of %s, without a trial: %s", counted(size, "sample"), reason)
        return with_local_batch_size(config, size)
    for tried in reversed([other for other in possible_batch_sizes(config, ranks.world_size) if other <= size]):
        resized = with_local_batch_size(config, tried)
        if all(on_all_ranks(partial(_is_enough, resized, hardware, ranks))):
            _log.info("auto: microbatches of %s; a trial of three steps fitted into memory", counted(tried, "sample"))
            return resized
        message = "auto: microbatches of %s fit into memory by the plan, but a trial ran out of memory"
        _log.warning(message, counted(tried, "sample"))
    full = "" if config.activation_checkpoint.mode == "full" else 'activation_checkpoint.mode = "full", '
    reason = (
        "with every microbatch size, a rank ran out of memory in a trial of three training steps; try "
        f"{full}a smaller training.seq_len, or more ranks to shard over"
    )
    raise config_error(("training", "local_batch_size"), reason, "auto")


def _is_enough(config: JobConfig, hardware: Hardware, ranks: Ranks) -> bool:
    with ExitStack() as stack:
        trial = TraceProcess(config, ranks.world_size, hardware, stack, (ranks.rank, ranks.device))
        return trial.has_enough_memory()


def _planned(config: JobConfig, hardware: Hardware, world_size: int) -> dict[str, Any]:
    """Return the entry `resolved` of the plan: local batch size, modes and reason. The planner replaces each `auto`."""
    with ExitStack() as stack:
        resolved: dict[str, Any] = TraceProcess(config, world_size, hardware, stack).result()["resolved"]
    return resolved


def _resolve_auto_modes(
    config: JobConfig, layout: Layout, inventory: Inventory, hardware: Hardware, attempt: Attempt
) -> tuple[JobConfig, str | None]:
    """Return the job with modes in place of `auto`, and the reason for these modes. Collective.

    If no mode is `auto`, return the same job and None. A resumed run keeps the modes that it began with, if the job
    still allows them. Otherwise rank 0 chooses the modes for all ranks. Raises UserError on all ranks if no choice of
    modes fits into memory. Nothing is written or allocated before this error.
    """
    if not is_auto(config):
        return config, None
    choice, reason = on_rank_0(lambda: _decide(config, layout, inventory, hardware, attempt))
    _log.info("auto: %s", reason)
    return with_choice(config, choice), reason


def _decide(config: JobConfig, layout: Layout, inventory: Inventory, hardware: Hardware, attempt: Attempt) -> _Decision:
    try:
        return _recorded(config, attempt) or _resolved(config, layout, inventory, hardware)
    except ConfigError:
        raise
    except (UserError, RunError) as error:
        keys = "gradient_accumulation.mode and activation_checkpoint.mode"
        raise UserError(f'{error}\nto run without the planner, set {keys} to values other than "auto"') from error


def _recorded(config: JobConfig, attempt: Attempt) -> _Decision | None:
    """Return the modes that a resumed run began with. Return None if no run is resumed, or if the job no longer allows
    these modes. Modes sum gradients in different orders, so a change of modes would change the results."""
    recorded = recorded_modes(config, attempt)
    if recorded is None:
        return None
    own_accumulation, own_checkpointing = config.gradient_accumulation, config.activation_checkpoint
    accumulation = recorded.accumulation if own_accumulation.mode == "auto" else own_accumulation
    checkpointing = recorded.activation_checkpoint if own_checkpointing.mode == "auto" else own_checkpointing
    choice = configured_choice(with_choice(config, Choice(accumulation, checkpointing)))
    obstacle = next(_obstacles(config, choice), None)
    if obstacle is not None:
        _log.info(
            "auto: the run began with %s, which the job no longer allows (%s); modes are chosen again",
            choice.label,
            obstacle,
        )
        return None
    return choice, f"{choice.label}, because the run began with these modes"


def _obstacles(config: JobConfig, choice: Choice) -> Iterator[str]:
    wanted, kept = config.gradient_accumulation.keep_params_unsharded, choice.accumulation.keep_params_unsharded
    if wanted is not None and wanted != kept:
        yield "gradient_accumulation.keep_params_unsharded has changed"
    for rule in ACCUMULATION_RULES:
        for problem in rule(with_choice(config, choice)):
            yield f"{format_key(problem.key)}: {problem.reason}"


def _resolved(config: JobConfig, layout: Layout, inventory: Inventory, hardware: Hardware) -> _Decision:
    if not is_tested_release():
        return _least_memory(config, layout, inventory)
    _log.info("auto: planning the job")
    resolved = _planned(config, hardware, layout.world_size)
    accumulation = GradientAccumulationConfig.model_validate(resolved["gradient_accumulation"])
    checkpointing = ActivationCheckpointConfig.model_validate(resolved["activation_checkpoint"])
    return Choice(accumulation, checkpointing), str(resolved["reason"])


def _least_memory(config: JobConfig, layout: Layout, inventory: Inventory) -> _Decision:
    """Return the modes that need the least memory: the strongest activation checkpointing that the job allows, with the
    first gradient accumulation mode of `possible_choices`. Raises ConfigError if no choice of modes is possible."""
    own, notes = possible_choices(config, layout, inventory, only_own=True)
    if not own:
        raise no_possible_choice(config, notes)
    choice = next(choice for choice in own if choice.activation_checkpoint == own[-1].activation_checkpoint)
    reason = (
        "because these modes need the least memory; on an untested release of PyTorch, the planner cannot compare modes"
    )
    return choice, f"{choice.label}, {reason}"
