"""A dry run: one process builds what one rank of a run would build, with fake tensors and without other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.parallelism import CompileConfig
from titan_launch.core.terminal import counted
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.optim.clip import clip_grad_norm
from titan_launch.parallel.pipeline import parts
from titan_launch.plan.communication import link_traffic_of_step
from titan_launch.plan.hardware import Hardware
from titan_launch.plan.job import check_plan
from titan_launch.plan.layout import Layout
from titan_launch.plan.report.modes import estimate_reserved, judge
from titan_launch.plan.report.table import format_gib, format_limit
from titan_launch.plan.report.unit_table import summary_of_batch
from titan_launch.trace.step import TracedStep, assembled_without_values
from titan_launch.trace.trace_engine import check_release, trace_rank
from titan_launch.train.model import AssembledModel, build_job_model, build_model_optimizer, plan_precision


def dry_run(config: JobConfig, layout: Layout, hardware: Hardware, rank: int) -> str:
    """Build what `rank` would build in a run, trace a step, and return a text that describes the rank.

    The mesh, the FSDP2 units, the pipeline stages, the optimizer and its update are the same as in a run. Forward and
    backward are traced as in `trace_rank`. Nothing is written. No data is read, except one image if only the data
    determines the size of the images. The job must not have a mode `auto`. The process must have no process group.

    Raises ConfigError for a model that cannot be traced, and for a job that a run rejects before it allocates memory.
    Raises UserError on an untested release of PyTorch.
    """
    check_release()
    built = build_job_model(config)
    plan = plan_precision(config, built)
    check_plan(config, plan, layout)
    with assembled_without_values(config, built, plan, layout, hardware.kernels, rank) as (model, _):
        optimizer = build_model_optimizer(config, model)
        _update(model, optimizer)
        held = list(_describe_rank(model, optimizer))
    eager = config.model_copy(update={"compile": CompileConfig()})  # compilation is slow and does not change the text
    traced = trace_rank(eager, replace(plan, compiled=()), layout, hardware.kernels, rank)
    batch = [f"{name}: {value}" for name, value in summary_of_batch(layout)]
    lines = [*batch, *held, *_describe_step(traced, layout, hardware)]
    return "\n".join([*lines, "nothing was trained or written"])


def _update(model: AssembledModel, optimizer: Optimizer) -> None:
    """Set an empty gradient for each trained parameter, clip, and update the parameters. This finds parameters that
    PyTorch cannot process together."""
    for parameter in model.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)
    clip_grad_norm(model.module.parameters(), 1.0, model.mesh.pipeline_group)
    optimizer.step()


def _describe_rank(model: AssembledModel, optimizer: Optimizer) -> Iterator[str]:
    mesh, plan = model.mesh, model.plan
    names, coordinate = mesh.ranks.mesh_dim_names, mesh.ranks.get_coordinate()
    assert names is not None and coordinate is not None
    degrees = zip(names, coordinate, mesh.ranks.mesh.shape, strict=True)
    where = ", ".join(f"{name} {index} of {degree}" for name, index, degree in degrees)
    yield f"rank {torch.distributed.get_rank()}: {where}"
    for stage in plan.stages:
        if stage.rank == coordinate[0]:
            yield f"stage {stage.index} of {len(plan.stages)}: {stage.extent}"
    parameters = list(model.module.parameters())
    num_units = sum(len(part.units) for _, part in parts(model.module, plan))
    yield (
        f"model: {plan.inventory.num_parameters:,} parameters; on this rank: {counted(num_units, 'FSDP2 unit')}, "
        f"{sum(local_tensor(p).numel() for p in parameters):,} elements of parameters, {_gib(parameters)}"
    )
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    yield f"optimizer: {counted(len(optimizer.param_groups), 'parameter group')}, {_gib(values)} of state"


def _describe_step(traced: TracedStep, layout: Layout, hardware: Hardware) -> Iterator[str]:
    footprint, sent = traced.footprint, link_traffic_of_step(traced.traffic, layout, hardware.gpus_per_node)
    yield f"peak memory of a step: {format_gib(footprint.peak_bytes)} GiB active ({footprint.peak_point})"
    reserved = estimate_reserved(footprint, hardware)
    verdict = judge(footprint, reserved, hardware)
    if verdict is not None:
        yield f"memory: about {format_gib(reserved)} GiB of {format_limit(hardware)}: {verdict}"
    traffic = f"about {format_gib(sent.within)} GiB within a node and {format_gib(sent.across)} GiB across nodes"
    yield f"link traffic of a step: {traffic}"


def _gib(tensors: Iterable[Tensor]) -> str:
    return f"{format_gib(sum(local_tensor(tensor).nbytes for tensor in tensors))} GiB"
