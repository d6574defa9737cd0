"""Replay of one optimizer step of a model on one rank, as FSDP2 and autograd run it. No torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from titan_launch.config.architectures.base import ModelArgs
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.base import DTYPE_BYTES
from titan_launch.config.sections.data import separates_documents
from titan_launch.plan.communication import exchanged_units
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.analytic import ops
from titan_launch.plan.memory.analytic.autograd import Autograd
from titan_launch.plan.memory.analytic.fsdp import CalledUnit, cast_input, cast_output
from titan_launch.plan.memory.analytic.tensors import Tensor
from titan_launch.plan.memory.fsdp import Context, Storage
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
)
from titan_launch.plan.memory.replay import group_sizes
from titan_launch.plan.module_selection import selection
from titan_launch.plan.replica_shards import gradients_leave_early
from titan_launch.plan.types import Inventory, ModelPlan, ModuleInfo, TensorInfo, Unit, full_name, outermost
from titan_launch.plan.units.order import plan_backward_prefetch, plan_forward_prefetch
from titan_launch.plan.units.rule_assignment import is_batch_norm

Compute = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ReplayContext:
    """Inputs of a replayed forward on one rank: sequence length, autograd, kernels, parameters, and the call of a
    module."""

    seq_len: int
    autograd: Autograd
    kernels: Kernels
    weight: Callable[[str], Tensor]
    """Returns the parameter with the given full name."""

    call: Callable[[str, Compute, Tensor], Tensor]
    """Runs the module at a path as `nn.Module.__call__` does, with FSDP2's hooks."""

    statistics_ranks: int
    """Number of ranks over which the statistics of BatchNorm are synchronized; 0 if statistics are local."""

    loss_chunks: int
    """Number of chunks of classes in which the output layer computes the loss; 1 if it returns logits."""

    has_documents: bool
    """True if the documents of a sample are separated."""

    expert_ranks: int
    """Number of ranks over which the experts of a layer are divided."""

    expert_load: float
    """Value of `planner.expert_load`."""


class Forward(Protocol):
    """The replayed forward of a model for one microbatch."""

    def __call__(self, inputs: Tensor, blocks: Iterable[str], /) -> Tensor:
        """Return the logits, or the loss if the output layer computes it. Only the blocks with the paths `blocks` run.
        (A shallower model is the model with some blocks removed; its arguments still have the full number of
        blocks.)"""


@dataclass(frozen=True)
class AnalyticModel:
    """A language model that the analytic engine supports. `args` are the model's arguments."""

    inventory: Callable[[Any, int], Inventory]
    """Function of (args, seq_len) that returns the table of the model's modules, equal to the result of
    `models.build.take_inventory`."""

    build: Callable[[Any, ReplayContext], Forward]
    """Function of (args, context) that returns the forward of the model."""

    unknown_part: Callable[[JobConfig, Any, Kernels], str | None] = lambda config, args, kernels: None
    """(config, args, kernels) to the part of a job that the engine does not support for this model, in words; None if
    there is none."""


