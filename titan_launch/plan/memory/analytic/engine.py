"""Active memory of a rank, replayed without torch: FSDP2's schedule around the operations of a known model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.base import ModelArgs
from titan_launch.config.architectures.families import FAMILIES
from titan_launch.config.job import JobConfig
from titan_launch.core.patches import garbage_collection_disabled
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice, plan_units, with_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.analytic import decoder
from titan_launch.plan.memory.analytic.replay import AnalyticModel, Replay
from titan_launch.plan.memory.depth import find_shortcut, without_blocks
from titan_launch.plan.memory.ledger import Footprint, extrapolate
from titan_launch.plan.module_selection import checkpointed_modules
from titan_launch.plan.types import Inventory, ModelPlan

ANALYTIC_MODELS: dict[str, AnalyticModel] = dict.fromkeys(FAMILIES, decoder.ANALYTIC)
"""The models that the engine supports, by their name in `[model]`. Other models are traced."""


def unknown_part(config: JobConfig, kernels: Kernels) -> str | None:
    """Return the part of a job that this engine does not support, in words; None if it supports the whole job.

    `model.blocks` is not supported, because other blocks change the units. Only a trace supports them.
    """
    model = ANALYTIC_MODELS.get(config.model.name)
    if model is None:
        return config.model.name
    if config.model.blocks is not None:
        return f"{config.model.name} with model.blocks"
    if config.loss.name != "cross_entropy":
        return f'loss.name = "{config.loss.name}"'
    if config.lora.targets:
        return "lora.targets"
    if config.kernels.attention in ("math", "efficient"):
        return f'kernels.attention = "{config.kernels.attention}"'
    unknown = model.unknown_part(config, _args(config), kernels)
    if unknown is not None:
        return unknown
    for axis in ("pipeline", "tensor", "context"):
        name = f"{axis}_parallel_degree"
        degree = getattr(config.parallelism, name)
        if degree > 1:
            return f"parallelism.{name} = {degree}"
    return None


def model_inventory(config: JobConfig) -> Inventory:
    """Return the module table of a model in `ANALYTIC_MODELS`."""
    return ANALYTIC_MODELS[config.model.name].inventory(_args(config), config.training.seq_len)


def analytic_engine(config: JobConfig, layout: Layout, kernels: Kernels) -> Callable[[Choice], Footprint]:
    """Return a function that computes the footprint of a job under other modes of gradient accumulation and activation
    checkpointing.

    `kernels`: the device family whose memory is predicted. If many blocks are equal, the function replays two shallower
    models and extrapolates their footprints.
    """
    inventory, args, model = model_inventory(config), _args(config), ANALYTIC_MODELS[config.model.name]

    @cache
    def plan(unsharded: bool, removed: tuple[str, ...] = ()) -> ModelPlan:
        return without_blocks(plan(unsharded), removed) if removed else plan_units(config, inventory, unsharded)

    @garbage_collection_disabled()  # a replay makes many objects, all of which their reference counts free
    def footprint(choice: Choice) -> Footprint:
        unsharded = bool(choice.accumulation.keep_params_unsharded)
        again = checkpointed_modules(inventory, choice.activation_checkpoint)

        def replay(removed: tuple[str, ...] = ()) -> Footprint:
            chosen = with_choice(config, choice)
            return Replay(chosen, model, args, plan(unsharded, removed), layout, kernels, again).step()

        shortcut = find_shortcut(replace(plan(unsharded), checkpointed=again))
        if shortcut is None:
            return replay()
        shorter, longer = replay(shortcut.removed_from_shorter), replay(shortcut.removed_from_longer)
        return extrapolate(shorter, longer, shortcut.factor) or replay()

    return footprint


def _args(config: JobConfig) -> ModelArgs:
    return resolve_args(config.model.name, config.model.flavor, config.model.args)
