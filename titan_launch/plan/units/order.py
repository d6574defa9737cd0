"""The order in which units are wrapped and prefetched, and the units that reshard after forward. This module does not
import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from titan_launch.config.sections.parallelism import ParallelismConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.plan.types import ModelPlan, Unit, is_within, outward


def in_wrapping_order(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Return the units, inner units first. If each of two units has a module inside a module of the other unit, both
    are divided into one unit per module. The same applies to longer cycles of units."""
    graph = _inner_units(units)
    try:
        return tuple(units[i] for i in TopologicalSorter(graph).static_order())
    except CycleError as error:
        in_cycle = set(error.args[1])
    divided: list[Unit] = []
    for index, unit in enumerate(units):
        split = [replace(unit, name=path, modules=(path,)) for path in unit.modules]
        divided += split if index in in_cycle else [unit]
    return in_wrapping_order(divided)


def _inner_units(units: Sequence[Unit]) -> dict[int, list[int]]:
    """Return, for the index of every unit, the indices of other units that have a module inside this unit."""
    index_of = {path: index for index, unit in enumerate(units) for path in unit.modules}
    inner: dict[int, set[int]] = {index: set() for index in range(len(units))}
    for path, index in index_of.items():
        for around in outward(path):
            if index_of.get(around, index) != index:
                inner[index_of[around]].add(index)
    return {outer: sorted(found) for outer, found in inner.items()}


_OWN_PLACE = ("block", "head", "embedding", "root")
"""Values of `Unit.reason` for units that do not come from precision rules, expert parallelism or frozen parameters."""


def plan_backward_prefetch(plan: ModelPlan) -> dict[str, tuple[str, ...]]:
    """Return, by path of a module, the modules whose units FSDP2 prefetches when backward enters the module's unit.

    By default, FSDP2 prefetches one unit ahead: when backward enters a unit, FSDP2 starts the all-gather of the unit
    whose forward ran just before. This may be the small unit of a precision rule. The long all-gather of the next block
    then starts late, in the short backward of the small unit. So each block also prefetches the block before it, and
    the divided experts of that block, because the backward of a block begins with its experts.

    A block without small units inside it has no entry, because FSDP2's default is then sufficient. Small units after
    the last block are treated in the same way: the unit of the last module prefetches them, and then the last block.
    """
    blocks = plan.inventory.blocks
    order: dict[str, tuple[str, ...]] = {}
    for index, block in enumerate(blocks):
        inner = [unit for unit in plan.units if _is_inside(unit, block)]
        _put_before(order, block, inner, _with_experts(plan, blocks[index - 1 : index]))
    last = plan.inventory.head[-1] if plan.inventory.head else ""
    paths = [module.path for module in plan.inventory.modules]
    after = paths[paths.index(blocks[-1] if blocks else "") + 1 :]
    behind = {path for path in after if not any(is_within(path, block) for block in blocks)}
    late = [u for u in plan.units if last not in u.modules and u.reason not in _OWN_PLACE and behind & {*u.modules}]
    _put_before(order, _stands_for(plan.sharded_by[last]), late, blocks[-1:])
    return order


def plan_forward_prefetch(plan: ModelPlan) -> dict[str, tuple[str, ...]]:
    """Return, by block, the modules whose units FSDP2 prefetches in the forward of that block.

    The result is empty without expert parallelism, because the host then starts each all-gather long before the device
    needs the parameters. With expert parallelism, the host waits in every layer for the numbers of tokens to send. So
    each block starts the all-gathers of its experts, of the next block, and of the next block's experts.
    """
    blocks = plan.inventory.blocks
    if not any(unit.is_divided for unit in plan.units):
        return {}
    return {
        block: (*_with_experts(plan, (block,))[1:], *_with_experts(plan, blocks[index + 1 : index + 2]))
        for index, block in enumerate(blocks)
    }


def _with_experts(plan: ModelPlan, blocks: tuple[str, ...]) -> tuple[str, ...]:
    """Return the blocks, each followed by its divided experts."""
    divided = [unit for unit in plan.units if unit.is_divided]
    return tuple(
        path for block in blocks for path in (block, *(_stands_for(u) for u in divided if _is_inside(u, block)))
    )


def _put_before(order: dict[str, tuple[str, ...]], module: str, small: list[Unit], block: tuple[str, ...]) -> None:
    """Add entries to `order`: `module` prefetches the small units that come next in backward, and then `block`. The
    small units prefetch `block` only. Without small units, add nothing."""
    if not small:
        return
    ahead = tuple(_stands_for(unit) for unit in reversed(small))
    order[module] = (*ahead, *block)
    for name in ahead:
        order.setdefault(name, block)


def _stands_for(unit: Unit) -> str:
    return unit.modules[0]


def _is_inside(unit: Unit, block: str) -> bool:
    return all(is_within(path, block) and path != block for path in unit.modules)


@dataclass(frozen=True)
class Resharding:
    """The reshard-after-forward setting of each kind of unit. True: the unit reshards."""

    blocks: bool
    """Setting of all units except late units and the root: for example, of all blocks but the last."""

    late: bool
    """Setting of late units, which backward needs first: units of the last block or the head, units with modules of
    several blocks, and units of several modules outside of blocks."""


def plan_resharding(parallelism: ParallelismConfig, accumulation: GradientAccumulationConfig) -> Resharding:
    """Return the settings that follow from `[parallelism]` and `[gradient_accumulation]`. Raises ValueError if
    `gradient_accumulation.mode` is `auto` and `keep_params_unsharded` is unset."""
    if accumulation.mode == "auto" and accumulation.keep_params_unsharded is None:
        raise ValueError("keep_params_unsharded is unset: resolve `auto` first (plan.auto_mode)")
    choice = parallelism.fsdp_reshard_after_forward
    if accumulation.keep_params_unsharded or choice == "never":
        return Resharding(blocks=False, late=False)
    return Resharding(blocks=True, late=choice == "always")