class Replay:
    """A model with its FSDP2 units, for one step."""

    def __init__(
        self,
        config: JobConfig,
        model: AnalyticModel,
        args: ModelArgs,
        plan: ModelPlan,
        layout: Layout,
        kernels: Kernels,
        again: Collection[str],
    ):
        """`again`: paths of the checkpointed blocks."""
        self._config = config
        self._plan = plan
        self._layout = layout
        self._ledger = Ledger(on_host(config.training, kernels))
        self._autograd = Autograd(self._ledger)
        self._groups = group_sizes([(plan, plan)], config.optimizer, layout)
        self._exchanged = exchanged_units(plan, layout)
        during_backward = self._exchanged if gradients_leave_early(config.training) else {}
        self._context = Context(self._ledger, layout, config.gradient_accumulation, during_backward)
        self._unit_of_module = self._make_units()
        self._again = again
        blocks = outermost(plan.inventory.blocks) if config.activation_checkpoint.offload else ()
        self._offloaded = {path: index for index, path in enumerate(blocks)}
        self._keeps = _every_second_product if selection(config.activation_checkpoint) == "op" else None
        statistics_ranks = layout.data_parallel if config.batchnorm.statistics == "synchronized" else 0
        weight, seq_len = self._weights().__getitem__, config.training.seq_len
        self._loss_chunks = config.loss.chunks
        context = ReplayContext(
            seq_len,
            self._autograd,
            kernels,
            weight,
            self._call,
            statistics_ranks,
            self._loss_chunks,
            separates_documents(config.data),
            layout.expert,
            config.planner.expert_load,
        )
        self._model = model.build(args, context)
        self._entered_modules = {*plan.inventory.blocks, *plan.inventory.head, *plan.inventory.embeddings}
        self._num_tokens = layout.local_batch_size * config.training.seq_len
        self._microbatch = 0

    def step(self) -> Footprint:
        """Run the step and return its footprint. May be called only once."""
        self._ledger.enter(StepPoint(0, "forward", ""))
        self._allocate_state()
        count = min(self._layout.num_microbatches, MICROBATCHES)
        for self._microbatch in range(count):
            self._context.begin_microbatch(self._microbatch == count - 1)
            self._forward_and_backward()
        self._ledger.enter(StepPoint(self._microbatch, "optimizer", ""))
        self._context.finish_exchange()
        temporaries = temporary_bytes(self._config.optimizer, self._groups, self._layout.optimizer_shards)
        leave_early = gradients_leave_early(self._config.training)
        book_update(self._ledger, temporaries, self._exchanged.values(), self._layout, leave_early)
        return self._ledger.footprint()

    def _make_units(self) -> dict[str, CalledUnit]:
        """Return the FSDP2 unit of each module, by path. Also store the units in FSDP2's context, in the order of the
        model's modules."""
        plan, offloads = self._plan, self._config.training.enable_cpu_offload

        def parameters(module: ModuleInfo) -> Iterator[tuple[TensorInfo, Unit, bool]]:
            policy = plan.unit_of[module.path]
            is_ignored = self._layout.is_ignored(policy, offloads)
            return ((p, policy, is_ignored) for p in module.parameters if p.tied_to is None)

        units = [
            CalledUnit(
                self._context,
                self._autograd,
                unit,
                plan.casts_inputs(unit),
                [p for module in modules for p in parameters(module)],
            )
            for unit, modules in zip(plan.units, plan.modules_by_unit(), strict=True)
        ]
        by_path = {path: unit for unit in units for path in unit.unit.modules}
        in_order = (by_path[m.path] for m in self._plan.inventory.modules if m.path in by_path)
        self._context.units = list(dict.fromkeys(in_order))
        for path, ahead in plan_backward_prefetch(self._plan).items():
            by_path[path].prefetch = [by_path[other] for other in ahead]
        for path, ahead in plan_forward_prefetch(self._plan).items():
            by_path[path].forward_prefetch = [by_path[other] for other in ahead]
        return by_path

    def _weights(self) -> dict[str, Tensor]:
        """Return every parameter by its full name. Shared parameters have an entry for each name."""
        weights: dict[str, Tensor] = {}
        unseen = {unit.unit: iter(unit.tensors) for unit in self._unit_of_module.values()}
        for module in self._plan.inventory.modules:
            for info in module.parameters:
                if info.tied_to is None:
                    weight = next(unseen[self._plan.sharded_by[module.path]])
                else:
                    weight = weights[info.tied_to]
                weights[full_name(module.path, info.name)] = weight
        return weights

    def _allocate_state(self) -> None:
        """Allocate the memory that exists before the step: parameter shards, optimizer state and buffers."""
        for unit in self._context.units:
            self._ledger.allocate(unit.shard_bytes, Category.PARAMETERS)
        self._ledger.allocate(state_bytes(self._config.optimizer, self._groups), Category.OPTIMIZER)
        self._ledger.allocate(ema_bytes(self._config.ema, self._groups), Category.EMA)
        self._ledger.allocate(sum(self._buffer_bytes()), Category.BUFFERS)

    def _buffer_bytes(self) -> Iterator[int]:
        """Yield the bytes of every buffer. BatchNorm's running statistics exist twice, because a skipped step
        restores them."""
        dtypes = self._plan.buffer_dtypes
        for module in self._plan.inventory.modules:
            for buffer in module.buffers if module.same_as is None else ():
                size = DTYPE_BYTES[dtypes[full_name(module.path, buffer.name)]] if buffer.is_floating else 8
                yield buffer.numel * size * (2 if is_batch_norm(module) else 1)

    def _forward_and_backward(self) -> None:
        num_tokens = self._num_tokens
        token_bytes = 2 * 8 + 4 * separates_documents(self._config.data)  # int64 inputs and targets, int32 documents
        batch = Storage(self._ledger, token_bytes * num_tokens, Category.INPUTS)
        tokens = Tensor(batch, num_tokens, "float32")
        loss = self._loss(self._call("", self._forward, tokens))
        self._autograd.backward(loss, Tensor(None, 1, "float32"))
        self._context.finish_backward()

    def _forward(self, tokens: Tensor) -> Tensor:
        return self._model(tokens, self._plan.inventory.blocks)

    def _loss(self, outputs: Tensor) -> Tensor:
        """Return the loss. The step point of the loss lasts until the gradient of the outputs exists."""
        self._ledger.enter(StepPoint(self._microbatch, "loss", ""))
        if self._loss_chunks > 1:
            return outputs
        logits = ops.cast(self._autograd, outputs, "float32")
        loss = ops.cross_entropy(self._autograd, logits)
        if not self._config.loss.z_loss:
            return loss
        return ops.add(self._autograd, loss, ops.z_loss(self._autograd, logits, self._num_tokens))

    def _call(self, path: str, compute: Compute, x: Tensor) -> Tensor:
        """Run a module as `nn.Module.__call__` does: FSDP2's hooks surround activation checkpointing, which surrounds
        `forward`."""
        is_forward = not self._autograd.is_backward
        if is_forward and path in self._entered_modules:
            self._ledger.enter(StepPoint(self._microbatch, "forward", path))
        if is_forward and path in self._again:
            compute = self._checkpointed(compute)
        if is_forward and path in self._offloaded:
            compute = partial(self._autograd.offloader.run, self._offloaded[path], compute)
        unit, policy = self._unit_of_module.get(path), self._plan.policies.get(path)
        gathered = x if unit is None else unit.enter(x)  # as in nn.Module, `x` lives until this function returns
        given = gathered if policy is None else cast_input(self._autograd, gathered, policy)
        del gathered
        output = compute(given)
        if is_forward and path in self._entered_modules:
            self._mark_backward(output, path)
        output = output if unit is None else unit.leave(path, output)
        return output if policy is None else cast_output(self._autograd, output, policy)

    def _checkpointed(self, compute: Compute) -> Compute:
        return lambda x: self._autograd.checkpoint(compute, x, self._keeps)

    def _mark_backward(self, output: Tensor, path: str) -> None:
        """Enter the step point of a module's backward as soon as the gradient of its output exists. A module in front
        of all trained parameters has no backward."""
        if output.node is None:
            return
        point = StepPoint(self._microbatch, "backward", path)
        output.node.hooks.append(lambda: self._ledger.enter(point))


def _every_second_product() -> Callable[[str], bool]:
    """Return a new predicate for the costly operations of one forward of a block, in the order in which they run.

    The predicate is true if selective checkpointing with `selective_ac_option = "op"` saves the next result. Of matrix
    products, the first, third, ... is saved; of other operations, such as attention, every one.
    """
    num_products = 0

    def keeps(name: str) -> bool:
        nonlocal num_products
        num_products += name == "mm"
        return name != "mm" or num_products % 2 == 1

    return keeps
