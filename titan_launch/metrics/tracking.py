"""Tracking the live bytes of a training step: which parts of FSDP2, autograd and the optimizer allocate for what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.optim import Optimizer

from titan_launch.metrics.live_memory import LiveMemory
from titan_launch.patches import replaced
from titan_launch.plan.footprint import Category, Ledger
from titan_launch.torch_private import shape_propagation_wrapped, unit_steps_wrapped, unsharded_parameter


@contextmanager
def track(model: nn.Module, ledger: Ledger, optimizer: Optimizer | None = None) -> Iterator[LiveMemory]:
    """Book what a wrapped model holds, and what is allocated and freed until the end of the block, into `ledger`.

    `model` is on its device and wrapped by FSDP2; `optimizer` is told apart from the rest where it is given. Enter the
    ledger's first place before, and others inside the block; ask for its footprint there too:

        ledger = Ledger()
        ledger.enter(Place(0, "forward", ""))
        with track(model, ledger, optimizer) as memory:
            memory.hold(microbatch, Category.INPUTS)
            step(...)
            footprint = ledger.footprint()

    Functions of FSDP2 are replaced meanwhile, so only one step of a process can be tracked at a time.
    """
    memory = LiveMemory(ledger)
    memory.hold(model.parameters(), Category.PARAMETERS)
    memory.hold((p.grad for p in model.parameters()), Category.GRADIENTS)
    memory.hold(model.buffers(), Category.BUFFERS)
    with ExitStack() as stack:
        stack.callback(memory.forget)
        _watch_storage(memory, stack)
        _watch_fsdp(memory, stack)
        if optimizer is not None:
            _watch_optimizer(memory, optimizer, stack)
        stack.enter_context(memory)
        yield memory


def _watch_storage(memory: LiveMemory, stack: ExitStack) -> None:
    """FSDP2 frees and brings back parameters by the size of their storage, and DTensor asks for shapes with tensors
    of the whole size."""
    resize = UntypedStorage.resize_

    def resize_(storage: UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        if not memory.is_paused:
            memory.book(storage)
        return result

    stack.enter_context(replaced(UntypedStorage, "resize_", resize_))
    stack.enter_context(shape_propagation_wrapped(memory.paused))


def _watch_fsdp(memory: LiveMemory, stack: ExitStack) -> None:
    """Book what each step of FSDP2 allocates for what the step does."""
    watched: dict[int, Tensor] = {}  # holds the parameters, so that no id is used twice

    def reducing(reduce: Callable[..., Any]) -> Callable[..., Any]:
        booked = memory.within(Category.REDUCE_SCATTER, reduce)

        def foreach_reduce(fsdp_params: list[Any], *args: Any, **kwargs: Any) -> Any:
            result = booked(fsdp_params, *args, **kwargs)
            *_, not_yet_all_reduced = result
            memory.hold([p.sharded_param.grad for p in fsdp_params], Category.GRADIENTS)
            if not memory.offloads:  # else it waits for the all-reduce on the device
                memory.hold([not_yet_all_reduced], Category.GRADIENTS)
            return result

        return foreach_reduce

    def accumulating(init_unsharded_param: Callable[[Any], None]) -> Callable[[Any], None]:
        """Autograd makes gradients like any tensor; they become a parameter's when they are accumulated."""

        def init_and_watch(fsdp_param: Any) -> None:
            init_unsharded_param(fsdp_param)
            parameter = unsharded_parameter(fsdp_param)
            if parameter.requires_grad and id(parameter) not in watched:
                watched[id(parameter)] = parameter
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p: memory.hold([p.grad], Category.UNSHARDED_GRADIENTS)
                )
                stack.callback(hook.remove)

        return init_and_watch

    wraps: dict[str, Callable[[Any], Any]] = {
        "unshard": partial(memory.within, Category.ALL_GATHER),
        "wait_for_unshard": partial(memory.within, Category.UNSHARDED_PARAMETERS),
        "post_backward": partial(memory.within, Category.UNSHARDED_GRADIENTS),
        "all_gather": memory.paused,  # gloo works in copies of its own
        "reduce_scatter": memory.paused,
        "foreach_reduce": reducing,
        "init_unsharded_param": accumulating,
    }
    stack.enter_context(unit_steps_wrapped(wraps))


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
