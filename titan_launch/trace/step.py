"""One training step of a rank, gone through with tensors that have shapes and no values.

The model is built, planned, wrapped and trained on by what a run uses: the same units, hooks, accumulation strategy and
loss. Only data, initial values and the update itself are left out.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from titan_launch.accumulation.strategies import build_strategy
from titan_launch.config.job import JobConfig
from titan_launch.metrics.live_memory import LiveMemory, track
from titan_launch.metrics.traffic import TrafficCount, count_collectives
from titan_launch.models.build import BuiltModel
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.plan.analytic.optimizer import temporary_bytes
from titan_launch.plan.footprint import MICROBATCHES, Category, Footprint, Ledger, Place
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.layout import Layout
from titan_launch.plan.traffic import Traffic
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.explanations import dtype_failures_explained
from titan_launch.trace.inputs import make_microbatch, sample_shape
from titan_launch.trace.kernels import kernels_in_place
from titan_launch.trace.places import Places, stations
from titan_launch.trace.ranks import imagined_ranks
from titan_launch.train.build import shard_model
from titan_launch.train.step import backward


@dataclass(frozen=True)
class TracedStep:
    """What was seen."""

    footprint: Footprint
    traffic: tuple[Traffic, ...]
    """Of each microbatch that was gone through; the last one stands for the step's last."""


def trace_step(config: JobConfig, built: BuiltModel, plan: ModelPlan, layout: Layout, kernels: Kernels) -> TracedStep:
    """Go through a step on rank 0 of `layout.world_size`. `built` is on the meta device, and is wrapped here.

    At most `MICROBATCHES` microbatches are gone through. Raises ConfigError for what dtypes explain, as a run does, but
    not for all of it: matrix products of fake tensors take two dtypes. Other errors of the model's forward and backward
    come as they are.
    """
    with ExitStack() as stack:
        stack.enter_context(_silence())
        stack.enter_context(imagined_ranks(layout.world_size))
        model = shard_model(config, built, plan, layout, torch.device("cpu"))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(kernels_in_place(kernels))
        model.to_empty(device="cpu")
        return go_through(config, model, plan, layout)


@contextmanager
def _silence() -> Iterator[None]:
    """Without warnings and logs: a run prints its own, and an error that PyTorch logs as it raises it is reported."""
    loggers = [logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "titan_launch.parallel")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def go_through(config: JobConfig, model: nn.Module, plan: ModelPlan, layout: Layout) -> TracedStep:
    """Forward and backward over the microbatches of a step, and the optimizer's update in closed form.

    `model`: wrapped and on the CPU, with real tensors or fake ones, without gradients.
    """
    ledger = Ledger()
    ledger.enter(Place(0, "forward", ""))
    places = Places(ledger)
    with (
        track(model, ledger) as memory,
        places.watch(model, stations(model, plan.inventory)),
        count_collectives(model) as count,
        dtype_failures_explained(model, plan, config.precision),
    ):
        ledger.allocate(_state_bytes(model), Category.OPTIMIZER)
        memory.scope(Category.BUFFERS)
        statistics = RunningStatistics(model)  # kept all the time
        memory.scope(None)
        microbatches = min(layout.num_microbatches, MICROBATCHES)
        traffic = _accumulate(config, model, layout.local_batch_size, microbatches, places, memory, count)
        ledger.enter(Place(microbatches - 1, "optimizer", ""))
        _update(temporary_bytes(plan, config.optimizer, layout), ledger)
        del statistics
        return TracedStep(ledger.footprint(), traffic)


def _accumulate(
    config: JobConfig,
    model: nn.Module,
    batch_size: int,
    num_microbatches: int,
    places: Places,
    memory: LiveMemory,
    count: TrafficCount,
) -> tuple[Traffic, ...]:
    strategy = build_strategy(config.gradient_accumulation)
    shape = sample_shape(config)
    valid = torch.ones((), dtype=torch.int64)
    traffic = []
    for index in range(num_microbatches):
        places.begin_microbatch(index)
        strategy.begin_microbatch(model, is_last=index == num_microbatches - 1)
        inputs, targets = make_microbatch(config, shape, batch_size)
        memory.hold((inputs, targets), Category.INPUTS)
        backward(model, inputs, targets, valid, config.training.loss_chunks)
        del inputs, targets
        traffic.append(count.take())
    return tuple(traffic)


def _state_bytes(model: nn.Module) -> int:
    """AdamW's two moments of what is trained, in the storage dtype. (Its step counts, a number for each parameter, are
    left out.)"""
    shards = (p._local_tensor if isinstance(p, DTensor) else p for p in model.parameters() if p.requires_grad)
    return 2 * sum(shard.nbytes for shard in shards)


def _update(num_bytes: int, ledger: Ledger) -> None:
    """Clipping scales gradients in place; AdamW's temporaries are known in closed form. Both are left out of the trace,
    in which the operations of so many DTensors would take longest."""
    ledger.allocate(num_bytes, Category.OPTIMIZER_TEMPORARIES)
    ledger.free(num_bytes, Category.OPTIMIZER_TEMPORARIES)
