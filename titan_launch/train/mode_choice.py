"""Choice of the values that replace "auto": gradient accumulation mode, activation checkpointing mode, microbatch size.
All ranks choose the same, before anything is allocated. A resumed run keeps its modes if possible."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.data import keys_of_packed_documents
from titan_launch.config.rules.precision import ACCUMULATION_RULES
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import ConfigError, RunError, UserError, config_error, format_key
from titan_launch.core.torch_release import is_tested_release
from titan_launch.distributed.collectives import on_all_ranks, on_rank_0
from titan_launch.distributed.process_group import Ranks
from titan_launch.models.build import BuiltModel, take_inventory
from titan_launch.models.documents import check_documents
from titan_launch.models.parallel_plans import check_divisions
from titan_launch.parallel.batchnorm import check_batch_norms
from titan_launch.plan.auto_mode import is_auto_batch, possible_batch_sizes, with_local_batch_size
from titan_launch.plan.hardware import GIB, Hardware, hardware_of
from titan_launch.plan.job import (
    Choice,
    configured_choice,
    is_auto,
    plan_job,
    possible_choices,
    with_choice,
)
from titan_launch.plan.layout import Layout
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.train.forward import check_signature, find_output_layer
from titan_launch.train.run_folder.attempt import Attempt
from titan_launch.train.run_folder.folder import recorded_modes
from titan_launch.train.trace_subprocess import TraceProcess


def inspect_model(config: JobConfig, built: BuiltModel) -> Inventory:
    """Return the table of a model's modules. Raises ConfigError for a forward with the wrong arguments. Also raises
    ConfigError if the model does not support the job's packed documents, BatchNorm statistics, tensor parallelism or
    context parallelism."""
    check_signature(built.module, config.data.unit, config.model.loss is not None)
    for key, value in keys_of_packed_documents(config):
        check_documents(built.module, config.training.seq_len, key, value)
    check_batch_norms(built.module, config.batchnorm)
    check_divisions(built, config)
    output_layer = built.head[-1] if built.head else None
    if output_layer is None and config.loss.chunks > 1 and config.data.unit == "tokens":
        output_layer = find_output_layer(built.module, config.training.seq_len)
    inventory = take_inventory(built.module, built.blocks, built.head, built.embeddings, built.pipeline_order)
    return replace(inventory, output_layer=output_layer, blocks_origin=built.blocks_origin)


def plan_precision(config: JobConfig, built: BuiltModel) -> ModelPlan:
    """Return the plan of a model on the meta device: its FSDP2 units and their dtypes. Raises ConfigError as
    `inspect_model` and `plan_job` do."""
    return plan_job(config, inspect_model(config, built))


_log = logging.getLogger(__name__)

Decision = tuple[Choice, str]
"""The modes that replace `auto`, and a text that names them and the reason."""


def hardware_of_run(config: JobConfig, ranks: Ranks) -> Hardware:
    """Return the planner's assumptions about the devices of this run. Collective. On GPUs, the memory limit is the
    memory of the smallest device. On CPUs, the memory limit is the host's memory divided by the ranks on the host, or
    the limit of this process (`ulimit`) if that is lower. Keys of `[planner]` may set another limit."""
    if ranks.device.type != "cuda":
        return hardware_of(config, ranks.on_host, kernels="cpu")
    properties = torch.cuda.get_device_properties(ranks.device)
    memory = torch.tensor(properties.total_memory, dtype=torch.int64, device=ranks.device)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN)
    return hardware_of(config, ranks.on_host, "cuda", properties.name, memory.item() / GIB)


def resolve_batch_size(config: JobConfig, hardware: Hardware, ranks: Ranks) -> JobConfig:
    """Return the job with a number in place of `training.local_batch_size = "auto"`. A job without this `auto` is
    unchanged. Collective.

    Rank 0 chooses the largest microbatch that fits by the plan. Then each rank starts a trial of this microbatch:
    three training steps in a process of its own. As long as a rank runs out of memory, all ranks try the next smaller
    microbatch. With expert parallelism there is no trial. Raises UserError on all ranks if no microbatch fits.
    """
    if not is_auto_batch(config):
        return config
    if ranks.is_rank_0:
        _log.info("auto: planning the job with each possible microbatch size")
    size = on_rank_0(lambda: int(_planned(config, hardware, ranks.world_size)["local_batch_size"]))
    if config.parallelism.expert_parallel_degree > 1:
        reason = "with expert parallelism, a trial gets no tokens from other ranks"
        _log.info("auto: microbatches of %d samples, without a trial: %s", size, reason)
        return with_local_batch_size(config, size)
    for tried in reversed([other for other in possible_batch_sizes(config, ranks.world_size) if other <= size]):
        resized = with_local_batch_size(config, tried)
        if all(on_all_ranks(lambda resized=resized: _is_enough(resized, hardware, ranks))):  # type: ignore[misc]
            _log.info("auto: microbatches of %d samples; a trial of three steps fitted into memory", tried)
            return resized
        _log.warning("auto: microbatches of %d samples were planned to fit, but ran out of memory in a trial", tried)
    reason = "with every microbatch size, a rank ran out of memory in a trial of three training steps"
    raise config_error(("training", "local_batch_size"), reason, "auto")


def _is_enough(config: JobConfig, hardware: Hardware, ranks: Ranks) -> bool:
    with ExitStack() as stack:
        trial = TraceProcess(config, ranks.world_size, hardware, stack, (ranks.rank, ranks.device))
        return trial.has_enough_memory()


def _planned(config: JobConfig, hardware: Hardware, world_size: int) -> dict[str, Any]:
    """Return the values that the planner chooses for each `auto`, by key of the job."""
    with ExitStack() as stack:
        resolved: dict[str, Any] = TraceProcess(config, world_size, hardware, stack).result()["resolved"]
    return resolved


def resolve_auto_modes(
    config: JobConfig, layout: Layout, built: BuiltModel, hardware: Hardware, attempt: Attempt
) -> tuple[JobConfig, str | None]:
    """Return the job with modes in place of `auto`, and the reason for these modes. Collective.

    If the job has no `auto`, return the same job and None. A resumed run keeps the modes that it began with, if the job
    still allows them. Otherwise rank 0 chooses the modes for all ranks. Raises UserError on all ranks if no choice of
    modes fits into memory. Nothing is written or allocated before this error.
    """
    if not is_auto(config):
        return config, None
    choice, reason = on_rank_0(lambda: _decide(config, layout, built, hardware, attempt))
    _log.info("auto: %s", reason)
    return with_choice(config, choice), reason


def _decide(config: JobConfig, layout: Layout, built: BuiltModel, hardware: Hardware, attempt: Attempt) -> Decision:
    try:
        return _recorded(config, attempt) or _resolved(config, layout, built, hardware)
    except ConfigError:
        raise
    except (UserError, RunError) as error:
        raise UserError(f'{error}\nor set a mode instead of "auto"') from error


def _recorded(config: JobConfig, attempt: Attempt) -> Decision | None:
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
    return choice, f"{choice.label}, because the run began with it"


def _obstacles(config: JobConfig, choice: Choice) -> Iterator[str]:
    wanted, kept = config.gradient_accumulation.keep_params_unsharded, choice.accumulation.keep_params_unsharded
    if wanted is not None and wanted != kept:
        yield "gradient_accumulation.keep_params_unsharded has changed"
    for rule in ACCUMULATION_RULES:
        for problem in rule(with_choice(config, choice)):
            yield f"{format_key(problem.key)}: {problem.reason}"


def _resolved(config: JobConfig, layout: Layout, built: BuiltModel, hardware: Hardware) -> Decision:
    if not is_tested_release():
        return _least_memory(config, layout, inspect_model(config, built))
    _log.info("auto: planning the job")
    resolved = _planned(config, hardware, layout.world_size)
    accumulation = GradientAccumulationConfig.model_validate(resolved["gradient_accumulation"])
    checkpointing = ActivationCheckpointConfig.model_validate(resolved["activation_checkpoint"])
    return Choice(accumulation, checkpointing), str(resolved["reason"])


def _least_memory(config: JobConfig, layout: Layout, inventory: Inventory) -> Decision:
    """Return the modes that need the least memory: the strongest activation checkpointing that the job allows, with the
    first gradient accumulation mode of `possible_choices`."""
    own, _ = possible_choices(config, layout, inventory, only_own=True)
    choice = next(choice for choice in own if choice.activation_checkpoint == own[-1].activation_checkpoint)
    reason = "because it takes the least memory; on an untested release of PyTorch the planner cannot compare the modes"
    return choice, f"{choice.label}, {reason}"
