"""Linear layers in 8-bit floating point, by torchao. torchao is imported only if layers are converted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from titan_launch.config.sections.precision import Float8Config
from titan_launch.core.errors import config_error
from titan_launch.core.packages import install
from titan_launch.core.patches import torchao_import_silenced
from titan_launch.models.lora import LoRA, attach
from titan_launch.plan.freezing import ADAPTER
from titan_launch.plan.module_selection import describe_float8
from titan_launch.plan.types import ModelPlan

_log = logging.getLogger(__name__)


def convert_to_float8(model: nn.Module, plan: ModelPlan, config: Float8Config) -> None:
    """Convert the linear layers of `plan.float8` to layers that multiply in 8 bits, in place. Nothing is allocated.

    Parameters keep their names. With `float8.all_gather`, torchao wraps the weights, so that FSDP2 all-gathers them in
    8 bits; otherwise parameters are the same objects as before. Raise ConfigError if torchao cannot be imported.
    """
    if not plan.float8:
        return
    with torchao_import_silenced():
        try:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        except ImportError as error:
            reason = f"needs torchao, which cannot be imported ({error}): {install('torchao')}"
            raise config_error(("float8", "enable"), f"{reason}; or set float8.enable = false", True) from error
        recipe = replace(Float8LinearConfig.from_recipe_name(config.recipe), emulate=config.emulate)
        recipe = replace(recipe, enable_fsdp_float8_all_gather=config.all_gather)
    chosen = set(plan.float8)
    adapters = {path: getattr(model.get_submodule(path), ADAPTER, None) for path in plan.float8}
    convert_to_float8_training(model, module_filter_fn=lambda _, path: path in chosen, config=recipe)
    for path, adapter in adapters.items():
        if isinstance(adapter, LoRA):
            layer = model.get_submodule(path)  # torchao replaces the layer, without its adapter
            attach(layer, adapter, type(layer))
    _log.info("float8: %s", describe_float8(config, plan))


def scale_update(model: nn.Module, config: Float8Config) -> Callable[[], None] | None:
    """Return a function that computes the scales of all converted weights. Return None if `float8.enable` or
    `float8.all_gather` is off.

    Call the function after parameters have changed, by the optimizer or a checkpoint, and before they are all-gathered.
    The function runs one all-reduce over the ranks that shard the parameters. The host does not wait for the result.
    """
    if not (config.enable and config.all_gather):
        return None
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    return partial(precompute_float8_dynamic_scale_for_fsdp, model)


def check_tensor_cores(config: Float8Config, device: torch.device) -> None:
    """Raise ConfigError if float8 is enabled without emulation, and the GPU has no FP8 tensor cores."""
    if config.enable and not config.emulate and torch.cuda.get_device_capability(device) < (8, 9):
        name, remedy = torch.cuda.get_device_name(device), "set float8.emulate = true, or set float8.enable = false"
        reason = f"requires a GPU with FP8 tensor cores (compute capability 8.9 or later), but the device is {name}"
        raise config_error(("float8", "enable"), f"{reason}; {remedy}", True)
