"""FSDP2's schedule of allocations, all-gathers, frees and reductions, unit by unit. This module does not import torch.

This module is a transcription of `torch.distributed.fsdp._fully_shard` (torch 2.13 and 2.15: `_fsdp_state`,
`_fsdp_param_group`, `_fsdp_collectives`), with sizes instead of tensors. Names and lifetimes of tensors are those of
FSDP2. Comments mark tensors that a local variable in FSDP2 keeps alive longer. The schedule follows the installed
release, or the newest tested release if torch is not installed.

`plan.memory.replay` calls the hooks of this module in the order of the model's tape (`plan.memory.tape`). The tape
itself contains the casts at the boundaries of units.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from math import prod
from typing import NamedTuple

from titan_launch.config.axes import TENSOR
from titan_launch.config.sections.section import DTYPE_BYTES
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.torch_release import (
    ACCUMULATES_IN_GRAD,
    FINALIZES_BACKWARD,
    FREES_EARLIER,
    FREES_WITHOUT_GRADIENTS,
    KEEPS_REDUCED_GRADIENTS,
    SKIPS_DIVISION_BY_ONE,
)
from titan_launch.plan.communication import padded_numel
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.clock import Clock
from titan_launch.plan.memory.ledger import Category, Ledger
from titan_launch.plan.replica_shards import ExchangedUnit
from titan_launch.plan.types import TensorInfo, Unit, sharded_dim


class Storage:
    """Memory that the ledger counts as allocated as long as a reference to this object exists. (CPython's reference
    counts free it, like the memory of a PyTorch tensor.)"""

    __slots__ = ("_category", "_ledger", "dtype", "num_bytes")

    def __init__(
        self,
        ledger: Ledger,
        num_bytes: int,
        category: Category,
        dtype: str = "uint8",
        taken_from: Category | None = None,
    ):
        """`taken_from`: category under which the ledger already counts this memory; None for new memory."""
        self._ledger = ledger
        self.num_bytes = num_bytes
        self.dtype = dtype
        self._category = category
        if taken_from is None:
            ledger.allocate(num_bytes, category)
        else:
            ledger.move(num_bytes, taken_from, category)

    def __del__(self) -> None:
        self._ledger.free(self.num_bytes, self._category)

    @property
    def numel(self) -> int:
        return self.num_bytes // DTYPE_BYTES[self.dtype]

    def relabel(self, category: Category) -> None:
        """Count the memory under another category."""
        self._ledger.move(self.num_bytes, self._category, category)
        self._category = category


class State(Enum):
    """FSDP2's `TrainingState`."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class Context:
    """State that all units of a root share: FSDP2's `FSDPCommContext` and `FSDPStateContext`."""

    def __init__(
        self,
        ledger: Ledger,
        layout: Layout,
        accumulation: GradientAccumulationConfig,
        exchanged: Mapping[Unit, ExchangedUnit],
        splits_backward: bool,
        clock: Clock,
    ):
        """`exchanged`: sizes of the gradients that a sharded optimizer exchanges during the last backward.
        `splits_backward`: True if a separate backward computes the gradients of weights (zero-bubble schedules)."""
        self.clock = clock
        self.ledger = ledger
        self.layout = layout
        self.offloads = Category.GRADIENTS in ledger.on_host
        """True with CPU offload: shards of parameters and gradients are in host memory."""
        self.units: list[ShardedUnit] = []
        """Units in the order of the model's modules, parents before children."""
        self.all_gather: Storage | None = None
        """Buffer of the last all-gather in forward. It lives until the copy-out of the next all-gather."""
        self.reduce_scatter_inputs: list[Storage] = []
        self.reduced_at = 0.0
        """Time of the end of the last reduce-scatter."""
        self.post_forward_order: list[ShardedUnit] = []
        self.iter_forward_root: ShardedUnit | None = None
        self.traffic: Counter[str] = Counter()
        """Calls and bytes of collectives since `Replay._take_traffic` last cleared the counts. The keys are
        `all_gathers`, `all_gather_bytes`, `tensor`, `tensor_bytes` and so on."""
        self._accumulation = accumulation
        self._exchanged = exchanged
        self._is_manual = splits_backward and FINALIZES_BACKWARD
        """True if FSDP2 ends a backward only when `finalize_backward` is called; False if FSDP2 ends a backward as soon
        as autograd has ended it."""
        self._orders: dict[int, list[ShardedUnit]] = {}
        self._exchange: _Exchange | None = None

    def new(self, numel: int, dtype: str, category: Category) -> Storage:
        """Return new memory for `numel` elements."""
        return Storage(self.ledger, numel * DTYPE_BYTES[dtype], category, dtype)

    def count(self, collective: str, num_bytes: int, unit: ShardedUnit) -> None:
        """Count an `all_gather`, a `reduce_scatter` or an `all_reduce`. `num_bytes`: bytes of its larger buffer."""
        self.traffic[f"{collective}s"] += 1
        self.traffic[f"{collective}_bytes"] += num_bytes
        if unit.unit.is_divided and collective != "all_reduce":
            self.traffic[f"expert_{collective}_bytes"] += num_bytes

    def begin_microbatch(self, is_last: int) -> None:
        """Set which collectives the next backward runs, and whether it reshards the parameters, as
        `parallel.fsdp.Accumulation` does on the model. `is_last`: 1 for the last microbatch, else 0."""
        mode = self._accumulation.row
        for unit in self.units:
            unit.reduce_grads = bool(is_last) or mode.reduce_scatters_each
            unit.all_reduce_grads = bool(is_last) or mode.all_reduces_each
            unit.reshard_after_backward = bool(is_last) or not self._accumulation.keep_params_unsharded
            if is_last:
                unit.exchanged = self._exchanged.get(unit.unit)

    def finish_backward(self) -> None:
        """Finish backward, as FSDP2's `_root_post_backward_final_callback` does."""
        # `iter_forward_root` is still set if the second forward of a checkpointed block ran only a part of a unit.
        self.iter_forward_root = None
        for unit in self.units:
            if unit.parameters:
                if unit.group_state is not State.POST_BACKWARD:
                    if self._is_manual and unit.reduce_grads:
                        unit.is_pending = True
                    else:
                        unit.post_backward()
                unit.group_state = State.IDLE
            unit.state = State.IDLE
            if not FINALIZES_BACKWARD:  # older releases end each unit here
                unit.finalize_backward()
        if self._is_manual:
            self.all_gather = None
        else:
            self._end_iteration()

    def finalize_backward(self) -> None:
        """End the backward of all microbatches, as `FSDPModule.finalize_backward` does."""
        for unit in reversed(self.units):
            if unit.is_pending:
                unit.post_backward()
            elif unit.reshard_after_backward:
                unit.reshard()
            unit.group_state = State.IDLE
        self._end_iteration()

    def _end_iteration(self) -> None:
        self.clock.wait_for_all()
        for unit in self.units:
            unit.finalize_backward()
        self.post_forward_order.clear()
        self.reduce_scatter_inputs.clear()

    def accumulate_in_reduce_dtype(self) -> None:
        """Add the gradients of unsharded parameters to the accumulated gradients, in the reduce dtype
        (`distributed.torch_private.accumulate_in_reduce_dtype`). Do nothing from torch 2.15 on, where autograd does
        this."""
        for unit in () if ACCUMULATES_IN_GRAD else self.units:
            unit.accumulate_in_reduce_dtype()

    def pop_forward_order(self, microbatch: int) -> None:
        """Save the order in which units ran in the forward of a microbatch, and clear FSDP2's record of this order."""
        self._orders[microbatch] = list(self.post_forward_order)
        for unit in self.post_forward_order:
            unit.post_forward_indices.clear()
        self.post_forward_order.clear()

    def restore_forward_order(self, microbatch: int) -> None:
        """Restore the order that `pop_forward_order` has saved for a microbatch, before the microbatch's backward."""
        self.pop_forward_order(-1)
        self.post_forward_order.extend(self._orders.pop(microbatch))
        for index, unit in enumerate(self.post_forward_order):
            unit.post_forward_indices.append(index)

    def end_forward(self) -> None:
        """Free the unsharded parameters after forwards without a backward (`distributed.torch_private.end_forward`)."""
        self.post_forward_order.clear()
        for unit in self.units:
            unit.end_forward()

    def start_exchange(self, unit: ShardedUnit, sizes: ExchangedUnit) -> None:
        """Complete the previous exchange, and start the exchange of a unit's gradients between the replicas
        (`optim.replica_shards.ReplicaShards`)."""
        self.finish_exchange()
        sent = self.new(self.layout.optimizer_replicas * sizes.width, sizes.reduce_dtype, Category.REDUCE_SCATTER)
        unit.sharded_gradient = None
        received = self.new(sizes.width, sizes.reduce_dtype, Category.REDUCE_SCATTER)
        # Only FSDP2's stream waits here. Computation waits for the last exchange at the end of backward.
        self.clock.exchange_replicas("reduce_scatter", self.layout.optimizer_replicas * sizes.reduced)
        self._exchange = _Exchange(unit, sizes, sent, received)

    def finish_exchange(self) -> None:
        """Complete the exchange that was started last, if it is pending. The unit's `sharded_gradient` is then the
        gradient of this replica's chunks."""
        if self._exchange is None:
            return
        unit, sizes, received = self._exchange.unit, self._exchange.sizes, self._exchange.received
        self._exchange = None
        if sizes.reduce_dtype != sizes.storage_dtype:
            received = self.new(sizes.width, sizes.storage_dtype, Category.GRADIENTS)
        received.relabel(Category.GRADIENTS)
        unit.sharded_gradient = received


