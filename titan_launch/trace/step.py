"""A trace of one rank's training step, on fake tensors, which have shapes but no values.

The model is built, planned, wrapped and trained by the functions of a run, so units, hooks, gradient accumulation and
loss are the same. Only data, initial values, the conversion to float8 and the update are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from titan_launch.config.job import JobConfig
from titan_launch.config.optimizers import GroupSizes, ShardSize
from titan_launch.core.patches import replaced
from titan_launch.data.sources import Batch
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.distributed.mesh import Mesh, build_mesh
from titan_launch.loss.build import build_loss
from titan_launch.metrics.memory import LiveMemory, track
from titan_launch.metrics.traffic import count_collectives
from titan_launch.models.build import BuiltModel
from titan_launch.optim.groups import group_parameters
from titan_launch.optim.replica_shards import ReplicaShards, trained_by_unit
from titan_launch.parallel.activation_offload import HostCopies
from titan_launch.parallel.batchnorm import RunningStatistics
from titan_launch.parallel.context_parallel import part_of_batch, sequence_part
from titan_launch.parallel.fsdp import Accumulation, discard_pending
from titan_launch.parallel.pipeline import parts, pipeline_of
from titan_launch.plan.communication import Traffic, on_line, traffic_of_microbatches, traffic_of_replicas
from titan_launch.plan.hardware import Kernels, find_device
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.ledger import (
    MICROBATCHES,
    Category,
    Footprint,
    Ledger,
    StepPoint,
    book_update,
    ema_bytes,
    on_host,
    state_bytes,
    temporary_bytes,
    with_growth,
)
from titan_launch.plan.mup import width_scales
from titan_launch.plan.pipeline import counts_to_run, growth_factor
from titan_launch.plan.replica_shards import ExchangedUnit, chunk_numel, exchanged_unit, gradients_leave_early
from titan_launch.plan.speeds import Work
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.observation import dtype_of
from titan_launch.trace.cuda_kernels import copies_from_host, kernels_replaced
from titan_launch.trace.fake_group import fake_process_group, sends_held, silence
from titan_launch.trace.observers import ExchangesCounted, StepPoints, modules_in_order
from titan_launch.train.batches import make_microbatch, sample_format
from titan_launch.train.explain import explained_in_trace
from titan_launch.train.kernel_choice import use_planned_kernels
from titan_launch.train.measure import hold_frozen
from titan_launch.train.model import AssembledModel, allocate_model, assemble_model, build_replica_shards
from titan_launch.train.pipeline_step import PipelinedStep
from titan_launch.train.step import forward_backward


class Batches:
    """A maker of a rank's microbatches, which are all equal, for traces and trials."""

    def __init__(self, config: JobConfig, mesh: Mesh):
        """Raises ConfigError as `sample_format` does."""
        self._config = config
        self._batch_size = mesh.layout.local_batch_size
        self._shape, self.num_classes = sample_format(config)
        self._part = sequence_part(mesh, config.parallelism)

    def make(self) -> Batch:
        """Return a microbatch on the default device."""
        whole = make_microbatch(self._config, self._shape, self._batch_size)
        return part_of_batch(whole, self._part)

    def meta_inputs(self) -> Tensor:
        """Return the inputs of one microbatch, on the meta device."""
        with torch.device("meta"):
            return self.make().inputs


@dataclass(frozen=True)
class TracedStep:
    """The memory and the traffic of a traced step."""

    footprint: Footprint
    traffic: Traffic
    """Traffic of the whole step, including microbatches that were not traced."""


def trace_step(
    config: JobConfig, built: BuiltModel, plan: ModelPlan, layout: Layout, kernels: Kernels, rank: int = 0
) -> TracedStep:
    """Trace a step as rank `rank` of `layout.world_size`. `built` is on the meta device, and is wrapped in place.

    Only a few microbatches are traced: more would add no activations to the peak memory. In a pipeline, other memory
    may grow with each further microbatch. For this case, a second step with more microbatches is traced, and the
    growth of each phase's peak is extrapolated.

    Raises ConfigError as `assemble_model` does. Errors in the model's forward and backward, such as dtype errors, are
    explained by `explain_model`; unknown errors are raised unchanged. A matrix product of two different dtypes is no
    error, because fake tensors accept it.
    """
    with assembled_without_values(config, built, plan, layout, kernels, rank) as (model, batches):
        held_on_host = on_host(config.training, kernels)
        if layout.pipeline == 1:
            num_microbatches = min(layout.num_microbatches, MICROBATCHES)
            return _trace_microbatches(config, model, batches, Ledger(held_on_host), num_microbatches)
        counts, traced = counts_to_run(config.parallelism, layout), list[TracedStep]()
        for count in counts:
            discard_pending(model.module)
            traced.append(_trace_microbatches(config, model, batches, Ledger(held_on_host), count))
        first, last, factor = traced[0], traced[-1], growth_factor(counts, layout.num_microbatches)
        footprint = with_growth(first.footprint, last.footprint, factor)
        return TracedStep(footprint, on_line(first.traffic, last.traffic, factor))


