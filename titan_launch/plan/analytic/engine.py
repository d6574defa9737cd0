"""Active memory of a rank, replayed without torch: FSDP2's schedule around the operations of a Llama."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from dataclasses import replace

from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.llama3 import Llama3Args
from titan_launch.config.job import JobConfig
from titan_launch.config.model import ModelConfig
from titan_launch.plan.analytic.llama3 import llama3_inventory
from titan_launch.plan.analytic.ops import Kernels
from titan_launch.plan.analytic.replay import Replay
from titan_launch.plan.choices import Choice
from titan_launch.plan.footprint import Footprint, extrapolate
from titan_launch.plan.job import plan_job
from titan_launch.plan.layout import Layout
from titan_launch.plan.recomputation import chosen_blocks
from titan_launch.plan.repeats import longest_repeat, shorten
from titan_launch.plan.types import Inventory, ModelPlan, is_within

DEPTHS = 4, 5
"""To how many periods a stretch of alike blocks is cut: two at either end, and one more between them."""


def knows(model: ModelConfig) -> bool:
    """Whether this engine has the model."""
    return model.name == "llama3"


def model_inventory(config: JobConfig) -> Inventory:
    """The table of a known model's modules."""
    return llama3_inventory(_args(config), config.training.seq_len)


def analytic_engine(config: JobConfig, layout: Layout, kernels: Kernels) -> Callable[[Choice], Footprint]:
    """What gives the footprint of a job under other modes of accumulation and recomputation.

    `kernels`: whose footprint operations have. Where many blocks are alike, two shallower models are replayed, and
    their footprints extrapolated: memory is an affine function of depth.
    """
    inventory, args = model_inventory(config), _args(config)
    plans: dict[bool, ModelPlan] = {}

    def footprint(choice: Choice) -> Footprint:
        update = {"gradient_accumulation": choice.accumulation, "activation_checkpoint": choice.recomputation}
        chosen = config.model_copy(update=update)
        kept = bool(choice.accumulation.keep_params_unsharded)  # nothing else of a choice decides about units
        plan = plans[kept] = plans.get(kept) or plan_job(chosen, inventory)
        again = chosen_blocks(inventory.blocks, choice.recomputation)
        repeat = longest_repeat(_signatures(plan, again))
        if repeat.times <= max(DEPTHS):
            return Replay(chosen, args, plan, layout, kernels, again).step()
        shallow = (_cut(plan, shorten(len(inventory.blocks), repeat, times)) for times in DEPTHS)
        shorter, longer = (Replay(chosen, args, cut, layout, kernels, again).step() for cut in shallow)
        return extrapolate(shorter, longer, repeat.times - min(DEPTHS))

    return footprint


def _args(config: JobConfig) -> Llama3Args:
    args = resolve_args(config.model.name, config.model.flavor, config.model.args)
    assert isinstance(args, Llama3Args)
    return args


def _signatures(plan: ModelPlan, again: Collection[str]) -> list[Hashable]:
    """What tells the blocks apart: the units of their modules, and whether they are computed again."""
    signatures: dict[str, list[Hashable]] = {path: [path in again] for path in plan.inventory.blocks}
    for module in plan.inventory.modules:
        block = ".".join(module.path.split(".")[:2])  # `layers.0` of `layers.0.attention.wq`
        if block in signatures:
            unit = plan.unit_of[module.path]
            is_own = all(is_within(path, block) for path in unit.modules)
            signatures[block].append(replace(unit, name="", modules=()) if is_own else unit)
    return [tuple(signature) for signature in signatures.values()]


def _cut(plan: ModelPlan, kept: Collection[int]) -> ModelPlan:
    """The plan of the model with some of its blocks only: units, rules and dtypes are as in the whole."""
    blocks = [path for index, path in enumerate(plan.inventory.blocks) if index in set(kept)]
    gone = set(plan.inventory.blocks) - set(blocks)

    def is_there(path: str) -> bool:
        return ".".join(path.split(".")[:2]) not in gone

    modules = tuple(module for module in plan.inventory.modules if is_there(module.path))
    units = (replace(unit, modules=tuple(filter(is_there, unit.modules))) for unit in plan.units)
    inventory = replace(plan.inventory, modules=modules, blocks=tuple(blocks))
    return ModelPlan(inventory, tuple(unit for unit in units if unit.modules), plan.buffer_dtypes)
