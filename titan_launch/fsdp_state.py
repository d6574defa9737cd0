"""FSDP2's private state of a wrapped model, reached in one place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

_ROOTS = "_titan_launch_roots"


def set_roots(model: nn.Module, roots: Sequence[nn.Module]) -> None:
    """Note on a model the modules that are run and wrapped in its stead: its pipeline stages."""
    vars(model)[_ROOTS] = tuple(roots)  # not as children: they share theirs with the model


def roots(model: nn.Module) -> tuple[nn.Module, ...]:
    """What is run, and wrapped as a whole: the model, or its pipeline stages on this rank, where there are several."""
    return vars(model).get(_ROOTS, (model,))


def parameter_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """The state of every unit that holds parameters, once each: modules of one unit share it."""
    modules = [module for root in roots(model) for module in root.modules()]
    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states]
    return list({id(group): group for group in groups if group is not None}.values())


ForwardOrder = tuple[FSDPParamGroup, ...]
"""The units in the order in which a forward has gone through them, each as often as it ran. Backward gathers ahead by
it, from its end."""


def take_forward_order(root: nn.Module) -> ForwardOrder:
    """The order of the forward that has just ended, which FSDP2 forgets: of several forwards before the first backward
    it would take that of the last, and gather ahead for the one before, which has another backward."""
    assert isinstance(root, FSDPModule)
    order = root._get_fsdp_state()._comm_ctx.post_forward_order
    taken = tuple(order)
    order.clear()
    for group in taken:
        group._post_forward_indices.clear()
    return taken


def give_forward_order(root: nn.Module, order: ForwardOrder) -> None:
    """Let the backward to come gather ahead by the order of its own forward."""
    assert isinstance(root, FSDPModule)
    take_forward_order(root)
    root._get_fsdp_state()._comm_ctx.post_forward_order.extend(order)
    for index, group in enumerate(order):
        group._post_forward_indices.append(index)


def widen_gradients(root: nn.Module) -> None:
    """Add the gradients that autograd has left on gathered parameters to those that wait, in the dtype of the
    reduction: what FSDP2 does at the end of a backward, for one that has no such end."""
    for group in parameter_groups(root):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
