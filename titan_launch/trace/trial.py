"""A trial: three training steps of one rank with real tensors on its device, without other ranks.

Collectives return at once, so the values are meaningless, but the allocations on the device are those of a run. So a
trial shows whether a rank has enough memory. On a phantom GPU (`phantom_gpu`), a trial measures what the allocator of a
GPU would reserve.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import RunError
from titan_launch.core.patches import replaced
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.mesh import build_mesh
from titan_launch.loss.build import build_loss
from titan_launch.optim.clip import clip_grad_norm
from titan_launch.optim.ema import build_ema
from titan_launch.optim.registry import replicas_of
from titan_launch.parallel import expert_parallel
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.parallel.pipeline import pipeline_of
from titan_launch.plan.experts import equal_parts, received_rows
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.ledger import MICROBATCHES
from titan_launch.trace.fake_group import fake_process_group, silence
from titan_launch.trace.step import Batches
from titan_launch.train.build import speed_up_on_cpu
from titan_launch.train.explain import is_out_of_memory
from titan_launch.train.kernel_choice import use_kernels
from titan_launch.train.model import (
    allocate_model,
    assemble_model,
    build_job_model,
    build_model_optimizer,
    plan_precision,
)
from titan_launch.train.pipeline_step import PipelinedStep
from titan_launch.train.step import forward_backward
from titan_launch.train.trace_subprocess import OUT_OF_MEMORY

_STEPS = 3
"""Number of steps. The optimizer creates its state at the end of the first step. So the second step is the first with
this state. The third step shows whether the allocator needs more memory for the same tensors."""

_SHARE = 0.95
"""Fraction of this process's memory limits on the host (`ulimit`) that a trial on a CPU may use. A run needs a little
more memory than a trial."""


@dataclass(frozen=True)
class TrialMemory:
    """Peak memory of a trial in bytes, as PyTorch's allocator for CUDA counts it."""

    requested: int
    """Memory that tensors requested."""

    active: int
    """Memory of the blocks that tensors got. A block may be up to 1 MiB larger than requested, because the allocator
    splits off only larger remainders."""

    reserved: int
    """Memory that the allocator has taken from the device."""


def run_trial(config: JobConfig, layout: Layout, rank: int, device: torch.device) -> TrialMemory | None:
    """Train three steps as rank `rank` of `layout.world_size` on `device`. All parameters and buffers are 0.

    Return the peak memory; None on a CPU. On a CPU, first lower the memory limits of this process. The job must not
    have a mode `auto`. The process must have no process group. Raises RunError if the memory does not suffice, and
    ConfigError as a run does.
    """
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA) if device.type == "cpu" else ():
        soft, hard = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            resource.setrlimit(limit, (int(soft * _SHARE), hard))
    with ExitStack() as stack, _out_of_memory_named():
        stack.enter_context(silence())
        stack.enter_context(fake_process_group(layout.world_size, rank))
        counts = partial(_equal_counts, config.planner.expert_load)
        stack.enter_context(replaced(expert_parallel, "exchanged_counts", counts))
        mesh = build_mesh(layout, device.type)
        batches = Batches(config, mesh)
        built = build_job_model(config)
        plan = plan_precision(config, built)
        use_kernels(config, built, plan, layout, device, stack)
        model = assemble_model(config, built, plan, mesh, batches.num_classes, batches.meta_inputs)
        if device.type == "cpu":  # the speedups change memory: glibc then keeps freed memory
            speed_up_on_cpu(config, model, stack)
        allocate_model(model, config, device, stack, initial_values=False)
        modules = [model.module, *([] if model.frozen is None else [model.frozen.module])]
        with torch.no_grad():
            for module in modules:
                for tensor in (*module.parameters(), *module.buffers()):
                    local_tensor(tensor).zero_()  # the host provides memory only when it is written to
        optimizer = build_model_optimizer(config, model)
        ema = build_ema(config.ema, model.module, optimizer)
        replicas = replicas_of(optimizer)
        loss = build_loss(model.module, plan, config, batches.num_classes, frozen=model.frozen)
        strategy, valid = Accumulation(config.gradient_accumulation, replicas), torch.ones((), device=device)
        pipeline = pipeline_of(model.module)
        count = layout.num_microbatches if pipeline else min(layout.num_microbatches, MICROBATCHES)
        pipelined = None if pipeline is None else PipelinedStep(pipeline, config.parallelism, strategy, device)
        for _ in range(_STEPS):
            microbatches = [batches.make() for _ in range(count)]
            if pipelined is not None:
                pipelined(microbatches, loss, lambda: valid)
            else:
                for index, microbatch in enumerate(microbatches):
                    strategy.begin_microbatch(model.module, is_last=index == count - 1)
                    forward_backward(model.module, microbatch, device, lambda: valid, loss)
            if replicas is not None:
                replicas.reduce_gradients()
            clip_grad_norm(list(model.module.parameters()), config.training.max_norm, mesh.pipeline_group)
            optimizer.step()
            if replicas is not None:
                replicas.gather_parameters()
            optimizer.zero_grad()
            if ema is not None:
                ema.update(config.ema.every_steps, torch.zeros_like(valid))  # the update is due in this step
        if device.type != "cuda":
            return None
        torch.cuda.synchronize(device)
        memory = torch.cuda.memory_stats(device)
        kinds = ("requested", "active", "reserved")
        return TrialMemory(*(memory[f"{kind}_bytes.all.peak"] for kind in kinds))


def _equal_counts(load: float, counts: Tensor, ranks: int, group: str) -> Tensor:
    """Return equal counts of rows, with the shape (sending ranks, experts of this rank), in place of
    `expert_parallel.exchanged_counts`: there is no other rank to send its counts. The sum of the counts is the number
    of rows that a plan expects this rank to receive (`plan.experts`). `load`: value of `planner.expert_load`."""
    rows = received_rows(int(counts.sum()), ranks, load)
    return torch.tensor(equal_parts(rows, counts.numel()), device=counts.device).view(ranks, -1)


@contextmanager
def _out_of_memory_named() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(f"{OUT_OF_MEMORY}: {str(error).splitlines()[0]}") from None