@contextmanager
def assembled_without_values(  # noqa: PLR0913 - six describe the rank
    config: JobConfig,
    built: BuiltModel,
    plan: ModelPlan,
    layout: Layout,
    kernels: Kernels,
    rank: int,
    note: Callable[[Work], None] = lambda work: None,
) -> Iterator[tuple[AssembledModel, Batches]]:
    """Assemble a model as `rank` of `layout.world_size` would, with fake tensors on the CPU. Yield the model and the
    maker of its microbatches.

    In the `with` block, this process acts as that rank, and tensors are fake. Operations save the same tensors for
    backward as on a device of the family `kernels`. No layer is converted to float8, because the memory that torchao
    needs is not known. `note`: as in `kernels_replaced`.
    """
    with ExitStack() as stack:
        stack.enter_context(silence())
        stack.enter_context(fake_process_group(layout.world_size, rank))
        if kernels == "cpu":
            stack.enter_context(sends_held())
        mesh = build_mesh(layout, "cpu")
        device = find_device(config.planner.device or "") if kernels == "cuda" else None
        if device is not None and device.capability is not None:
            use_planned_kernels(config, built, plan, layout, device.capability)
        batches = Batches(config, mesh)
        plan = replace(plan, float8=())
        model = assemble_model(config, built, plan, mesh, batches.num_classes, batches.meta_inputs)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(kernels_replaced(kernels, config.kernels.attention, config.planner.expert_load, note))
        if Category.PARAMETERS in on_host(config.training, kernels):
            stack.enter_context(copies_from_host())
        # PyTorch has no ring attention for CPUs, so a trace for CUDA names another device.
        attention_device = torch.device("meta" if kernels == "cuda" else "cpu")
        allocate_model(
            model, config, torch.device("cpu"), stack, initial_values=False, attention_device=attention_device
        )
        yield model, batches


def _trace_microbatches(
    config: JobConfig, assembled: AssembledModel, batches: Batches, ledger: Ledger, num_microbatches: int
) -> TracedStep:
    """Trace forward and backward of `num_microbatches` microbatches. Add the memory of the optimizer state, the moving
    average of the weights and the update by formulas.

    `assembled`: the model on the CPU, with real or fake tensors, and without gradients.
    """
    model, frozen, plan, mesh = assembled.module, assembled.frozen, assembled.plan, assembled.mesh
    ledger.enter(StepPoint(0, "forward", ""))
    step_points = StepPoints(ledger)
    with ExitStack() as stack:
        memory = stack.enter_context(watched_memory(model, ledger))
        start = memory.allocating_for(Category.REDUCE_SCATTER, ReplicaShards.start)
        stored = memory.returning_for(Category.GRADIENTS, ReplicaShards.stored)
        for name, function in (("start", start), ("stored", stored)):
            stack.enter_context(replaced(ReplicaShards, name, function))
        stack.enter_context(watched_parts(config, model, plan, step_points))
        count = stack.enter_context(count_collectives(model, *([] if frozen is None else [frozen.module])))
        stack.enter_context(ExchangesCounted(mesh, count))
        groups = _group_sizes(config, model, plan, mesh.layout)
        ledger.allocate(state_bytes(config.optimizer, groups), Category.OPTIMIZER)
        ledger.allocate(ema_bytes(config.ema, groups), Category.EMA)
        memory.scope(Category.BUFFERS)
        statistics = RunningStatistics(model)  # a run holds this copy during the whole step
        memory.scope(None)
        loss = build_loss(model, plan, config, batches.num_classes, has_values=False, frozen=frozen)
        hold_frozen(memory, loss)
        leave_early = gradients_leave_early(config.training)
        replicas = build_replica_shards(config, assembled) if leave_early else None
        strategy = Accumulation(config.gradient_accumulation, replicas)
        num_items, device = memory.paused(torch.ones)((), dtype=torch.int64), torch.device("cpu")
        pipeline = pipeline_of(model)
        if pipeline is None:
            of_microbatches = []
            for index in range(num_microbatches):
                step_points.begin_microbatch(index)
                strategy.begin_microbatch(model, is_last=index == num_microbatches - 1)
                microbatch = batches.make()
                memory.hold(microbatch, Category.INPUTS)
                forward_backward(model, microbatch, device, lambda: num_items, loss)
                del microbatch
                of_microbatches.append(count.take())
            traffic = traffic_of_microbatches(of_microbatches, mesh.layout.num_microbatches)
        else:
            microbatch = memory.paused(batches.make)()  # not counted, because a run keeps it in host memory
            step = PipelinedStep(pipeline, config.parallelism, strategy, device)
            step([microbatch] * num_microbatches, loss, lambda: num_items)
            traffic = count.take()
        ledger.enter(StepPoint(num_microbatches - 1, "optimizer", ""))
        if replicas is not None:
            replicas.reduce_gradients()
        # Clipping and update are not traced, because tracing their operations on many DTensors would take longer than
        # the rest of the trace.
        units = _exchanged_units(model, plan, mesh.layout)
        temporaries = temporary_bytes(config.optimizer, groups, mesh.layout.optimizer_shards)
        book_update(ledger, temporaries, units, mesh.layout, leave_early)
        traffic += traffic_of_replicas(units, mesh.layout.optimizer_replicas)
        del statistics
        return TracedStep(ledger.footprint(), traffic)


