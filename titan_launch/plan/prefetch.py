"""In which order backward gathers the units' parameters. No torch.

FSDP2 gathers one unit ahead: when backward enters a unit, the all-gather of the one whose forward ended just before it
starts. With small units between the blocks that one is small, and the next block's all-gather, the one that takes long,
would start late, with little computation left to hide behind. So a block also names the block before it.
"""

from __future__ import annotations

from titan_launch.plan.types import ModelPlan, Unit, is_within


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
    late = [unit for unit in plan.units if last not in unit.modules and _runs_late(unit, plan)]
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


def _runs_late(unit: Unit, plan: ModelPlan) -> bool:
    """Whether a unit under a rule has a module behind the last block, where the modules stand in the order they run."""
    if unit.key is None and unit.reason in ("block", "head", "root"):
        return False
    blocks = plan.inventory.blocks
    order = {module.path: index for index, module in enumerate(plan.inventory.modules)}
    outside = [path for path in unit.modules if not any(is_within(path, block) for block in blocks)]
    return any(order[path] > order[blocks[-1] if blocks else ""] for path in outside)
