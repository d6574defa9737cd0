"""FSDP2's private state of a wrapped model, reached in one place."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def parameter_groups(model: nn.Module) -> list[FSDPParamGroup]:
    """The state of every unit that holds parameters, once each: modules of one unit share it."""
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, FSDPModule)]
    groups = [state._fsdp_param_group for state in states]
    return list({id(group): group for group in groups if group is not None}.values())
