"""One training step of a rank, gone through with tensors that have shapes and no values.

The model is built, planned, wrapped and trained on by what a run uses: the same units, hooks, accumulation strategy and
loss. Only data, initial values and the update itself are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from titan_launch.accumulation.strategies import build_strategy
from titan_launch.config.job import JobConfig
from titan_launch.loss import loss_in_chunks
from titan_launch.metrics.live_memory import LiveMemory, track
from titan_launch.metrics.traffic import TrafficCount, count_collectives
from titan_launch.models.build import BuiltModel
from titan_launch.optim.groups import group_parameters
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.parallel.context_parallel import divide_buffers, ring_attention, sequence_part
from titan_launch.parallel.mesh import Mesh, build_mesh
from titan_launch.parallel.pipeline import Pipeline, parts, pipeline_of
from titan_launch.plan.footprint import MICROBATCHES, Category, Footprint, Ledger, Place
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.in_flight import scaled_to_step, sufficient_microbatches
from titan_launch.plan.layout import Layout
from titan_launch.plan.offload import on_host
from titan_launch.plan.optimizer_memory import GroupSizes, ShardSize, state_bytes, temporary_bytes
from titan_launch.plan.traffic import Traffic, on_line
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.explanations import dtype_failures_explained
from titan_launch.trace.exchanges import count_exchanges
from titan_launch.trace.inputs import Batches
from titan_launch.trace.kernels import copies_from_host, kernels_in_place
from titan_launch.trace.places import Places, stations
from titan_launch.trace.ranks import imagined_ranks
from titan_launch.trace.silence import silence
from titan_launch.train.build import shard_model
from titan_launch.train.pipeline import PipelinedStep
from titan_launch.train.step import backward, loss_of


@dataclass(frozen=True)
class TracedStep:
    """What was seen."""

    footprint: Footprint
    traffic: Traffic
    """Of the whole step, also of microbatches that were not gone through."""


def trace_step(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, layout: Layout, kernels: Kernels, rank: int = 0
) -> TracedStep:
    """Go through a step on a rank of `layout.world_size`. `built` is on the meta device, and is wrapped here.

    As many microbatches are gone through as memory depends on. Raises ConfigError for what dtypes explain, as a run
    does, but not for all of it: matrix products of fake tensors take two dtypes. Other errors of the model's forward
    and backward come as they are.
    """
    with ExitStack() as stack:
        stack.enter_context(silence())
        stack.enter_context(imagined_ranks(layout.world_size, rank))
        mesh = build_mesh(layout, "cpu")
        part = sequence_part(mesh.context, config.parallelism)
        model = shard_model(config, built, plan, mesh)
        batches = Batches(config, layout, part)
        batches.announce(model)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(kernels_in_place(kernels))
        if on_host(config.training, kernels):
            stack.enter_context(copies_from_host())
        if mesh.context is not None:
            device = "meta" if kernels == "cuda" else "cpu"  # it asks whether PyTorch has a kernel for a ring there
            stack.enter_context(ring_attention(mesh.context, config.parallelism, torch.device(device)))
        model.to_empty(device="cpu")
        if part is not None:
            divide_buffers(model, built.context_parallel or {}, part, config.training.seq_len)
        return _go_through(config, model, plan, mesh, batches, Ledger(on_host(config.training, kernels)))


def _go_through(
    config: JobConfig, model: nn.Module, plan: ModelPlan, mesh: Mesh, batches: Batches, ledger: Ledger
) -> TracedStep:
    """Forward and backward over the microbatches of a step, and the optimizer's update in closed form.

    `model`: wrapped and on the CPU, with real tensors or fake ones, without gradients. `plan`: of the whole model.
    """
    layout = mesh.layout
    ledger.enter(Place(0, "forward", ""))
    places = Places(ledger)
    with ExitStack() as stack:
        memory = stack.enter_context(track(model, ledger))
        for module, part in parts(model, plan):
            stack.enter_context(places.watch(module, stations(module, part.inventory), _makes_logits(model, module)))
            stack.enter_context(dtype_failures_explained(module, part, config.precision))
        count = stack.enter_context(count_collectives(model))
        stack.enter_context(count_exchanges(mesh, count))
        groups = _group_sizes(config, model, plan)
        ledger.allocate(state_bytes(config.optimizer, groups), Category.OPTIMIZER)
        memory.scope(Category.BUFFERS)
        statistics = RunningStatistics(model)  # kept all the time
        memory.scope(None)
        accumulate = _accumulate if pipeline_of(model) is None else _accumulate_in_pipeline
        traffic = accumulate(config, model, layout, batches, places, memory, ledger, count)
        ledger.enter(Place(places.microbatch, "optimizer", ""))
        _update(temporary_bytes(config.optimizer, groups, layout.parameter_shards), ledger)
        del statistics
        return TracedStep(ledger.footprint(), traffic)


def _makes_logits(model: nn.Module, module: nn.Module) -> bool:
    """Whether a loss follows the forward of what this rank runs: of a pipeline's stages, of the last."""
    pipeline = pipeline_of(model)
    return pipeline is None or (pipeline.has_last and module is pipeline.local[-1].module)


