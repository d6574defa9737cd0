"""One training step of a rank, gone through with tensors that have shapes and no values.

The model is built, planned, wrapped and trained on by what a run uses: the same units, hooks, accumulation strategy and
loss. Only data, initial values and the update itself are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_launch.config.architectures import images_taken
from titan_launch.config.job import JobConfig
from titan_launch.config.optimizers import GroupSizes, ShardSize
from titan_launch.data.context_shard import SequencePart
from titan_launch.data.sources import build_source
from titan_launch.data.tokenizers import build_tokenizer
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.mesh import Mesh, build_mesh
from titan_launch.metrics.memory import LiveMemory, track
from titan_launch.metrics.traffic import TrafficCount, count_collectives
from titan_launch.models.build import BuiltModel
from titan_launch.models.loss import Loss, loss_in_chunks
from titan_launch.optim.groups import group_parameters
from titan_launch.parallel.accumulation import build_strategy
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.parallel.context_parallel import divide_buffers, ring_attention, sequence_part
from titan_launch.parallel.fsdp import discard_pending
from titan_launch.parallel.pipeline import Pipeline, parts, pipeline_of
from titan_launch.plan.communication import Traffic, on_line
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.ledger import MICROBATCHES, Category, Footprint, Ledger, StepPoint, on_host, with_growth
from titan_launch.plan.memory.optimizer import state_bytes, temporary_bytes
from titan_launch.plan.pipeline import scaled_to_step, sufficient_microbatches
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.diagnosis import dtype_failures_explained
from titan_launch.trace.collective_counts import count_exchanges
from titan_launch.trace.cuda_kernels import copies_from_host, kernels_in_place
from titan_launch.trace.fake_group import fake_process_group, silence
from titan_launch.trace.step_points import StepPoints, stations
from titan_launch.train.forward import check_embeddings, checked_loss
from titan_launch.train.model import shard_model
from titan_launch.train.pipeline_step import PipelinedStep
from titan_launch.train.step import backward, loss_of


class Batches:
    """The microbatches of a rank: all alike."""

    def __init__(self, config: JobConfig, layout: Layout, part: SequencePart | None):
        """`part`: of every sequence, what the rank has. Raises ConfigError as `sample_format` does."""
        self._config = config
        self._batch_size = layout.local_batch_size
        self._shape, self.num_classes = sample_format(config)
        self._part = part

    def make(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, on the default device."""
        inputs, targets = make_microbatch(self._config, self._shape, self._batch_size)
        if self._part is None:
            return inputs, targets
        return self._part.of(inputs, axis=1), self._part.of(targets, axis=1)

    def announce(self, model: nn.Module) -> None:
        """Let the stages of a pipeline find what travels between them, before tensors are fake ones."""
        pipeline = pipeline_of(model)
        if pipeline is not None:
            with torch.device("meta"):
                pipeline.boundaries.of(self.make()[0])


def sample_format(config: JobConfig) -> tuple[tuple[int, ...], int]:
    """Return the shape of one input, `[seq_len]` or `[channels, height, width]`, and the number of classes.

    Of images it is what the model takes; a user's own model takes what the data source holds, which is read for it.
    Raises ConfigError where that cannot be read.
    """
    tokenizer, seq_len = build_tokenizer(config.tokenizer), config.training.seq_len
    if config.data.unit == "tokens":
        return (seq_len,), config.data.own_vocabulary() or tokenizer.vocab_size
    taken = images_taken(config.model)
    if taken is not None:
        return (taken.channels, taken.height, taken.width), taken.num_classes
    source = build_source(config.data, tokenizer, seq_len)
    image, _ = source[0]
    return tuple(image.shape), source.num_classes


