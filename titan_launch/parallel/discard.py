"""Reset of a wrapped model after an abandoned step."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_launch.parallel.replicas import forget_all_reduces
from titan_launch.torch_private import drop_unsharded_gradients, reset_iteration, roots


def discard_pending(model: nn.Module) -> None:
    """Bring a wrapped model back to between two steps, wherever in a step an exception has left it.

    Unsharded parameters are freed. Gradients of every kind are dropped: sharded ones, unsharded ones that wait for the
    last microbatch, and reduced ones that wait for the all-reduce between replicas. The next backward communicates.
    `zero_grad` does not do all of this, nor does FSDP2's `reset_iter_state` before torch 2.15: both leave the unsharded
    gradients of a deferred accumulation, which would be added to the next step's.

    Not collective, but of use only where every rank abandons the same step. Waits for nothing.
    """
    reset_iterations(model)
    forget_all_reduces(model)
    drop_unsharded_gradients(model)
    for sharded in model.parameters():
        sharded.grad = None
    for root in roots(model):
        assert isinstance(root, FSDPModule), "the model is wrapped by parallel.apply before it is trained"
        root.set_requires_gradient_sync(True)
        root.set_reshard_after_backward(True)


def reset_iterations(model: nn.Module) -> None:
    """Free what a wrapped model has gathered, and forget how far its forward or backward was; between two steps.

    Needed after forwards without a backward, too: their parameters would stay unsharded, and the next backward would
    gather what ran last in them.
    """
    for root in roots(model):
        reset_iteration(root)
