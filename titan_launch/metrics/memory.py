"""Measurement of the live bytes of a training step by category, updated at every operation.

Tracking works on real CPU tensors and on fake tensors. A storage counts from the operation that returns it until its
last reference is gone. Temporary memory inside a kernel does not count. If a tensor is used twice, autograd normally
adds its two gradients in place. Under a `TorchDispatchMode`, the sum is a new tensor, which counts for a moment, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from titan_launch.core.patches import replaced
from titan_launch.distributed import torch_private
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.plan.memory.ledger import Category, Ledger


def is_in_backward() -> bool:
    """Return True during a backward of autograd, including forwards that activation checkpointing runs in it."""
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in an argument or a result of an operation: a tensor, or nested lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)


class _TrackedStorage(weakref.ref[UntypedStorage]):
    """Weak reference to a storage, with its recorded size and category."""

    __slots__ = ("category", "key", "num_bytes")

    key: int
    num_bytes: int
    category: Category


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default}
"""Matrix products that call cuBLAS on CUDA. `addmm` is missing, because it calls cuBLASLt."""

OP_DEVICE = torch.ops.prim.device.default
"""Operation that returns the device of a fake tensor. More than half of the operations of a traced step are of this
kind. The dispatch modes of a trace return the device without a call of the operation, to save time."""


class LiveMemory(TorchDispatchMode):
    """A dispatch mode that records in a ledger the storages that operations return. `track` enters this mode."""

    def __init__(self, ledger: Ledger):
        super().__init__()
        self._ledger = ledger
        self._entries: dict[int, _TrackedStorage] = {}
        self._ignored: set[int] = set()
        self._current_category: Category | None = None
        self.offloads = Category.GRADIENTS in ledger.on_host
        """True if shards of parameters and gradients are in host memory, so that the ledger does not count them as
        device memory."""

        self.is_paused = False
        """True while new allocations do not count."""

        self.on_operation: Callable[[Any, Sequence[Any], Mapping[str, Any], Any], None] | None = None
        """Function that is called after each operation of the model and the loss, unless the mode is paused. Its
        arguments are the operation, and the operation's arguments, keyword arguments and result. None: no function."""

    def hold(self, tensors: Iterable[Tensor | None], category: Category) -> None:
        """Record the storages of tensors, and assign them to `category`. A DTensor counts as its local shard."""
        record = self.allocating_for(category, self.record)
        for tensor in tensors:
            if tensor is not None:
                entry = record(local_tensor(tensor).untyped_storage())
                self._ledger.move(entry.num_bytes, entry.category, category)
                entry.category = category

    def ignore(self, tensors: Iterable[Tensor | None]) -> None:
        """Do not record the storages of `tensors` when operations return them. The tensors must live as long as this
        mode."""
        self._ignored |= {tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None}

    def record(self, storage: UntypedStorage) -> _TrackedStorage:
        """Add a storage to the ledger, or update its size. Return the storage's entry."""
        entry = self._entries.get(storage._cdata)
        if entry is None:
            entry = _TrackedStorage(storage, self._release)
            entry.key, entry.num_bytes, entry.category = storage._cdata, 0, self._allocation_category()
            self._entries[entry.key] = entry
        self._resize(entry, storage.nbytes())
        return entry

    def allocating_for(self, category: Category, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, wrapped so that its allocations belong to `category`."""
        return replaced(self, "_current_category", category)(function)

    def returning_for(self, category: Category, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return `function`, wrapped so that its allocations and its result belong to `category`."""
        allocate = self.allocating_for(category, function)

        def call(*args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = allocate(*args, **kwargs)
            self.hold([result], category)
            return result

        return call

    def paused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function`, wrapped so that its allocations do not count."""
        return replaced(self, "is_paused", True)(function)

    def scope(self, category: Category | None) -> None:
        """Set the category to which later allocations belong. None: activations and their gradients."""
        self._current_category = category

    def stop(self) -> None:
        """Forget all storages, so that later deallocations are not recorded."""
        self._entries.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # DTensor dispatches again with local tensors
            return NotImplemented
        if func is OP_DEVICE:
            return args[0].device
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not self.is_paused:
            for tensor in tensors_in(result):
                if tensor.device.type != "meta":
                    # The result of a pending collective is a wrapper, whose own storage holds no memory.
                    storage = torch_private.pending_result(tensor).untyped_storage()
                    if storage._cdata not in self._ignored:
                        self.record(storage)
            if func in _PRODUCTS:
                self._ledger.product()
            if self.on_operation is not None and self._current_category is None:
                self.on_operation(func, args, kwargs, result)
        return result

    def _allocation_category(self) -> Category:
        """Return the category of an allocation that happens now. If gradients are enabled during backward, activation
        checkpointing is repeating a forward, whose allocations are activations."""
        if self._current_category is not None:
            return self._current_category
        is_backward = is_in_backward() and not torch.is_grad_enabled()
        return Category.BACKWARD if is_backward else Category.ACTIVATIONS

    def _resize(self, entry: _TrackedStorage, num_bytes: int) -> None:
        if num_bytes > entry.num_bytes:
            self._ledger.allocate(num_bytes - entry.num_bytes, entry.category)
        elif num_bytes < entry.num_bytes:
            self._ledger.free(entry.num_bytes - num_bytes, entry.category)
        entry.num_bytes = num_bytes

    def _release(self, storage: Any) -> None:
        entry: _TrackedStorage = storage
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
            self._resize(entry, 0)


@contextmanager
def track(model: nn.Module, ledger: Ledger, optimizer: Optimizer | None = None) -> Iterator[LiveMemory]:
    """Record the memory of a wrapped model, and all allocations until the `with` block ends, in `ledger`.

    `model` is on its device and wrapped by FSDP2. With `optimizer`, the ledger has the optimizer state as a separate
    category. Enter the first StepPoint of the ledger before the block, and read the footprint inside the block:

        ledger = Ledger()
        ledger.enter(StepPoint(0, "forward", ""))
        with track(model, ledger, optimizer) as memory:
            memory.hold(microbatch, Category.INPUTS)
            step(...)
            footprint = ledger.footprint()

    Functions of FSDP2 are replaced during the block, so a process can track only one step at a time.
    """
    memory = LiveMemory(ledger)
    memory.hold(model.parameters(), Category.PARAMETERS)
    memory.hold((p.grad for p in model.parameters()), Category.GRADIENTS)
    memory.hold(model.buffers(), Category.BUFFERS)
    with ExitStack() as stack:
        stack.callback(memory.stop)
        _watch_storage(memory, stack)
        _watch_fsdp(memory, stack)
        if optimizer is not None:
            _watch_optimizer(memory, optimizer, stack)
        stack.enter_context(memory)
        yield memory


def _watch_storage(memory: LiveMemory, stack: ExitStack) -> None:
    """Record resizes of storages, by which FSDP2 frees and restores parameters."""
    resize = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        if not memory.is_paused:
            memory.record(storage)
        return result

    stack.enter_context(replaced(UntypedStorage, "resize_", resize_))


def _watch_fsdp(memory: LiveMemory, stack: ExitStack) -> None:
    """Assign the allocations of FSDP2's functions to their categories."""

    def reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
        recorded = memory.allocating_for(Category.REDUCE_SCATTER, reduce)

        def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
            result = recorded(fsdp_params, *args, **kwargs)
            *_, not_yet_all_reduced = result
            memory.hold([p.sharded_param.grad for p in fsdp_params], Category.GRADIENTS)
            # With offload, the ledger does not count GRADIENTS. `not_yet_all_reduced` still counts as REDUCE_SCATTER,
            # because it stays on the device until its all-reduce.
            if not memory.offloads:
                memory.hold([not_yet_all_reduced], Category.GRADIENTS)
            return result

        return foreach_reduce

    def hold_gradient(_: Any, parameter: nn.Parameter) -> None:
        memory.hold([parameter.grad], Category.UNSHARDED_GRADIENTS)

    wraps: dict[str, Callable[[Any], Any]] = {
        "unshard": partial(memory.allocating_for, Category.ALL_GATHER),
        "wait_for_unshard": partial(memory.allocating_for, Category.UNSHARDED_PARAMETERS),
        "post_backward": partial(memory.allocating_for, Category.UNSHARDED_GRADIENTS),
        "all_gather": memory.paused,  # copies inside gloo do not count
        "reduce_scatter": memory.paused,
        "propagate_shapes": memory.paused,  # DTensor allocates unsharded tensors to compute their shapes
        "foreach_reduce": reducing,
    }
    stack.enter_context(torch_private.functions_wrapped(wraps))
    stack.enter_context(unsharded_gradients_watched(hold_gradient))


@contextmanager
def unsharded_gradients_watched(on_gradient: Callable[[Any, nn.Parameter], None]) -> Iterator[None]:
    """Until the `with` block ends, call `on_gradient(fsdp_param, parameter)` when autograd has added to the gradient of
    an unsharded parameter. `fsdp_param`: FSDP2's object for the parameter (FSDPParam). `parameter`: the unsharded
    parameter."""
    watched: dict[int, Tensor] = {}  # keeps the parameters alive, so that ids stay unique
    with ExitStack() as stack:

        def watching(init_unsharded_param: Callable[[Any], None]) -> Callable[[Any], None]:
            def init_and_watch(fsdp_param: Any) -> None:
                init_unsharded_param(fsdp_param)
                parameter = torch_private.unsharded_parameter(fsdp_param)
                if parameter.requires_grad and id(parameter) not in watched:
                    watched[id(parameter)] = parameter
                    hook = parameter.register_post_accumulate_grad_hook(partial(on_gradient, fsdp_param))
                    stack.callback(hook.remove)

            return init_and_watch

        stack.enter_context(torch_private.functions_wrapped({"init_unsharded_param": watching}))
        yield


def _watch_optimizer(memory: LiveMemory, optimizer: Optimizer, stack: ExitStack) -> None:
    def hold_state() -> None:
        values = [value for state in optimizer.state.values() for value in state.values()]
        memory.hold([value for value in values if isinstance(value, Tensor)], Category.OPTIMIZER)

    def before(*_: Any) -> None:
        memory.scope(Category.OPTIMIZER_TEMPORARIES)

    def after(*_: Any) -> None:
        hold_state()
        memory.scope(None)

    hold_state()
    stack.callback(optimizer.register_step_pre_hook(before).remove)
    stack.callback(optimizer.register_step_post_hook(after).remove)