def make_microbatch(config: JobConfig, shape: tuple[int, ...], num_samples: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `num_samples`, as the data sources give them, on the default device."""
    if config.data.unit == "images":
        return torch.zeros(num_samples, *shape), torch.zeros(num_samples, dtype=torch.int64)
    tokens = torch.zeros(num_samples, *shape, dtype=torch.int64)
    return tokens, torch.zeros_like(tokens)


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

    Traces the number of microbatches after which peak memory stops growing. Traces a pipeline a second time with more
    microbatches, and extrapolates the growth of each phase's peak. Raises ConfigError for what dtypes explain, as a run
    does, but not for all of it: matrix products of fake tensors take two dtypes. Other errors of the model's forward
    and backward come as they are.
    """
    with ExitStack() as stack:
        stack.enter_context(silence())
        stack.enter_context(fake_process_group(layout.world_size, rank))
        mesh = build_mesh(layout, "cpu")
        part = sequence_part(mesh.context, config.parallelism)
        model = shard_model(config, built, replace(plan, float8=()), mesh)  # whose memory is not known
        batches = Batches(config, layout, part)
        batches.announce(model)
        if config.data.unit == "tokens":
            check_embeddings(model, batches.num_classes)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(kernels_in_place(kernels, config.kernels.attention))
        if on_host(config.training, kernels):
            stack.enter_context(copies_from_host())
        if mesh.context is not None:
            device = "meta" if kernels == "cuda" else "cpu"  # it asks whether PyTorch has a kernel for a ring there
            stack.enter_context(ring_attention(mesh.context, config.parallelism, torch.device(device)))
        model.to_empty(device="cpu")
        if part is not None:
            divide_buffers(model, built.context_parallel or {}, part, config.training.seq_len)
        on_host_there = on_host(config.training, kernels)
        if mesh.pipeline is None:
            num_microbatches = min(layout.num_microbatches, MICROBATCHES)
            return _go_through(config, model, plan, mesh, batches, Ledger(on_host_there), num_microbatches)
        num_microbatches = sufficient_microbatches(config.parallelism, layout)
        traced = _go_through(config, model, plan, mesh, batches, Ledger(on_host_there), num_microbatches)
        left_out = layout.num_microbatches - num_microbatches
        if not left_out:
            return traced
        discard_pending(model)
        more = num_microbatches + min(left_out, layout.pipeline)  # interleaved schedules take multiples
        longer = _go_through(config, model, plan, mesh, batches, Ledger(on_host_there), more)
        factor = left_out / (more - num_microbatches)
        return replace(traced, footprint=with_growth(traced.footprint, longer.footprint, factor))


def _go_through(
    config: JobConfig,
    model: nn.Module,
    plan: ModelPlan,
    mesh: Mesh,
    batches: Batches,
    ledger: Ledger,
    num_microbatches: int,
) -> TracedStep:
    """Forward and backward over microbatches of a step, and the optimizer's update in closed form.

    `model`: wrapped and on the CPU, with real tensors or fake ones, without gradients. `plan`: of the whole model.
    `num_microbatches`: number of microbatches to trace.
    """
    layout = mesh.layout
    ledger.enter(StepPoint(0, "forward", ""))
    places = StepPoints(ledger)
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
        traffic = _Accumulation(config, model, layout, num_microbatches, batches, places, memory, count).run()
        ledger.enter(StepPoint(places.microbatch, "optimizer", ""))
        _update(temporary_bytes(config.optimizer, groups, layout.parameter_shards), ledger)
        del statistics
        return TracedStep(ledger.footprint(), traffic)


def _makes_logits(model: nn.Module, module: nn.Module) -> bool:
    """Whether a loss follows the forward of what this rank runs: of a pipeline's stages, of the last."""
    pipeline = pipeline_of(model)
    return pipeline is None or (pipeline.has_last and module is pipeline.local[-1].module)


@dataclass(frozen=True)
class _Accumulation:
    """The traced microbatches of a step, and what watches them."""

    config: JobConfig
    model: nn.Module
    layout: Layout
    num_microbatches: int
    batches: Batches
    places: StepPoints
    memory: LiveMemory
    count: TrafficCount

    def run(self) -> Traffic:
        """Make the gradients of all microbatches. Returns the traffic of the whole step."""
        pipeline, valid_global = pipeline_of(self.model), torch.ones((), dtype=torch.int64)
        if pipeline is None:
            return self._one_by_one(valid_global)
        return self._through(pipeline, valid_global)

    def _one_by_one(self, valid_global: Tensor) -> Traffic:
        strategy = build_strategy(self.config.gradient_accumulation)
        traffic = []
        for index in range(self.num_microbatches):
            self.places.begin_microbatch(index)
            strategy.begin_microbatch(self.model, is_last=index == self.num_microbatches - 1)
            inputs, targets = self.batches.make()
            self.memory.hold((inputs, targets), Category.INPUTS)
            backward(self.model, inputs, targets, lambda: valid_global, self._loss_sum)
            del inputs, targets
            traffic.append(self.count.take())
        return _of_all(traffic, self.layout.num_microbatches)

    def _through(self, pipeline: Pipeline, valid_global: Tensor) -> Traffic:
        """Through the stages of a pipeline, by its schedule."""
        config, layout = self.config, self.layout
        inputs, targets = self.memory.paused(self.batches.make)()  # on the host
        strategy = build_strategy(config.gradient_accumulation)
        step = PipelinedStep(pipeline, config.parallelism, strategy, torch.device("cpu"))
        loss = partial(loss_of, valid_global=valid_global, loss_sum=self._loss_sum)
        step([(inputs, targets)] * self.num_microbatches, loss)
        traffic = self.count.take()
        return scaled_to_step(traffic, self.num_microbatches, layout, config.gradient_accumulation)

    @property
    def _loss_sum(self) -> Loss:
        loss_sum = loss_in_chunks(self.config.training.loss_chunks)
        return checked_loss(loss_sum, self.config.data.unit, self.batches.num_classes)


def _of_all(seen: Sequence[Traffic], num_microbatches: int) -> Traffic:
    """The traffic of a step, from that of its first microbatches and of its last one."""
    total = sum(seen, start=Traffic())
    left_out = num_microbatches - len(seen)
    return on_line(total, total + seen[-2], left_out) if left_out else total


def _group_sizes(config: JobConfig, model: nn.Module, plan: ModelPlan) -> list[GroupSizes]:
    """What is trained, as the optimizer groups it."""
    groups = group_parameters(model, config.optimizer, plan.inventory.head)
    return [GroupSizes(g.settings, [_shard_size(p) for p in g.parameters.values()]) for g in groups]


def _shard_size(parameter: nn.Parameter) -> ShardSize:
    shard = local_tensor(parameter)
    return ShardSize(tuple(parameter.shape), shard.numel(), str(shard.dtype).removeprefix("torch."))


def _update(num_bytes: int, ledger: Ledger) -> None:
    """Clipping scales gradients in place; the optimizer's temporaries are known in closed form. Both are left out of
    the trace, in which the operations of so many DTensors would take longest."""
    ledger.allocate(num_bytes, Category.OPTIMIZER_TEMPORARIES)
    ledger.free(num_bytes, Category.OPTIMIZER_TEMPORARIES)
