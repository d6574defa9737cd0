"""The optimizer that `[optimizer]` describes."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.config.optimizer import OptimizerConfig
from titan_launch.optim.groups import group_parameters
from titan_launch.optim.mixed import MixedOptimizer, as_param_group
from titan_launch.plan.param_groups import is_mixed

_IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def build_optimizer(model: nn.Module, config: OptimizerConfig, head: Collection[str] = (), seed: int = 0) -> Optimizer:
    """The optimizer of the trainable parameters of a model, or of a part of one, sharded or not, that is on its device.

    `head`: paths of the modules that run last, the matrices of which are not for Muon. `seed`: of stochastic rounding.
    `set_lr` sets the learning rates, before each step. `check_param_groups` says before what cannot be.
    """
    groups = group_parameters(model, config, head)
    plain = [p for group in groups if group.settings.algorithm != "Muon" for p in group.parameters.values()]
    mixed = is_mixed(config, (str(p.dtype).removeprefix("torch.") for p in plain))
    if mixed or any(group.settings.algorithm != "AdamW" for group in groups):
        return MixedOptimizer(groups, config, is_mixed=mixed, seed=seed)
    return torch.optim.AdamW(
        [as_param_group(group) for group in groups],
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **_IMPLEMENTATIONS[config.implementation],
    )