@contextmanager
def watched_memory(model: nn.Module, ledger: Ledger) -> Iterator[LiveMemory]:
    """Record memory in `ledger` until the `with` block ends, as `metrics.memory.track` does. Offloaded activations
    count as host memory."""
    with ExitStack() as stack:
        memory = stack.enter_context(track(model, ledger))
        for name, category in (("to_host", Category.OFFLOADED), ("to_device", Category.ACTIVATIONS)):
            copy = memory.allocating_for(category, getattr(HostCopies, name))
            stack.enter_context(replaced(HostCopies, name, copy))
        yield memory


@contextmanager
def watched_parts(config: JobConfig, model: nn.Module, plan: ModelPlan, points: StepPoints) -> Iterator[None]:
    """Until the `with` block ends, let hooks enter a step point for each module in `modules_in_order`, of a model or of
    this rank's pipeline stages. Some errors of the model are replaced by an explanation (`explained_in_trace`)."""
    pipeline = pipeline_of(model)
    with ExitStack() as stack:
        for module, part in parts(model, plan):
            has_loss = pipeline is None or (pipeline.has_last and module is pipeline.local[-1].module)
            stack.enter_context(points.watch(module, modules_in_order(module, part.inventory), has_loss))
        with explained_in_trace(config, model, plan):
            yield


def _group_sizes(config: JobConfig, model: nn.Module, plan: ModelPlan, layout: Layout) -> list[GroupSizes]:
    """Return the sizes of the trainable parameters on this rank, for each parameter group. If the optimizer is sharded
    over replicas, these are the sizes of the chunks that this rank updates."""

    def size_of(parameter: nn.Parameter) -> ShardSize:
        num_elements = chunk_numel(local_tensor(parameter).shape, layout.optimizer_replicas)
        return ShardSize(tuple(parameter.shape), num_elements, dtype_of(parameter))

    groups = group_parameters(model, config.optimizer, plan.inventory.head, width_scales(config))
    return [GroupSizes(group.settings, list(map(size_of, group.parameters.values()))) for group in groups]


def _exchanged_units(model: nn.Module, plan: ModelPlan, layout: Layout) -> list[ExchangedUnit]:
    """Return the units of a model, or of this rank's pipeline stages, for which replicas exchange gradients and
    parameters. The list is empty if the optimizer is not sharded over replicas."""
    replicas = layout.optimizer_replicas
    return [
        exchanged_unit(unit, [local_tensor(p).shape for p in own], replicas)
        for unit, own in (trained_by_unit(model, plan).items() if replicas > 1 else ())
        if unit.gradient_dtype is not None
    ]
