"""FSDP2's schedule of allocations, all-gathers, frees and reductions, unit by unit. No torch.

A transcription of `torch.distributed.fsdp._fully_shard` (torch 2.13 and 2.15: `_fsdp_state`, `_fsdp_param_group`,
`_fsdp_collectives`), with sizes instead of tensors. Names are FSDP2's, so that both can be read side by side. Lifetimes
are also FSDP2's. Comments mark tensors that a local variable in FSDP2 keeps alive longer. The schedule is that of the
installed release, or of the newest tested release if torch is not installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import NamedTuple

from titan_launch.config.sections.base import DTYPE_BYTES
from titan_launch.core.torch_release import (
    ACCUMULATES_IN_GRAD,
    FREES_EARLIER,
    FREES_WITHOUT_GRADIENTS,
    KEEPS_REDUCED_GRADIENTS,
    SKIPS_DIVISION_BY_ONE,
)
from titan_launch.plan.communication import padded_numel
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.analytic.autograd import Autograd
from titan_launch.plan.memory.analytic.ops import cast
from titan_launch.plan.memory.analytic.tensors import Leaf, Tensor
from titan_launch.plan.memory.ledger import Category
from titan_launch.plan.replica_shards import ExchangedUnit
from titan_launch.plan.types import Policy, TensorInfo, Unit, sharded_dim


def cast_input(autograd: Autograd, x: Tensor, policy: Policy) -> Tensor:
    """Return the input of a module, cast by the policy at its border."""
    return x if policy.input_dtype is None else cast(autograd, x, policy.input_dtype)


def cast_output(autograd: Autograd, output: Tensor, policy: Policy) -> Tensor:
    """Return the output of a module, cast by the policy at its border."""
    return output if policy.output_dtype is None else cast(autograd, output, policy.output_dtype)


class State(Enum):
    """FSDP2's `TrainingState`."""

    IDLE = auto()
    FORWARD = auto()
    PRE_BACKWARD = auto()
    POST_BACKWARD = auto()


class Context:
    """State that all units share: FSDP2's `FSDPCommContext` and `FSDPStateContext`."""

    def __init__(self, autograd: Autograd, layout: Layout):
        self.autograd = autograd
        self.layout = layout
        self.offloads = Category.GRADIENTS in autograd.ledger.on_host
        """True with CPU offload: shards of parameters and gradients are in host memory."""
        self.units: list[ShardedUnit] = []
        """Units in the order of the model's modules, parents before children."""
        self.all_gather: Tensor | None = None
        """Buffer of the last all-gather in forward. It lives until the copy-out of the next all-gather."""
        self.reduce_scatter_inputs: list[Tensor] = []
        self.post_forward_order: list[ShardedUnit] = []
        self.iter_forward_root: ShardedUnit | None = None
        self._exchange: _Exchange | None = None

    def finish_backward(self) -> None:
        """Finish backward, as FSDP2's `_root_post_backward_final_callback` does."""
        self.iter_forward_root = None  # set by a unit whose modules the second forward of a block ran only in part
        for unit in self.units:
            unit.modules_to_run.clear()
            if unit.parameters:
                if unit.group_state is not State.POST_BACKWARD:
                    unit.post_backward()
                unit.group_state = State.IDLE
            unit.state = State.IDLE
            unit.finalize_backward()
        self.post_forward_order.clear()
        self.reduce_scatter_inputs.clear()

    def start_exchange(self, unit: ShardedUnit, sizes: ExchangedUnit) -> None:
        """Start to exchange a unit's gradients between the replicas, as `optim.replica_shards.ReplicaShards` does."""
        self.finish_exchange()
        dtype, new = sizes.reduce_dtype, self.autograd.new
        sent = new(self.layout.optimizer_replicas * sizes.width, dtype, Category.REDUCE_SCATTER)
        unit.sharded_gradient = None
        self._exchange = _Exchange(unit, sizes, sent, new(sizes.width, dtype, Category.REDUCE_SCATTER))

    def finish_exchange(self) -> None:
        """Wait for the exchange that was started last."""
        if self._exchange is None:
            return
        unit, sizes, received = self._exchange.unit, self._exchange.sizes, self._exchange.received
        self._exchange = None
        if received.dtype != sizes.storage_dtype:
            received = self.autograd.new(received.numel, sizes.storage_dtype, Category.GRADIENTS)
        assert received.storage is not None
        received.storage.relabel(Category.GRADIENTS)
        unit.sharded_gradient = received


