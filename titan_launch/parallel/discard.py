"""What a step that ends between its microbatches leaves in FSDP2, taken away."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from titan_launch.fsdp_state import parameter_groups, roots
from titan_launch.parallel.fsdp import fsdp_modules
from titan_launch.parallel.replicas import forget_all_reduces


def discard_pending(model: nn.Module) -> None:
    """Bring a wrapped model back to between two steps, wherever in a step an exception has left it.

    Gathered parameters are freed, gradients of every kind are dropped (sharded ones, whole ones that wait for the last
    microbatch, and reduced ones that wait for the all-reduce between replicas), and the next backward communicates.
    Neither `zero_grad` nor FSDP2's `reset_iter_state` does all of this: both leave the whole gradients of a deferred
    accumulation, which would be added to the next step's.

    Not collective, but of use only where every rank abandons the same step. Waits for nothing.
    """
    reset_iteration(model)
    forget_all_reduces(model)
    for group in parameter_groups(model):
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
    for sharded in model.parameters():
        sharded.grad = None
    for root in roots(model):
        assert isinstance(root, FSDPModule), "the model is wrapped by parallel.apply before it is trained"
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)


def reset_iteration(model: nn.Module) -> None:
    """Free what a wrapped model has gathered, and forget how far its forward or backward was; gradients stay.

    After forwards without a backward, too: their parameters would stay gathered, and the next backward would gather
    what ran last in them.
    """
    for root in roots(model):
        _reset_root(root)


def _reset_root(model: nn.Module) -> None:
    if not isinstance(model, FSDPModule) or not hasattr(model._get_fsdp_state()._comm_ctx, "all_gather_stream"):
        return  # nothing is sharded, or no forward has begun yet
    if hasattr(model, "reset_iter_state"):
        model.reset_iter_state()
    else:
        _reset_by_hand(model)
    for group in parameter_groups(model):
        for parameter in group.fsdp_params:
            if parameter.all_gather_outputs:  # those of a unit that was interrupted half-way are passed over above
                parameter.to_sharded()


def _reset_by_hand(model: nn.Module) -> None:
    """What `reset_iter_state` does, for the releases of PyTorch without it. The device works off what is under way
    before anything that comes later."""
    assert isinstance(model, FSDPModule)
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
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
    root._state_ctx.iter_forward_root = None
    root._state_ctx.post_backward_final_callback_queued = False
