"""The optimizer that `[optimizer]` describes."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import Optimizer

from titan_launch.config.optimizer import OptimizerConfig
from titan_launch.optim.groups import build_param_groups

_IMPLEMENTATIONS = {
    "fused": {"fused": True},
    "foreach": {"foreach": True},
    "for-loop": {"foreach": False},
}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """AdamW over the trainable parameters of a model, sharded or not, that is on its device.

    `set_lr` sets the learning rates, before each step. Raises ConfigError as `build_param_groups` does.
    """
    return torch.optim.AdamW(
        build_param_groups(model, config),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **_IMPLEMENTATIONS[config.implementation],
    )