class _Exchange(NamedTuple):
    """An exchange of the gradients of a unit that has started."""

    unit: ShardedUnit
    sizes: ExchangedUnit
    sent: Tensor
    received: Tensor


class Parameter:
    """A parameter of a unit: sharded, and unsharded after an all-gather. With expert parallelism, this rank's part of a
    parameter of experts."""

    def __init__(self, unit: ShardedUnit, info: TensorInfo, policy: Unit, index: int):
        """`policy`: the unit, or the rule or module in place, whose dtypes the parameter has."""
        parts, shape = unit.unit.expert_parallel, info.shape
        self.numel = info.numel // parts
        self.padded = padded_numel(info, unit.shards, parts)
        local_shape = (shape[0] // parts, *shape[1:]) if shape else shape
        self.is_sharded_inside = unit.shards > 1 and sharded_dim(local_shape, unit.shards, info.is_stacked) > 0
        """True if FSDP2 shards another dim than the first one. It then copies the parameter and its gradient once
        more."""
        dtype, self.stored = policy.compute_dtype, policy.storage_dtype
        self.unsharded = Tensor(None, self.numel, dtype, self._leaf(unit, index) if info.requires_grad else None)
        """The tensor that operations take. The unit counts its memory."""
        self.is_cast = dtype != self.stored
        self.padded_bytes = self.padded * DTYPE_BYTES[dtype]

    def _leaf(self, unit: ShardedUnit, index: int) -> Leaf:
        return Leaf(lambda gradient: unit.accumulate(index, gradient), lambda dtype: unit.grad_dtype(index, dtype))


class ShardedUnit:
    """A `fully_shard` call: `FSDPState` with its `FSDPParamGroup`."""

    def __init__(
        self, context: Context, unit: Unit, casts_inputs: bool, parameters: Sequence[tuple[TensorInfo, Unit, bool]]
    ):
        """`casts_inputs`: result of `ModelPlan.casts_inputs`. `parameters`: each with its entry in `ModelPlan.unit_of`,
        and with the result of `Layout.is_ignored`."""
        self.context = context
        self.unit = unit
        self.autograd = context.autograd
        self.shards = context.layout.shards_of(unit)
        self._casts_inputs = casts_inputs
        self.weights: list[Parameter] = []
        self.parameters: list[Parameter] = []
        """The parameters that FSDP2 manages."""
        for info, policy, is_ignored in parameters:
            self.weights.append(Parameter(self, info, policy, len(self.parameters)))
            if not is_ignored:
                self.parameters.append(self.weights[-1])
        self.shard_bytes = sum(p.padded // self.shards * DTYPE_BYTES[p.stored] for p in self.weights)
        """Bytes of the shards of all parameters on this rank."""
        self.prefetch: list[ShardedUnit] = []
        """Units to all-gather ahead in backward, instead of the default: `set_modules_to_backward_prefetch`."""
        self.forward_prefetch: list[ShardedUnit] = []
        """Units to all-gather ahead in forward: `set_modules_to_forward_prefetch`."""
        self.reduce_grads = self.all_reduce_grads = self.reshard_after_backward = True
        self.exchanged: ExchangedUnit | None = None
        """Sizes of the gradients if they are exchanged between the replicas when they have been reduced."""
        self.sharded_gradient: Tensor | None = None
        """Gradients of the local shards, or of this replica's chunks of them after their exchange."""
        self.state = self.group_state = State.IDLE
        self.modules_to_run: set[str] = set()
        self._post_forward_indices: list[int] = []
        self._pending: Tensor | None = None
        """Buffer of a started all-gather, until `wait_for_unshard`. With one shard, an empty tensor marks the start."""
        self._unsharded_bytes = 0
        self._gradients: dict[int, Tensor] = {}
        self._accumulated: dict[int, Tensor] = {}
        self._partial_reduce_output: Tensor | None = None
        self._all_reduce_input: Tensor | None = None

    # Parameters

    def unshard(self) -> None:
        """Start the all-gather."""
        if self._pending is not None or self._unsharded_bytes or not self.parameters:
            return
        if not self.unit.unshard_in_backward and self.group_state is State.PRE_BACKWARD:
            return
        if self.shards == 1:
            self._pending = Tensor(None, 0, "uint8")
            return
        shards = self._shards_to_send()
        num_bytes = sum(parameter.padded_bytes for parameter in self.parameters)
        self._pending = self.autograd.new(num_bytes, "uint8", Category.ALL_GATHER)
        del shards

    def _shards_to_send(self) -> list[Tensor]:
        """Return the temporary inputs of an all-gather: casts of the shards, or copies of shards in host memory."""
        world = self.shards
        if not self.context.offloads:
            cast_bytes = sum(parameter.padded_bytes for parameter in self.parameters if parameter.is_cast)
            return [self.autograd.new(cast_bytes // world, "uint8", Category.ALL_GATHER)] if cast_bytes else []
        shards = []
        for parameter in self.parameters:
            shard = self.autograd.new(parameter.padded // world, parameter.stored, Category.ALL_GATHER)
            if parameter.is_cast:
                shard = self.autograd.new(parameter.padded_bytes // world, "uint8", Category.ALL_GATHER)
            shards.append(shard)
        return shards

    def wait_for_unshard(self) -> None:
        """Copy the all-gathered buffer into the parameters."""
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
            self._copy_out()
        if is_forward and world > 1:
            self.context.all_gather = self._pending
        self._pending = None
        del before

    def _copy_out(self) -> None:
        copies = []
        for parameter in self.parameters:
            self._count_unsharded(parameter.padded_bytes)
            if parameter.is_sharded_inside:
                copies.append(self.autograd.new(parameter.padded_bytes, "uint8", Category.UNSHARDED_PARAMETERS))

    def _cast_one_by_one(self) -> None:
        """Copy every parameter from its cast, one after the other. With one shard there is no all-gather."""
        copy = None
        for parameter in self.parameters:
            if not parameter.is_cast:
                copy = None
            if self.context.offloads:
                copy = self.autograd.new(parameter.padded, parameter.stored, Category.ALL_GATHER)
            if parameter.is_cast:
                copy = self.autograd.new(parameter.padded_bytes, "uint8", Category.ALL_GATHER)
            self._count_unsharded(parameter.padded_bytes)
        del copy

    def _count_unsharded(self, num_bytes: int) -> None:
        self.autograd.ledger.allocate(num_bytes, Category.UNSHARDED_PARAMETERS)
        self._unsharded_bytes += num_bytes

    def reshard(self) -> None:
        """Free the unsharded parameters; after forward, only if the unit reshards after forward."""
        if self.group_state is State.FORWARD and not self._reshards_after_forward:
            return
        self.autograd.ledger.free(self._unsharded_bytes, Category.UNSHARDED_PARAMETERS)
        self._unsharded_bytes = 0

    @property
    def _reshards_after_forward(self) -> bool:
        # None leaves the choice to FSDP2, which does not reshard the root.
        return self.unit.reshard_after_forward is True

    # Forward

    def pre_forward(self, x: Tensor) -> Tensor:
        """Unshard the parameters before a module of the unit runs. Return the input, cast as FSDP2 casts it."""
        if not self.modules_to_run:
            self.modules_to_run.update(self.unit.modules)
        if self.state is State.PRE_BACKWARD:  # the second forward of a checkpointed block
            if not self._unsharded_bytes:
                self.unshard()
                self.wait_for_unshard()
            return self._cast_input(x)
        if self.state is not State.FORWARD and self.context.iter_forward_root is None:
            self.context.iter_forward_root = self
        is_first, self.state = self.state is not State.FORWARD, State.FORWARD
        x = self._cast_input(x)
        if not self.parameters:
            return x
        is_entering, self.group_state = self.group_state is not State.FORWARD, State.FORWARD
        self.unshard()
        self.wait_for_unshard()
        for unit in self.forward_prefetch if is_first else ():
            unit.prefetch_as(State.FORWARD)
        return self._with_post_backward(x) if is_entering and x.node is not None else x

    def post_forward(self, path: str, output: Tensor) -> Tensor:
        """Reshard after the unit's last module has run. Return the module's output, cast to the unit's output dtype."""
        self.modules_to_run.discard(path)
        if self.modules_to_run or self.state is State.PRE_BACKWARD:
            return cast_output(self.autograd, output, self.unit.policy)
        if self.parameters:
            if not self.autograd.is_backward:
                self.reshard()
                self._post_forward_indices.append(len(self.context.post_forward_order))
                self.context.post_forward_order.append(self)
            self.group_state = State.IDLE
        if output.node is not None:
            output.node.hooks.append(self.pre_backward)
        self.state = State.IDLE
        if self.context.iter_forward_root is self:
            self.context.all_gather = None
            self.context.iter_forward_root = None
        return cast_output(self.autograd, output, self.unit.policy)

    def _cast_input(self, x: Tensor) -> Tensor:
        return cast_input(self.autograd, x, self.unit.policy) if self._casts_inputs else x

    def _with_post_backward(self, x: Tensor) -> Tensor:
        """Return the input with a node that ends the unit's backward, like FSDP2's `RegisterPostBackwardFunction`."""

        def backward(gradient: list[Tensor], saved: Sequence[Tensor]) -> Sequence[Tensor | None]:
            self.post_backward()
            return (gradient.pop(),)

        return self.autograd.record(Tensor(x.storage, x.numel, x.dtype), (x,), backward)

    # Backward

    def pre_backward(self) -> None:
        """Begin the unit's backward when the gradient of its output exists. Start the all-gather of the next units."""
        self.state = State.PRE_BACKWARD
        if self.parameters and self.group_state is not State.PRE_BACKWARD:
            self.group_state = State.PRE_BACKWARD
            self.unshard()
            self.wait_for_unshard()
            if not self.prefetch:
                self._prefetch_previous()
        for unit in self.prefetch:
            unit.prefetch_as(State.PRE_BACKWARD)

    def _prefetch_previous(self) -> None:
        if self._post_forward_indices and (index := self._post_forward_indices.pop()) > 0:
            self.context.post_forward_order[index - 1].prefetch_as(State.PRE_BACKWARD)

    def prefetch_as(self, state: State) -> None:
        """Start the all-gather of this unit early, in the forward or the backward of another unit."""
        with self._as_if(state):
            self.unshard()

    @contextmanager
    def _as_if(self, state: State) -> Iterator[None]:
        before, self.group_state = self.group_state, state
        yield
        self.group_state = before

    def accumulate(self, index: int, gradient: Tensor) -> None:
        """Take the unsharded gradient of a parameter from autograd. A second gradient is added in place."""
        if index in self._gradients:
            return
        assert gradient.storage is not None
        gradient.storage.relabel(Category.UNSHARDED_GRADIENTS)
        self._gradients[index] = gradient

    def grad_dtype(self, index: int, computed: str) -> str:
        """Return the dtype in which autograd accumulates a gradient, as FSDP2's `_set_unsharded_grad_dtypes` sets
        it."""
        if not ACCUMULATES_IN_GRAD:
            return computed
        is_wider = DTYPE_BYTES[self.unit.reduce_dtype] > DTYPE_BYTES[computed]
        is_added = self.reduce_grads or index in self._gradients
        return computed if is_wider and is_added else self.unit.reduce_dtype

    def post_backward(self) -> None:
        """Accumulate or reduce the gradients of the unit when all of them exist."""
        self.group_state = State.POST_BACKWARD
        for index in self._accumulated:
            self._gradients.pop(index, None)
        if not self.reduce_grads:
            if self.reshard_after_backward:
                self.reshard()
            if not ACCUMULATES_IN_GRAD:
                self._accumulate_in_reduce_dtype()
            return
        unsharded = {**self._gradients, **self._accumulated}
        gradients = [unsharded[index] for index in sorted(unsharded)]
        self._gradients.clear()
        self._accumulated.clear()
        unsharded.clear()
        if self.reshard_after_backward:
            self.reshard()
        if gradients or FREES_WITHOUT_GRADIENTS:
            del self.context.reduce_scatter_inputs[:1]
        if gradients:
            self._all_reduce_input = None
            self._reduce(
                gradients, [parameter for i, parameter in enumerate(self.parameters) if parameter.unsharded.node]
            )

    def _accumulate_in_reduce_dtype(self) -> None:
        if self.unit.reduce_dtype == self.unit.compute_dtype:
            return
        for index in sorted(self._gradients):
            numel = self.parameters[index].numel
            self._accumulated[index] = self.autograd.new(numel, self.unit.reduce_dtype, Category.UNSHARDED_GRADIENTS)
            del self._gradients[index]

    def _reduce(self, gradients: list[Tensor], parameters: Sequence[Parameter]) -> None:
        """Replay FSDP2's `foreach_reduce`: reduce-scatter, all-reduce, and cast to the storage dtype."""
        world, is_hsdp = self.shards, self.context.layout.fsdp_replicas > 1
        new, dtype = self.autograd.new, self.unit.reduce_dtype
        padded = sum(parameter.padded for parameter in parameters)
        # Before torch 2.15, a loop variable in FSDP2 keeps the last gradient alive until the function ends.
        last = gradients[-1] if world > 1 and not FREES_EARLIER else None
        chunked = None  # a local variable in FSDP2 keeps the last gradient that is copied alive
        for index, parameter in enumerate(parameters):
            if parameter.is_sharded_inside:
                chunked = gradients[index]
                gradients[index] = new(chunked.numel, chunked.dtype, Category.REDUCE_SCATTER)
        reduce_input = new(padded, dtype, Category.REDUCE_SCATTER)
        gradients.clear()
        output = new(padded // world, dtype, Category.REDUCE_SCATTER)
        if world == 1 and is_hsdp and not SKIPS_DIVISION_BY_ONE:  # FSDP2 divides by 1
            divided = new(padded, dtype, Category.REDUCE_SCATTER)
            del divided
        self.context.reduce_scatter_inputs.append(reduce_input)
        if is_hsdp and not self.all_reduce_grads:
            if self._partial_reduce_output is None:
                assert output.storage is not None
                if not self.context.offloads:  # with offload, `output` stays on the device until the all-reduce
                    output.storage.relabel(Category.GRADIENTS)
                self._partial_reduce_output = output
            return
        if is_hsdp:
            self._all_reduce_input = output
        reduced = output if KEEPS_REDUCED_GRADIENTS else None
        if dtype != parameters[0].stored:
            output = new(padded // world, parameters[0].stored, Category.REDUCE_SCATTER)
        if self.exchanged is not None:  # in a hook of the parameters; FSDP2 still holds `output`
            self.context.start_exchange(self, self.exchanged)
        elif self.sharded_gradient is None:
            assert output.storage is not None
            output.storage.relabel(Category.GRADIENTS)
            self.sharded_gradient = output
        self._partial_reduce_output = None
        del last, chunked, reduced

    def finalize_backward(self) -> None:
        """Drop the buffers of pending collectives at the end of backward."""
        self._all_reduce_input = None
        self._pending = None
        self._post_forward_indices.clear()
