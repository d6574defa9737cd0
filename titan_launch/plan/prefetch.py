"""In which order backward gathers the units' parameters. No torch.

FSDP2 gathers one unit ahead: when backward enters a unit, the all-gather of the one whose forward ended just before it
starts. With small units between the blocks that one is small, and the next block's all-gather, the one that takes long,
would start late, with little computation left to hide behind. So a block also names the block before it.
"""

from __future__ import annotations

from titan_launch.plan.types import Inventory, ModelPlan, Unit, is_within

_OWN_PLACE = ("block", "head", "embedding", "root")
"""The reasons of units that are there without rules too."""


def plan_backward_prefetch(plan: ModelPlan) -> dict[str, tuple[str, ...]]:
    """For modules whose unit must say what is gathered while its backward runs: the modules that stand for those units.

    Empty where FSDP2's own order is right already: without rules.
    """
    blocks = plan.inventory.blocks
    order: dict[str, tuple[str, ...]] = {}
    for index, block in enumerate(blocks):
        inner = [unit for unit in plan.units if _is_inside(unit, block)]
        before = blocks[index - 1 : index] if index else ()
        _put_before(order, block, inner, before)
    last = plan.inventory.head[-1] if plan.inventory.head else ""
    behind = _paths_behind_blocks(plan.inventory)
    late = [u for u in plan.units if last not in u.modules and u.reason not in _OWN_PLACE and behind & {*u.modules}]
    _put_before(order, _stands_for(plan.unit_of[last]), late, blocks[-1:])
    return order


def _put_before(order: dict[str, tuple[str, ...]], module: str, small: list[Unit], block: tuple[str, ...]) -> None:
    """Backward of `module` gathers the small units that it needs next, and the block before; those units only that."""
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


def _paths_behind_blocks(inventory: Inventory) -> set[str]:
    """The modules behind the last block, or all without blocks, where they stand in the order they run."""
    blocks, paths = inventory.blocks, [module.path for module in inventory.modules]
    behind = paths[paths.index(blocks[-1] if blocks else "") + 1 :]
    return {path for path in behind if not any(is_within(path, block) for block in blocks)}