class _Exchange(NamedTuple):
    unit: ShardedUnit
    sizes: ExchangedUnit
    sent: Storage
    received: Storage


class Parameter:
    """A parameter of a unit; for experts, the part of the parameter that expert parallelism leaves to this rank."""

    def __init__(self, info: TensorInfo, policy: Unit, unit: Unit, layout: Layout):
        """`info`: the parameter with the shape that tensor parallelism leaves to this rank. `policy`: the unit, or the
        entry of `ModelPlan.in_place`, that sets the parameter's dtypes. `unit`: the unit that shards the parameter."""
        shape, shards = unit.part(info.shape), layout.shards_of(unit)
        self.numel = prod(shape)
        self.is_trained = info.requires_grad
        self.padded = padded_numel(info, unit, layout)
        self.is_sharded_inside = shards > 1 and sharded_dim(shape, shards, info.is_stacked) > 0
        """True if FSDP2 shards a dim other than the first. FSDP2 then makes one more copy of the parameter and of its
        gradient."""
        self.stored, self.computed = policy.storage_dtype, policy.compute_dtype
        self.is_cast = self.computed != self.stored
        self.padded_bytes = self.padded * DTYPE_BYTES[self.computed]
        self.sent_elements = 0
        """Elements that this rank sends when tensor parallelism reduces the gradient (`Tape.reduced`)."""


