"""The memory of a step on real CPU tensors, as PyTorch's allocator reports it to the profiler."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from titan_launch.config.job import JobConfig
from titan_launch.distributed.mesh import build_mesh
from titan_launch.loss.build import build_loss
from titan_launch.loss.interface import Loss
from titan_launch.models.init import initialize
from titan_launch.optim.clip import clip_grad_norm
from titan_launch.optim.ema import build_ema
from titan_launch.optim.registry import build_optimizer
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.parallel.pipeline import pipeline_of
from titan_launch.plan.layout import Layout
from titan_launch.trace.fake_group import fake_process_group, sends_held
from titan_launch.train.batches import make_microbatch, sample_format
from titan_launch.train.model import build_job_model, plan_precision, shard_model
from titan_launch.train.pipeline_step import PipelinedStep
from titan_launch.train.step import forward_backward


def allocated_peaks(config: JobConfig, layout: Layout, rank: int = 0) -> tuple[int, int]:
    """Return the peak bytes of the second step of a run: in forward and backward, and in clipping and the optimizer's
    update. The rank is in a fake group, whose collectives copy nothing, and keeps what it sends, as gloo does."""
    with fake_process_group(layout.world_size, rank), sends_held():
        built = build_job_model(config)
        plan = plan_precision(config, built)
        device = torch.device("cpu")
        model = shard_model(config, built, plan, build_mesh(layout, device.type))
        model.to_empty(device=device)
        if config.model.name == "huggingface":  # built without values
            for buffer in model.buffers():
                nn.init.zeros_(buffer)
        else:
            initialize(model, built.initializer, 0, device)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.01)
        loss = build_loss(model, plan, config, 1)
        optimizer = build_optimizer(model, config.optimizer)
        ema = build_ema(config.ema, model, optimizer)
        statistics = RunningStatistics(model)
        _accumulate(config, model, loss, layout)
        clip_grad_norm(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()  # a pipeline schedule refers to itself
        at_rest = (
            _resident(model, optimizer) + statistics.saved.nbytes + _bytes([*ema.state_dict().values()] if ema else [])
        )
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as in_backward:
            schedule = _accumulate(config, model, loss, layout)
        with_gradients = at_rest + _bytes([p.grad for p in model.parameters() if p.grad is not None])
        if schedule is not None:
            with_gradients = at_rest + _left(in_backward)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as in_update:
            clip_grad_norm(model.parameters(), 1.0)
            optimizer.step()
            if ema is not None:
                optimizer.zero_grad()
                ema.update(2, torch.zeros(()))
        return at_rest + _peak(in_backward), with_gradients + _peak(in_update)


def _accumulate(config: JobConfig, model: nn.Module, loss: Loss, layout: Layout) -> PipelinedStep | None:
    """Run forward and backward of a step. Return the object, if any, that holds memory until the next step."""
    strategy = Accumulation(config.gradient_accumulation)
    (shape, _), valid = sample_format(config), torch.ones((), dtype=torch.int64)
    pipeline = pipeline_of(model)
    if pipeline is not None:
        step = PipelinedStep(pipeline, config.parallelism, strategy, torch.device("cpu"))
        microbatch = make_microbatch(config, shape, layout.local_batch_size)
        microbatches = [microbatch] * layout.num_microbatches
        step(microbatches, loss, lambda: valid)
        return step
    for index in range(layout.num_microbatches):
        strategy.begin_microbatch(model, is_last=index == layout.num_microbatches - 1)
        microbatch = make_microbatch(config, shape, layout.local_batch_size)
        forward_backward(model, microbatch, torch.device("cpu"), lambda: valid, loss)
        del microbatch
    return None


def _resident(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    return _bytes([*model.parameters(), *model.buffers(), *state])


def _bytes(tensors: list[torch.Tensor]) -> int:
    storages = [getattr(t, "_local_tensor", t).untyped_storage() for t in tensors]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


_RNG_STATE_BYTES = 5056
"""Bytes of CPU random state that `torch.utils.checkpoint` saves for each block. They are no tensor of the model."""


def _left(profiled: profile) -> int:
    """Return the allocated bytes that are still held."""
    results: Any = profiled.profiler
    return sum(change for _, change, _ in _changes(results.kineto_results.experimental_event_tree(), None))


def _peak(profiled: profile) -> int:
    """Return the most bytes held at a time, without temporaries inside of kernels, which no tracker can see."""
    results: Any = profiled.profiler
    changes = list(_changes(results.kineto_results.experimental_event_tree(), None))
    allocated: dict[int, int] = {}
    scratch: set[int] = set()
    for index, (address, num_bytes, kernel) in enumerate(changes):
        if num_bytes > 0:
            allocated[address] = index
        elif kernel is not None and address in allocated and changes[allocated[address]][2] is kernel:
            scratch |= {allocated[address], index}
    held = most = 0
    for index, (_, num_bytes, _) in enumerate(changes):
        held += 0 if index in scratch or abs(num_bytes) == _RNG_STATE_BYTES else num_bytes
        most = max(most, held)
    return most


def _changes(events: Iterable[Any], kernel: Any) -> Iterator[tuple[int, int, Any]]:
    """Yield allocations and frees in order: address, bytes, and the innermost operation.

    FSDP2's own operations count as one: from torch 2.15 on, its copy-in on a CPU first casts gradients of mixed dtypes.
    """
    for event in events:
        if event.name == "[memory]":
            yield event.extra_fields.ptr, event.extra_fields.alloc_size, kernel
        else:
            is_kernel = event.name.startswith(("aten::", "fsdp::")) and not event.name.startswith("aten::empty")
            is_inside = kernel is not None and kernel.name.startswith("fsdp::")
            yield from _changes(event.children, event if is_kernel and not is_inside else kernel)