def _accumulate(
    config: JobConfig,
    model: nn.Module,
    layout: Layout,
    batches: Batches,
    places: Places,
    memory: LiveMemory,
    ledger: Ledger,
    count: TrafficCount,
) -> Traffic:
    """The gradients of all microbatches; of a long step, of as many as memory depends on."""
    strategy = build_strategy(config.gradient_accumulation)
    valid = torch.ones((), dtype=torch.int64)
    num_microbatches = min(layout.num_microbatches, MICROBATCHES)
    traffic = []
    for index in range(num_microbatches):
        places.begin_microbatch(index)
        strategy.begin_microbatch(model, is_last=index == num_microbatches - 1)
        inputs, targets = batches.make()
        memory.hold((inputs, targets), Category.INPUTS)
        backward(model, inputs, targets, valid, loss_in_chunks(config.training.loss_chunks))
        del inputs, targets
        traffic.append(count.take())
    return _of_all(traffic, layout.num_microbatches)


def _accumulate_in_pipeline(
    config: JobConfig,
    model: nn.Module,
    layout: Layout,
    batches: Batches,
    places: Places,
    memory: LiveMemory,
    ledger: Ledger,
    count: TrafficCount,
) -> Traffic:
    """The same through the stages of a pipeline, by its schedule."""
    pipeline = pipeline_of(model)
    assert pipeline is not None
    strategy, device = build_strategy(config.gradient_accumulation), torch.device("cpu")
    num_microbatches = sufficient_microbatches(config.parallelism, layout)
    inputs, targets = memory.paused(batches.make)()  # on the host
    num_others = layout.num_microbatches - num_microbatches
    ledger.allocate(num_others * _received_bytes(pipeline, inputs), Category.ACTIVATIONS)
    ledger.allocate(num_others * 2 * inputs.nbytes, Category.INPUTS)
    microbatches = [(inputs, targets)] * num_microbatches
    valid = torch.ones((), dtype=torch.int64)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return loss_of(logits, targets, valid, loss_in_chunks(config.training.loss_chunks))

    step = PipelinedStep(pipeline, config.parallelism, strategy, device)
    step(microbatches, loss)
    ledger.free(num_others * 2 * inputs.nbytes, Category.INPUTS)
    return scaled_to_step(count.take(), num_microbatches, layout, config.parallelism, config.gradient_accumulation)


def _received_bytes(pipeline: Pipeline, inputs: Tensor) -> int:
    """Of the buffers that PyTorch's stages have for each microbatch of a step, also of those that are not gone through:
    for what they receive from the stage before, and from the one behind."""
    boundaries = pipeline.boundaries.of(inputs)
    received = 0
    for stage in (local.stage for local in pipeline.local):
        received += boundaries[stage.index].nbytes if stage.index else 0
        received += boundaries[stage.index + 1].nbytes if stage.index + 1 < len(pipeline.plan.stages) else 0
    return received


def _of_all(seen: Sequence[Traffic], num_microbatches: int) -> Traffic:
    """The traffic of a step, from that of its first microbatches and of its last one."""
    total = sum(seen, start=Traffic())
    left_out = num_microbatches - len(seen)
    return on_line(total, total + seen[-2], left_out) if left_out else total


def _group_sizes(config: JobConfig, model: nn.Module, plan: ModelPlan) -> list[GroupSizes]:
    """What is trained, as the optimizer groups it."""
    groups = group_parameters(model, config.optimizer, plan.inventory.head)
    return [GroupSizes(g.settings.algorithm, [_shard_size(p) for p in g.parameters.values()]) for g in groups]


def _shard_size(parameter: nn.Parameter) -> ShardSize:
    shard = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
    return ShardSize(tuple(parameter.shape), shard.numel(), str(shard.dtype).removeprefix("torch."))


def _update(num_bytes: int, ledger: Ledger) -> None:
    """Clipping scales gradients in place; the optimizer's temporaries are known in closed form. Both are left out of
    the trace, in which the operations of so many DTensors would take longest."""
    ledger.allocate(num_bytes, Category.OPTIMIZER_TEMPORARIES)
    ledger.free(num_bytes, Category.OPTIMIZER_TEMPORARIES)
