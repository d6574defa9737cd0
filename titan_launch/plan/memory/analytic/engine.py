"""Active memory of a rank, replayed without torch: FSDP2's schedule around the operations of a Llama."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache

from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.llama3 import Llama3Args
from titan_launch.config.job import JobConfig
from titan_launch.core.globs import matches
from titan_launch.plan.activation_checkpoint import checkpointed_modules
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice, plan_units, with_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.analytic.llama3 import llama3_inventory
from titan_launch.plan.memory.analytic.replay import Replay
from titan_launch.plan.memory.depth import block_signatures, find_shortcut, without_blocks
from titan_launch.plan.memory.ledger import Footprint, extrapolate
from titan_launch.plan.types import Inventory, ModelPlan


def unknown_part(config: JobConfig) -> str | None:
    """What of a job this engine does not know, in words; None where it knows all of it. (Other blocks than the Llama's
    own make other units, which a trace finds.)"""
    if config.model.name != "llama3":
        return config.model.name
    if config.model.blocks is not None:
        return f"{config.model.name} with model.blocks"
    if config.kernels.attention in ("math", "efficient"):
        return f'kernels.attention = "{config.kernels.attention}"'
    if any(matches(glob, path) for glob in config.activation_checkpoint.modules for path in ("rope", _ROPE)):
        return "activation_checkpoint.modules with the rotary embedding, which all layers share"
    for name in ("pipeline_parallel_degree", "tensor_parallel_degree", "context_parallel_degree"):
        degree = getattr(config.parallelism, name)
        if degree > 1:
            return f"parallelism.{name} = {degree}"
    return None


_ROPE = "layers.0.attention.rope"


def model_inventory(config: JobConfig) -> Inventory:
    """The table of a known model's modules."""
    return llama3_inventory(_args(config), config.training.seq_len)


def analytic_engine(config: JobConfig, layout: Layout, kernels: Kernels) -> Callable[[Choice], Footprint]:
    """What gives the footprint of a job under other modes of accumulation and recomputation.

    `kernels`: whose footprint operations have. Where many blocks are alike, two shallower models are replayed, and
    their footprints extrapolated: memory is an affine function of depth.
    """
    inventory, args = model_inventory(config), _args(config)

    @cache
    def plan(kept: bool, removed: tuple[str, ...] = ()) -> ModelPlan:
        return without_blocks(plan(kept), removed) if removed else plan_units(config, inventory, kept)

    @cache
    def signatures(kept: bool) -> list[Hashable]:
        return block_signatures(plan(kept))

    def footprint(choice: Choice) -> Footprint:
        kept = bool(choice.accumulation.keep_params_unsharded)
        again = checkpointed_modules(inventory, choice.activation_checkpoint)

        def replay(removed: tuple[str, ...] = ()) -> Footprint:
            return Replay(with_choice(config, choice), args, plan(kept, removed), layout, kernels, again).step()

        shortcut = find_shortcut(signatures(kept), inventory.blocks, again)
        if shortcut is None:
            return replay()
        shorter, longer = replay(shortcut.removed_from_shorter), replay(shortcut.removed_from_longer)
        return extrapolate(shorter, longer, shortcut.factor)

    return footprint


def _args(config: JobConfig) -> Llama3Args:
    args = resolve_args(config.model.name, config.model.flavor, config.model.args)
    assert isinstance(args, Llama3Args)
    return args
