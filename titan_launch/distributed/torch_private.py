"""All accesses to private state of FSDP2 and process groups, and to private modules of `torch.distributed`.

There is one function per purpose. Each function was checked against the source of torch 2.11.0, 2.12.1, 2.13.0, 2.14.1
and 2.15.0, unless its docstring names other releases. A test lists every private name that is used here, and fails on a
release that lacks one. A release that is newer than `torch_release.NEWEST_TESTED` is untested. On an untested release,
the meaning of a private name may have changed. Functions that work on units (groups of parameters that FSDP2
all-gathers together) then find no units and do nothing. Only `end_forward` and `reset_iteration` still call public
methods.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ContextDecorator, ExitStack, contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titan_launch.core.patches import replaced
from titan_launch.core.torch_release import (
    ACCUMULATES_IN_GRAD,
    FINALIZES_BACKWARD,
    NEWEST_TESTED,
    is_tested_release,
    torch_release,
)

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_log = logging.getLogger(__name__)


def warn_of_untested_release() -> None:
    """Log a warning if the installed torch is newer than every tested release."""
    if not is_tested_release():
        _log.warning(
            "torch %d.%d is newer than the newest tested release, %d.%d. The run continues without these features: "
            "predicted memory; measured memory on a CPU; counted traffic; the check of the collectives' dtypes in the "
            "precision audit; overlap of all-reduces with backward on a CPU; prefetching by microbatch in pipelines; "
            "the workaround for gloo's all-gather. The precision audit logs differences and does not end the run. "
            'mode = "auto" in [gradient_accumulation] or [activation_checkpoint] takes the mode with the least memory. '
            "The command `plan` and dry runs cannot trace a job, and end with an error. To use all features, install a "
            "tested release of torch",
            *torch_release(),
            *NEWEST_TESTED,
        )


# Units

_ROOTS = "_titan_launch_roots"


def set_roots(model: nn.Module, roots: Sequence[nn.Module]) -> None:
    """Store `roots`, the pipeline stages of this rank, as an attribute of a model. FSDP2 wraps these stages instead of
    the model."""
    vars(model)[_ROOTS] = tuple(roots)  # not as submodules: the stages share the model's submodules


def roots(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the root modules of FSDP2: the model, or its pipeline stages on this rank."""
    return vars(model).get(_ROOTS, (model,))


def parameter_group(module: nn.Module) -> FSDPParamGroup | None:
    """Return FSDP2's state of a wrapped module's unit. Return None if the unit has no parameters, or if the release is
    untested."""
    assert isinstance(module, FSDPModule), "fully_shard was not called on this module"
    if not is_tested_release():
        return None
    return module._get_fsdp_state()._fsdp_param_group


def parameter_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """Return FSDP2's states of all units of a model that have parameters, each once. On an untested release, the list
    is empty."""
    modules = [module for root in roots(model) for module in root.modules()]
    groups = [parameter_group(module) for module in modules if isinstance(module, FSDPModule)]
    return list({id(group): group for group in groups if group is not None}.values())


# Collectives of units

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all-gather", "reduce-scatter", "all-reduce"

CollectiveCallback = Callable[[str, Tensor, Tensor], None]
"""Function of (kind, output, input). The kind is `ALL_GATHER`, `REDUCE_SCATTER` or `ALL_REDUCE`."""


@contextmanager
def collectives_watched(group: FSDPParamGroup, on_collective: CollectiveCallback) -> Iterator[None]:
    """Until the end of the block, call `on_collective` for every collective of a unit, on the CUDA stream of the
    collective.

    An all-gather or reduce-scatter is reported before it runs. An all-reduce (HSDP) is reported after it has run, with
    the same tensor as output and input.
    """
    with ExitStack() as stack:
        for name, kind in (("_all_gather_comm", ALL_GATHER), ("_reduce_scatter_comm", REDUCE_SCATTER)):
            stack.enter_context(replaced(group, name, _Watched(getattr(group, name), kind, on_collective)))
        if group._is_hsdp:  # without replicas FSDP2 calls the hook without an all-reduce
            before = group._all_reduce_hook

            def watch(reduced: Tensor) -> None:
                on_collective(ALL_REDUCE, reduced, reduced)
                if before is not None:
                    before(reduced)

            stack.enter_context(replaced(group, "_all_reduce_hook", watch))
        yield