class ShardedUnit:
    """The simulated state of one FSDP2 unit, as in FSDP2's `FSDPState` and `FSDPParamGroup`."""

    def __init__(self, context: Context, unit: Unit, parameters: Sequence[tuple[TensorInfo, Unit, bool]]):
        """`parameters`: for each parameter the arguments `info` and `policy` of `Parameter`, and the result of
        `Layout.is_ignored`."""
        self.context = context
        self.unit = unit
        self.shards = context.layout.shards_of(unit)
        self.weights = [Parameter(info, policy, unit, context.layout) for info, policy, _ in parameters]
        pairs = zip(self.weights, parameters, strict=True)
        self.parameters = [weight for weight, (*_, is_ignored) in pairs if not is_ignored]
        """The parameters that FSDP2 manages."""
        self.shard_bytes = sum(p.padded // self.shards * DTYPE_BYTES[p.stored] for p in self.weights)
        """Bytes of the shards of all parameters on this rank."""
        self.prefetch: list[ShardedUnit] = []
        """Units whose all-gathers start in this unit's backward (`set_modules_to_backward_prefetch`). Empty: FSDP2
        prefetches the unit that ran before this unit in forward."""
        self.forward_prefetch: list[ShardedUnit] = []
        """Units whose all-gathers start in this unit's forward (`set_modules_to_forward_prefetch`)."""
        self.reduce_grads = self.all_reduce_grads = self.reshard_after_backward = True
        self.exchanged: ExchangedUnit | None = None
        """Sizes of the gradients that the replicas exchange as soon as FSDP2 has reduced them. None: this backward has
        no exchange."""
        self.sharded_gradient: Storage | None = None
        """Gradients of the local shards. After an exchange, gradients of this replica's chunks of the shards."""
        self.state = self.group_state = State.IDLE
        self._prefetches_forward = False
        self.post_forward_indices: list[int] = []
        self.is_pending = False
        """FSDP2's `_post_backward_pending`."""
        self._pending: Storage | None = None
        """Buffer of a started all-gather, until `wait_for_unshard`. With one shard, the buffer has no bytes."""
        self._gathered_at = 0.0
        """Time at which the started all-gather ends."""
        self._unsharded_bytes = 0
        self._gradients: dict[int, Storage] = {}
        self._accumulated: dict[int, Storage] = {}
        self._partial_reduce_output: Storage | None = None
        self._all_reduce_input: Storage | None = None

    # Parameters

    def unshard(self) -> None:
        """Start the all-gather of the parameters. Do nothing if the all-gather has started, if the parameters are
        already unsharded, or in backward if `Unit.unshard_in_backward` is False."""
        if self._pending is not None or self._unsharded_bytes or not self.parameters:
            return
        if not self.unit.unshard_in_backward and self.group_state is State.PRE_BACKWARD:
            return
        if self.shards == 1:
            self._pending = self._new_bytes(0)
            return
        shards = self._shards_to_send()
        self._pending = self._new_bytes(sum(parameter.padded_bytes for parameter in self.parameters))
        self.context.count("all_gather", self._pending.num_bytes, self)
        self._gathered_at = self.context.clock.all_gather(self._pending.num_bytes, self.unit)
        del shards

    def _new_bytes(self, num_bytes: int, category: Category = Category.ALL_GATHER) -> Storage:
        return Storage(self.context.ledger, num_bytes, category)

    def _shards_to_send(self) -> list[Storage]:
        """Return the temporary inputs of an all-gather: the shards that are cast. With CPU offload, return all shards,
        copied to the device, and cast if their dtypes differ."""
        world = self.shards
        if not self.context.offloads:
            cast_bytes = sum(parameter.padded_bytes for parameter in self.parameters if parameter.is_cast)
            return [self._new_bytes(cast_bytes // world)] if cast_bytes else []
        shards = []
        for parameter in self.parameters:
            shard = self.context.new(parameter.padded // world, parameter.stored, Category.ALL_GATHER)
            if parameter.is_cast:
                shard = self._new_bytes(parameter.padded_bytes // world)
            shards.append(shard)
        return shards

    def wait_for_unshard(self) -> None:
        """Copy the all-gathered buffer into the parameters. With one shard, cast and copy the parameters instead. Do
        nothing if no all-gather was started."""
        if self._pending is None:
            return
        is_forward, world = self.group_state is State.FORWARD, self.shards
        # Before torch 2.15, a local variable in FSDP2 keeps this buffer alive during the copy.
        before = self.context.all_gather if is_forward and not FREES_EARLIER else None
        if is_forward:
            self.context.all_gather = None
        if world == 1:
            self._cast_one_by_one()
        else:
            self.context.clock.wait(self._gathered_at)
            self.context.clock.copy(2 * self._pending.num_bytes)
            self.context.clock.copied_out()
            self._copy_out()
            if is_forward:
                self.context.all_gather = self._pending
        self._pending = None
        del before

    def _copy_out(self) -> None:
        copies = []  # FSDP2 keeps all copies until the last parameter is copied
        for parameter in self.parameters:
            self._count_unsharded(parameter.padded_bytes)
            if parameter.is_sharded_inside:
                copies.append(self._new_bytes(parameter.padded_bytes, Category.UNSHARDED_PARAMETERS))

    def _cast_one_by_one(self) -> None:
        """Cast and copy the parameters, one after the other."""
        copy = None
        for parameter in self.parameters:
            if not parameter.is_cast:
                copy = None
            if self.context.offloads:
                copy = self.context.new(parameter.padded, parameter.stored, Category.ALL_GATHER)
            if parameter.is_cast:
                copy = self._new_bytes(parameter.padded_bytes)
            stored = parameter.padded * DTYPE_BYTES[parameter.stored] * parameter.is_cast
            self.context.clock.copy(stored + (2 + parameter.is_cast) * parameter.padded_bytes)
            self._count_unsharded(parameter.padded_bytes)
        del copy

    def _count_unsharded(self, num_bytes: int) -> None:
        self.context.ledger.allocate(num_bytes, Category.UNSHARDED_PARAMETERS)
        self._unsharded_bytes += num_bytes

    def reshard(self) -> None:
        """Free the unsharded parameters. After forward, do nothing if the unit does not reshard after forward."""
        # `reshard_after_forward` is None for the root, which FSDP2 does not reshard.
        if self.group_state is State.FORWARD and not self.unit.reshard_after_forward:
            return
        self.context.ledger.free(self._unsharded_bytes, Category.UNSHARDED_PARAMETERS)
        self._unsharded_bytes = 0

    # Forward

    def pre_forward(self) -> None:
        """Begin the forward of a module of the unit, before FSDP2 casts the module's inputs."""
        if self.state is State.PRE_BACKWARD:  # the second forward of a checkpointed block
            if not self._unsharded_bytes:
                self.unshard()
                self.wait_for_unshard()
            return
        if self.state is not State.FORWARD:
            if self.context.iter_forward_root is None:
                self.context.iter_forward_root = self
            self._prefetches_forward = True
        self.state = State.FORWARD

    def unshard_in_forward(self) -> None:
        """Unshard the parameters before a module of the unit runs, after the cast of its inputs."""
        self.group_state = State.FORWARD
        self.unshard()
        self.wait_for_unshard()

    def prefetch_in_forward(self) -> None:
        """Start the all-gathers of the units that forward needs next, once for all modules of this unit."""
        if self._prefetches_forward:
            self._prefetches_forward = False
            for unit in self.forward_prefetch:
                unit.prefetch_as(State.FORWARD)

    def post_forward(self, in_backward: int) -> None:
        """Reshard after the unit's last module has run, before FSDP2 casts the module's output. `in_backward`: 1 in the
        second forward of a checkpointed block, else 0."""
        if self.state is State.PRE_BACKWARD:
            return
        self.complete_forward(in_backward)
        if self.context.iter_forward_root is self:
            self.context.all_gather = None
            self.context.iter_forward_root = None

    def complete_forward(self, in_backward: int) -> None:
        """End the unit's forward, even if not all of its modules have run. `in_backward`: as in `post_forward`."""
        if self.parameters:
            if not in_backward:
                self.context.clock.host("unit")
                self.reshard()
                self.post_forward_indices.append(len(self.context.post_forward_order))
                self.context.post_forward_order.append(self)
            self.group_state = State.IDLE
        self.state = State.IDLE

    def end_forward(self) -> None:
        """Free the unsharded parameters after forwards without a backward."""
        self.post_forward_indices.clear()
        self.wait_for_unshard()  # the unit may have been prefetched for a module that did not run
        self.reshard()

    # Backward

    def pre_backward(self) -> None:
        """Begin the unit's backward when the gradient of the unit's output exists. Start the all-gathers of the units
        that backward needs next."""
        self.state = State.PRE_BACKWARD
        if self.parameters and self.group_state is not State.PRE_BACKWARD:
            self.group_state = State.PRE_BACKWARD
            self.unshard()
            self.wait_for_unshard()
            if not self.prefetch and self.post_forward_indices and (index := self.post_forward_indices.pop()) > 0:
                self.context.post_forward_order[index - 1].prefetch_as(State.PRE_BACKWARD)
        for unit in self.prefetch:
            unit.prefetch_as(State.PRE_BACKWARD)

    def prefetch_as(self, state: State) -> None:
        """Start the all-gather of this unit early, in the forward or the backward of another unit."""
        before, self.group_state = self.group_state, state
        self.unshard()
        self.group_state = before

    def accumulate(self, index: int, gradient: Storage) -> None:
        """Accumulate an unsharded gradient that autograd has computed for a parameter. The memory of the first gradient
        then counts under UNSHARDED_GRADIENTS. A second gradient is added in place. `index`: index of the parameter in
        `parameters`."""
        dtype = self.grad_dtype(index, gradient.dtype)
        if dtype != gradient.dtype:
            gradient = self.context.new(gradient.numel, dtype, Category.BACKWARD)
        if index in self._gradients:
            self.context.clock.copy(3 * gradient.num_bytes)
            return
        gradient.relabel(Category.UNSHARDED_GRADIENTS)
        self._gradients[index] = gradient

    def grad_dtype(self, index: int, computed: str) -> str:
        """Return the dtype in which autograd accumulates a gradient. `computed`: dtype of the gradient before the cast.
        `index`: as in `accumulate`."""
        if not ACCUMULATES_IN_GRAD:
            return computed
        # From torch 2.15 on, FSDP2's `_set_unsharded_grad_dtypes` sets this dtype.
        is_wider = DTYPE_BYTES[self.unit.reduce_dtype] > DTYPE_BYTES[computed]
        is_added = self.reduce_grads or index in self._gradients
        return computed if is_wider and is_added else self.unit.reduce_dtype

    def post_backward(self) -> None:
        """Accumulate or reduce the gradients of the unit when all of them exist. Reshard the parameters if
        `reshard_after_backward` is True."""
        if not self.parameters:  # without a parameter group, FSDP2 has no such hook
            return
        self.group_state = State.POST_BACKWARD
        for index in self._accumulated:
            self._gradients.pop(index, None)
        self.is_pending = not self.reduce_grads
        if not self.reduce_grads:
            if self.reshard_after_backward:
                self.reshard()
            if not ACCUMULATES_IN_GRAD:
                self.accumulate_in_reduce_dtype()
            return
        unsharded = {**self._gradients, **self._accumulated}
        self._gradients.clear()
        self._accumulated.clear()
        gradients = self._reduced_by_tensor_parallelism(unsharded)
        if self.reshard_after_backward:
            self.reshard()
        if gradients or FREES_WITHOUT_GRADIENTS:
            del self.context.reduce_scatter_inputs[:1]
        if gradients:
            self._all_reduce_input = None
            self._reduce(gradients, [parameter for parameter in self.parameters if parameter.is_trained])

    def _reduced_by_tensor_parallelism(self, unsharded: dict[int, Storage]) -> list[Storage]:
        """Return the gradients in the order of the parameters, after tensor parallelism has reduced them. Only
        gradients of parameters with `sent_elements` above 0 are reduced. `unsharded`: the gradients by index of the
        parameter. This dict is emptied, so that gradients are freed early."""
        reduced, largest = [], 0
        for index in sorted(unsharded):
            parameter, gradient = self.parameters[index], unsharded.pop(index)
            if parameter.sent_elements:
                size = DTYPE_BYTES[gradient.dtype]
                self.context.traffic[TENSOR.name] += 1
                self.context.traffic[f"{TENSOR.name}_bytes"] += parameter.sent_elements * size
                self.context.clock.exchange(TENSOR.name, parameter.sent_elements * size, of_gradients=True)
                if parameter.numel == gradient.numel:
                    largest = max(largest, gradient.num_bytes)
                else:
                    gradient = self.context.new(parameter.numel, gradient.dtype, Category.UNSHARDED_GRADIENTS)
            reduced.append(gradient)
        if largest:
            # The gradients need temporary buffers one after another. Only the largest buffer is counted, so that the
            # number of local maxima does not depend on the number of blocks (`ledger.extrapolate`).
            self._new_bytes(largest, Category.UNSHARDED_GRADIENTS)
        return reduced

    def accumulate_in_reduce_dtype(self) -> None:
        """Add the gradients to those of earlier microbatches, in the reduce dtype. Do nothing if the reduce dtype is
        the compute dtype."""
        if self.unit.reduce_dtype == self.unit.compute_dtype:
            return
        for index in sorted(self._gradients):
            numel = self._gradients[index].numel
            accumulated = numel * DTYPE_BYTES[self.unit.reduce_dtype]
            self.context.clock.copy(self._gradients[index].num_bytes + 2 * accumulated)
            self._accumulated[index] = self.context.new(numel, self.unit.reduce_dtype, Category.UNSHARDED_GRADIENTS)
            del self._gradients[index]

    def _reduce(self, gradients: list[Storage], parameters: Sequence[Parameter]) -> None:
        """Replay FSDP2's `foreach_reduce`: reduce-scatter, all-reduce, and cast to the storage dtype. The list
        `gradients` is emptied when the gradients have been copied."""
        world, is_hsdp = self.shards, self.context.layout.fsdp_replicas > 1
        new, clock, dtype = self.context.new, self.context.clock, self.unit.reduce_dtype
        padded = sum(parameter.padded for parameter in parameters)
        # Before torch 2.15, a loop variable in FSDP2 keeps the last gradient alive until the function ends.
        last = gradients[-1] if world > 1 and not FREES_EARLIER else None
        chunked = None  # a local variable in FSDP2 keeps the last copied gradient alive
        for index, parameter in enumerate(parameters):
            if parameter.is_sharded_inside:
                chunked = gradients[index]
                gradients[index] = self._new_bytes(chunked.num_bytes, Category.REDUCE_SCATTER)
        reduce_input = new(padded, dtype, Category.REDUCE_SCATTER)
        clock.wait(self.context.reduced_at)
        clock.copy(reduce_input.num_bytes + sum(gradient.num_bytes for gradient in gradients))
        gradients.clear()
        output = new(padded // world, dtype, Category.REDUCE_SCATTER)
        if world > 1:
            self.context.count("reduce_scatter", reduce_input.num_bytes, self)
            self.context.reduced_at = clock.reduce_scatter(reduce_input.num_bytes, self.unit)
        else:
            clock.copy_reduced(2 * output.num_bytes)
        if world == 1 and is_hsdp and not SKIPS_DIVISION_BY_ONE:  # FSDP2 divides by 1
            divided = new(padded, dtype, Category.REDUCE_SCATTER)
            del divided
        self.context.reduce_scatter_inputs.append(reduce_input)
        if self._partial_reduce_output is not None:
            clock.copy_reduced(3 * output.num_bytes)
        if is_hsdp and not self.all_reduce_grads:
            if self._partial_reduce_output is None:
                if not self.context.offloads:  # with offload, `output` stays on the device until the all-reduce
                    output.relabel(Category.GRADIENTS)
                self._partial_reduce_output = output
            return
        if is_hsdp:
            self._all_reduce_input = output
            self.context.count("all_reduce", output.num_bytes, self)
            clock.all_reduce(output.num_bytes)
        reduced = output if KEEPS_REDUCED_GRADIENTS else None
        if dtype != parameters[0].stored:
            reduced_bytes = output.num_bytes
            output = new(padded // world, parameters[0].stored, Category.REDUCE_SCATTER)
            clock.copy_reduced(reduced_bytes + output.num_bytes)
        if self.sharded_gradient is not None:
            clock.copy_reduced(3 * output.num_bytes)
        if self.exchanged is not None:  # called in a hook of the parameters, while FSDP2 still holds `output`
            self.context.start_exchange(self, self.exchanged)
        elif self.sharded_gradient is None:
            output.relabel(Category.GRADIENTS)
            self.sharded_gradient = output
        self._partial_reduce_output = None
        del last, chunked, reduced

    def finalize_backward(self) -> None:
        """Drop the buffers of pending collectives at the end of backward."""
        self._all_reduce_input = None
        self._pending = None
        self.post_forward_indices.clear()
