"""What of a whole model's plan is for one stage of a pipeline. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from titan_launch.plan.types import (
    Inventory,
    ModelPlan,
    ModuleInfo,
    Stage,
    Unit,
    enclosing,
    full_name,
    parameters_by_unit,
)


def stage_part(plan: ModelPlan, stage: Stage) -> ModelPlan:
    """What of a whole model's plan is for one of its stages: the modules, units and buffers that are there.

    A unit of modules on several stages has a part on each. The inputs of the root are what the stage before hands on:
    in the whole model nobody casts there.
    """
    foreign = {path for other in plan.stages if other.index != stage.index for path in other.modules}
    inventory, first = _without(plan.inventory, foreign)
    units = [
        _restricted(unit, foreign) for unit in plan.units if any(not _is_foreign(p, foreign) for p in unit.modules)
    ]
    if stage.index:
        root = units.pop()
        units.append(replace(root, policy=replace(root.policy, cast_forward_inputs=False)))
    return ModelPlan(
        inventory=inventory,
        units=tuple(
            replace(unit, num_parameters=sum(p.numel for p in own), is_trained=any(p.requires_grad for p in own))
            for unit, own in zip(units, parameters_by_unit(inventory, units), strict=True)
        ),
        buffer_dtypes={
            full_name(module.path, buffer.name): plan.buffer_dtypes[full_name(first[module.path], buffer.name)]
            for module in inventory.modules
            for buffer in module.buffers
            if buffer.is_floating and module.same_as is None
        },
        recomputed=_own(plan.recomputed, foreign),
        compiled=_own(plan.compiled, foreign),
        float8=_own(plan.float8, foreign),
    )


def parts_on_rank(plan: ModelPlan, rank: int) -> tuple[ModelPlan, ...]:
    """The plans of the stages that a rank along the pipeline holds, in order; the plan itself without stages."""
    if not plan.stages:
        return (plan,)
    return tuple(stage_part(plan, stage) for stage in plan.stages if stage.rank == rank)


def _without(inventory: Inventory, foreign: Collection[str]) -> tuple[Inventory, dict[str, str]]:
    """The table without some modules; and for each path that is left, the first one of the same module before.

    A module with several parents may have been met first in one that is gone: the next path is the first then.
    """
    modules: list[ModuleInfo] = []
    first: dict[str, str] = {}
    now_first: dict[str, str] = {}
    for module in inventory.modules:
        if _is_foreign(module.path, foreign):
            continue
        first[module.path] = module.same_as or module.path
        owner = now_first.setdefault(first[module.path], module.path)
        modules.append(replace(module, same_as=None if owner == module.path else owner))
    left = Inventory(
        modules=tuple(modules),
        blocks=_own(inventory.blocks, foreign),
        head=_own(inventory.head, foreign),
        embeddings=_own(inventory.embeddings, foreign),
        chain=_own(inventory.chain, foreign),
    )
    return left, first


def _restricted(unit: Unit, foreign: Collection[str]) -> Unit:
    return replace(unit, modules=_own(unit.modules, foreign))


def _own(paths: Sequence[str], foreign: Collection[str]) -> tuple[str, ...]:
    return tuple(path for path in paths if not _is_foreign(path, foreign))


def _is_foreign(path: str, foreign: Collection[str]) -> bool:
    return bool(enclosing(path, foreign))