class _Watched:
    """A wrapper around a collective of FSDP2 that reports the collective before it runs."""

    def __init__(self, inner: Any, kind: str, on_collective: CollectiveCallback):
        self._inner = inner
        self._kind = kind
        self._on_collective = on_collective
        self.allocate = inner.allocate

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._on_collective(self._kind, output_tensor, input_tensor)
        return self._inner(output_tensor, input_tensor, *args, **kwargs)


@contextmanager
def communication_wrapped(group: FSDPParamGroup, counted: ContextDecorator) -> Iterator[None]:
    """Until the end of the block, run each communicating function of a unit inside the context manager `counted`.
    `counted`: result of a function with the decorator `contextmanager`, which makes a new context for each call.

    The functions are the all-gather, the wait for the all-gather, the reduction of gradients, and the wait for the
    reduction at the end of backward. These functions also copy between parameters and buffers.
    """
    with ExitStack() as stack:
        for name in ("unshard", "wait_for_unshard", "post_backward", "finalize_backward"):
            stack.enter_context(replaced(group, name, counted(getattr(group, name))))
        yield


def replace_replica_groups(model: nn.Module, stand_in: Callable[[dist.ProcessGroup, FSDPParamGroup], Any]) -> None:
    """For each unit, replace the process group over which FSDP2 all-reduces gradients by `stand_in(group, unit)`.

    FSDP2 calls `size()` and `allreduce(tensors, options)` of this replacement (the stand-in). The stand-in decides when
    the sum is complete: when `allreduce` returns, or at the end of backward. `discard_all_reduces` calls the method
    `discard()` of each stand-in. Units without replicas have no group for all-reduces and are not changed.
    """
    for unit in parameter_groups(model):
        info: Any = unit.mesh_info
        group = getattr(info, "replicate_process_group", None)
        if group is not None:
            assert unit.gradient_divide_factor == 1.0, "FSDP2 would divide gradients that are still being reduced"
            info.replicate_process_group = stand_in(group, unit)


def discard_all_reduces(model: nn.Module) -> None:
    """Call `discard()` of all stand-ins from `replace_replica_groups`, after an error has ended the backward that
    started their all-reduces."""
    for unit in parameter_groups(model):
        group = getattr(unit.mesh_info, "replicate_process_group", None)
        if group is not None and not isinstance(group, dist.ProcessGroup):  # a stand-in
            group.discard()


def sharded_parameters(unit: FSDPParamGroup) -> list[nn.Parameter]:
    """Return the sharded parameters of a unit, which the optimizer updates."""
    return [parameter.sharded_param for parameter in unit.fsdp_params]


# Functions that allocate memory


@contextmanager
def functions_wrapped(wraps: dict[str, Callable[[Any], Any]]) -> Iterator[None]:
    """Until the end of the block, replace functions of FSDP2 and DTensor by `wraps[name](function)`, in all units of
    the process.

    Names that concern a unit: `unshard` (all-gather), `wait_for_unshard` (copy-out), `post_backward`, `foreach_reduce`
    (reduction of gradients), and `all_gather` and `reduce_scatter` (calls into the process group). Names that concern
    one parameter: `init_unsharded_param`, `gradient_to_reduce` (returns the local gradient; tensor parallelism may
    reduce the gradient in this function), and the property `all_gather_inputs`. With `propagate_shapes`, DTensor
    computes the shapes of unsharded results.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param, _fsdp_param_group
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    unit, parameter = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam
    places: dict[str, tuple[Any, str]] = {
        "unshard": (unit, "unshard"),
        "wait_for_unshard": (unit, "wait_for_unshard"),
        "post_backward": (unit, "post_backward"),
        "foreach_reduce": (_fsdp_param_group, "foreach_reduce"),
        "init_unsharded_param": (parameter, "init_unsharded_param"),
        "all_gather": (_fsdp_collectives.DefaultAllGather, "__call__"),
        "reduce_scatter": (_fsdp_collectives.DefaultReduceScatter, "__call__"),
        "gradient_to_reduce": (parameter, "_get_grad_inner_tensor"),
        "all_gather_inputs": (parameter, "all_gather_inputs"),
        "propagate_shapes": (ShardingPropagator, "_propagate_tensor_meta_non_cached"),
    }
    with ExitStack() as stack:
        for step, wrap in wraps.items():
            owner, name = places[step]
            stack.enter_context(replaced(owner, name, wrap(getattr(owner, name))))
        yield


@contextmanager
def hooks_watched(on_hook: Callable[[str, nn.Module], None]) -> Iterator[None]:
    """Call `on_hook(name, module)` before each hook of FSDP2 runs, in units that are created within the block.
    `module`: a module of the unit.

    Names of a unit's hooks: `pre_forward`, `unshard_in_forward` (the inputs are cast already), `prefetch_in_forward`
    (reported after `pre_forward` has run), `post_forward`, `complete_forward` (the end of a forward in which not all
    modules of the unit have run), `pre_backward` and `post_backward`. Names of a whole model's hooks: `finish_backward`
    (autograd has ended) and `finalize_backward`. Hooks that run inside of these two are not reported.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    is_finishing = False

    def watched(owner: Any, name: str, hook: str, after: str | None = None) -> None:
        function = getattr(owner, name)

        def call(unit: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal is_finishing
            modules = unit._modules if owner is FSDPState else unit.modules
            if name == "post_forward" and args[0] is not None:  # reported by FSDPState
                return function(unit, *args, **kwargs)
            if not is_finishing:
                on_hook(hook, modules[0])
            is_finishing, before = is_finishing or hook in ("finish_backward", "finalize_backward"), is_finishing
            try:
                return function(unit, *args, **kwargs)
            finally:
                is_finishing = before
                if after is not None and not is_finishing:
                    on_hook(after, modules[0])

        stack.enter_context(replaced(owner, name, call))

    with ExitStack() as stack:
        watched(FSDPState, "_pre_forward", "pre_forward", after="prefetch_in_forward")
        watched(FSDPParamGroup, "pre_forward", "unshard_in_forward")
        watched(FSDPState, "_post_forward", "post_forward")
        watched(FSDPParamGroup, "post_forward", "complete_forward")
        watched(FSDPState, "_pre_backward", "pre_backward")
        watched(FSDPParamGroup, "post_backward", "post_backward")
        watched(FSDPState, "_root_post_backward_final_callback", "finish_backward")
        if FINALIZES_BACKWARD:
            watched(FSDPState, "finalize_backward", "finalize_backward")
        yield


def apply_to_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Return `value` with `function` applied to all tensors in it, also in nested collections and dataclasses."""
    from torch.distributed.utils import _apply_to_tensors

    return _apply_to_tensors(function, value)


def unsharded_parameter(parameter: Any) -> nn.Parameter:
    """Return the unsharded parameter that `init_unsharded_param` has created for an FSDPParam. All steps use the same
    object."""
    unsharded: nn.Parameter = parameter._unsharded_param
    return unsharded


def divided_shapes(model: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Size]]:
    """Yield each sharded parameter of a model with the shape of the tensor that FSDP2 shards. With tensor or expert
    parallelism, that tensor is this rank's part of the parameter."""
    for group in parameter_groups(model):
        for parameter in group.fsdp_params:
            yield parameter.sharded_param, parameter._orig_size


def unsharded_gradients(model: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield (sharded parameter, gradient of the unsharded parameter) for each parameter of a model whose unsharded
    parameter has a gradient. FSDP2 must already have all-gathered every unit."""
    for group in parameter_groups(model):
        for parameter in group.fsdp_params:
            gradient = unsharded_parameter(parameter).grad
            if gradient is not None:
                yield parameter.sharded_param, gradient


def shard_to_send(parameter: Any) -> tuple[Tensor, torch.dtype | None]:
    """Return the padded flat shard of an FSDPParam, and the dtype to which it is cast for the all-gather (None: no
    cast)."""
    return parameter._sharded_param_data, parameter.param_dtype


def update_trained_parameters(model: nn.Module) -> None:
    """Tell FSDP2 that `requires_grad` of parameters has changed since the first forward.

    FSDP2 passes `requires_grad` on to unsharded parameters itself. But FSDP2 reads the dtypes of a unit's gradients
    only once, before the first forward, and only from parameters that are trained at that time. If a whole unit is
    frozen at that time, FSDP2 finds no dtypes.
    """
    for group in parameter_groups(model):
        group._init_mp_dtypes()


def was_gathered(module: nn.Module) -> bool:
    """Return True if FSDP2 has all-gathered the unit of a wrapped module before. Also return True if the unit has no
    parameters, or if the release is untested."""
    group = parameter_group(module)
    return group is None or any(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params)


# Forward and backward

ForwardOrder = tuple["FSDPParamGroup", ...]
"""Units in the order in which they ran in a forward. Backward prefetches in the reverse order."""


def pop_forward_order(root: nn.Module) -> ForwardOrder:
    """Return the order of units in the forward that has just ended, and delete FSDP2's record of this order.

    FSDP2 has only one record. If several forwards ran before the first backward, FSDP2 would concatenate their orders.
    Then a backward would prefetch by the order of a different forward. On an untested release, return an empty order.
    """
    if not is_tested_release():
        return ()
    assert isinstance(root, FSDPModule)
    order = root._get_fsdp_state()._comm_ctx.post_forward_order
    units = tuple(order)
    order.clear()
    for group in units:
        group._post_forward_indices.clear()
    return units


def restore_forward_order(root: nn.Module, order: ForwardOrder) -> None:
    """Before a backward, set FSDP2's record of the forward order to `order`: the order of the same microbatch."""
    if not is_tested_release():
        return
    assert isinstance(root, FSDPModule)
    pop_forward_order(root)
    root._get_fsdp_state()._comm_ctx.post_forward_order.extend(order)
    for index, group in enumerate(order):
        group._post_forward_indices.append(index)


def accumulate_in_reduce_dtype(root: nn.Module) -> None:
    """Add the gradients of unsharded parameters to the accumulated gradients, in the reduce dtype.

    FSDP2 itself does this at the end of a full backward, but not at the end of a separate backward of weights
    (zero-bubble schedules). From torch 2.15 on, autograd adds the gradients, and this function does nothing.
    """
    if ACCUMULATES_IN_GRAD:
        return
    for group in parameter_groups(root):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()


def end_forward(root: nn.Module) -> None:
    """Free the unsharded parameters of a wrapped module after forwards without a backward, and delete FSDP2's record of
    these forwards.

    Gradients do not change, so a step may call this function between its microbatches. `FSDPModule.reset_iter_state` is
    no alternative: from torch 2.15 on, it discards reduced gradients, gradients that wait for the last microbatch, and
    partial sums of HSDP.
    """
    if not isinstance(root, FSDPModule):
        return  # nothing is sharded
    if is_tested_release():
        if not _has_started(root):
            return
        pop_forward_order(root)
        for group in parameter_groups(root):
            if group._all_gather_result is not None:  # prefetched for a module that did not run
                group.wait_for_unshard()
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _has_started(root: FSDPModule) -> bool:
    """Return True if a forward of a wrapped module has started."""
    return hasattr(root._get_fsdp_state()._comm_ctx, "all_gather_stream")


# Abandoned steps


def reset_iteration(root: nn.Module) -> None:
    """After an exception in forward or backward, free the unsharded parameters of a wrapped module, and reset FSDP2's
    state of this forward and backward.

    Call this function only if the step is abandoned, because it discards partial sums of HSDP, and from torch 2.15 on
    all gradients. `FSDPModule.reset_iter_state` is public from torch 2.13 on.
    """
    if not isinstance(root, FSDPModule):
        return  # nothing is sharded
    if not is_tested_release():
        reset = root.reset_iter_state
        with suppress(AttributeError):  # raised if no forward has started
            reset()
        return
    if not _has_started(root):
        return
    if hasattr(root, "reset_iter_state"):
        root.reset_iter_state()
    else:
        _reset_iteration_state(root)  # remove when torch 2.12 is no longer supported
    for group in parameter_groups(root):
        for parameter in group.fsdp_params:
            if parameter.all_gather_outputs:  # reset_iter_state skips units that were interrupted
                parameter.to_sharded()


def _reset_iteration_state(model: FSDPModule) -> None:
    """Reset FSDP2's state as `reset_iter_state` does, which torch 2.11 and 2.12 lack. Work that is started later on the
    current stream waits for pending collectives."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

    assert isinstance(model, nn.Module)
    root = model._get_fsdp_state()
    communication: Any = root._comm_ctx
    current = communication.device_handle.current_stream()
    for stream in ("all_gather_copy_in", "all_gather", "reduce_scatter", "all_reduce"):
        current.wait_stream(getattr(communication, f"{stream}_stream"))
    communication.all_gather_state = None
    communication.post_forward_order.clear()
    if hasattr(communication, "reduce_scatter_states"):
        communication.reduce_scatter_states.clear()
    else:
        communication.reduce_scatter_state = None
    for group in parameter_groups(model):
        group._all_gather_result = None
        group._all_reduce_state = None
        group._post_reduce_event = None
        group._reshard_after_forward_event = None
        group._post_forward_indices.clear()
        group._training_state = TrainingState.IDLE
        group._to_sharded()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            state._modules_to_run_forward.clear()
            state._training_state = TrainingState.IDLE
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False


def drop_unsharded_gradients(model: nn.Module) -> None:
    """Drop accumulated gradients of unsharded parameters, and gradients that wait for an all-reduce.

    From torch 2.15 on, `reset_iter_state` drops these gradients, and this function does nothing.
    """
    if ACCUMULATES_IN_GRAD:
        return
    for group in parameter_groups(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None


# Meshes and process groups


def clear_mesh_caches() -> None:
    """Clear DTensor's caches of operations. A cache entry refers to a mesh, and also matches a new mesh that is equal.

    After an earlier job in this process, stale entries would return that job's process groups on some ranks, which
    causes a deadlock.
    """
    # Not PyTorch's own function (torch.distributed.tensor.debug), which is slow to import.
    with suppress(AttributeError):  # an untested release; `launch` has no earlier job in the process
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()


def record_memory_history() -> None:
    """Record the last 200,000 allocations and frees on GPUs from now on, with stack traces. Like
    `write_memory_snapshot`, this function calls a documented function of PyTorch that has a private name."""
    torch.cuda.memory._record_memory_history(max_entries=200_000)


def write_memory_snapshot(file: str) -> None:
    """Write the recorded allocations to a file, which https://docs.pytorch.org/memory_viz shows."""
    torch.cuda.memory._dump_snapshot(file)


def process_groups() -> Iterable[dist.ProcessGroup]:
    """Return all process groups of this rank, including those of a DeviceMesh. If an untested release lacks PyTorch's
    private list of groups, return only the default group."""
    try:
        return list(distributed_c10d._world.pg_map)
    except AttributeError:  # an untested release
        return [dist.group.WORLD] if dist.group.WORLD is not None else []


def default_store() -> dist.Store:
    """Return the store of the default process group. If an untested release lacks PyTorch's private function for it,
    return an in-memory store, which other ranks do not share."""
    try:
        store: dist.Store = distributed_c10d._get_default_store()
    except AttributeError:
        return dist.HashStore()
    return store


def flight_record(backend: str) -> bytes:
    """Return this rank's flight record of the backend `gloo` or `nccl`: pickled bytes, with stack traces."""
    native: Any = torch._C._distributed_c10d
    name = _implementation(backend)
    if name == "nccl":
        return bytes(native._dump_nccl_trace())
    return bytes(native._dump_fr_trace(True, True, False, *_recorder_of(name)))


def flight_record_entries(backend: str) -> list[dict[str, Any]]:
    """Return the collectives in this rank's flight record of the backend `gloo` or `nccl`, oldest first. If an untested
    release lacks PyTorch's private function, return an empty list."""
    native: Any = torch._C._distributed_c10d
    name = _implementation(backend)
    try:
        dump = native._dump_nccl_trace_json if name == "nccl" else native._dump_fr_trace_json
    except AttributeError:  # an untested release
        return []
    recorder = () if name == "nccl" else _recorder_of(name)
    entries: list[dict[str, Any]] = json.loads(dump(True, False, *recorder)).get("entries", [])
    return entries


def _implementation(backend: str) -> str:
    """Return the name of the implementation of a backend. From torch 2.15 on, the backend `nccl` is implemented by
    `nccl2` unless `TORCH_DIST_USE_NCCL2=0`. `nccl2` has a flight record of its own."""
    if backend == "gloo" or dist.group.WORLD is None:
        return backend
    try:
        name = str(dist.group.WORLD._get_backend(torch.device("cuda")).name())
    except (AttributeError, RuntimeError):  # an untested release, or a group without the backend
        return backend
    return name if name.startswith("nccl") else backend


def _recorder_of(name: str) -> tuple[str, ...]:
    """Return the last argument of PyTorch's dump functions: the name of the implementation; an empty tuple for gloo.
    The dump functions have this argument from torch 2.15 on."""
    return () if name == "gloo" else (name,)


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the timeout of later collectives of a process group.

    `torch.distributed.set_timeout` is public from torch 2.14 on. Remove the private function when torch 2.13 is no
    longer supported.
    """
    set_group_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_group_timeout(timeout, group)


@contextmanager
def grouped_products_have_shapes() -> Iterator[None]:
    """Until the end of the block, let the grouped matrix product (`_grouped_mm`) take meta tensors of all dtypes and
    strides. PyTorch's own meta kernel rejects some strides and, before torch 2.15, fp32."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_grouped_mm", _grouped_mm, "Meta", allow_override=True)
        yield


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """Return an empty tensor with the shape and the strides of the grouped product. The rows of the tensor begin at
    multiples of 16 bytes."""
    rows, columns, dtype = a.shape[-2], b.shape[-1], out_dtype or a.dtype
    per_row = -(-columns * dtype.itemsize // 16) * 16 // dtype.itemsize
    if a.dim() != b.dim():  # the offsets divide the rows, or the columns
        return a.new_empty_strided((rows, columns), (per_row, 1), dtype=dtype)
    number = a.shape[0] if a.dim() == 3 or offs is None else offs.shape[0]
    return a.new_empty_strided((number, rows, columns), (rows * per_row, per_row, 1), dtype=dtype)


# Context parallelism


def ring_attention_module() -> Any:
    """Return PyTorch's module of ring attention."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention


# Autograd


def pending_result(tensor: Tensor) -> Tensor:
    """If `tensor` is the wrapper of a pending functional collective, return the tensor into which the collective
    writes. Otherwise return `tensor` itself."""
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def detached(tensor: Tensor) -> Tensor:
    """Return an alias of `tensor` outside of the autograd graph, for use in a dispatch mode. In a dispatch mode, the
    result of `tensor.detach()` would have a version counter of its own. The alias shares the version counter of
    `tensor`, so autograd notices in-place operations."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()
