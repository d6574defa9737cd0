"""Fewer blocks in place of many equal ones: which may go, and the model and its plan without them.

The plan is made for the whole model and then cut, not made anew: a rule for one block's path finds that block, and
what is decided by size is decided by the whole model's.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.plan.param_groups import first_match
from titan_launch.plan.recomputation import chosen_blocks
from titan_launch.plan.types import Inventory, ModelPlan, ModuleInfo, Unit, full_name, is_within, parent

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def outer_blocks(inventory: Inventory) -> tuple[str, ...]:
    """Paths of the blocks that do not lie in another one, in order."""
    blocks = inventory.blocks
    return tuple(path for path in blocks if not any(is_within(path, other) for other in blocks if other != path))


def signatures(plan: ModelPlan, config: JobConfig) -> list[Hashable]:
    """For each outer block, what tells it from another: its modules, their tensors and units, the optimizer's groups,
    and whether it is computed again in backward."""
    recomputed = set(chosen_blocks(plan.inventory.blocks, config.activation_checkpoint))
    return [(path in recomputed, *_signature(plan, config, path)) for path in outer_blocks(plan.inventory)]


def _signature(plan: ModelPlan, config: JobConfig, block: str) -> Iterator[Hashable]:
    yield parent(block)
    for module in plan.inventory.modules:
        if is_within(module.path, block):
            names = [full_name(module.path, parameter.name) for parameter in module.parameters]
            yield _relative(module, block)
            yield _unit_signature(plan.unit_of[module.path], block)
            yield tuple(first_match(config.optimizer.param_groups, [name]) for name in names)


def _relative(module: ModuleInfo, block: str) -> ModuleInfo:
    """The entry of the inventory as if the block were the model; what it shares with others stays as it is."""
    own = module.path.removeprefix(block)
    parameters = tuple(replace(p, tied_to=_within(p.tied_to, block)) for p in module.parameters)
    return replace(module, path=own, same_as=_within(module.same_as, block), parameters=parameters)


def _within(path: str | None, block: str) -> str | None:
    return path if path is None or not is_within(path, block) else path.removeprefix(block)


def _unit_signature(unit: Unit, block: str) -> Hashable:
    """A unit that lies in the block, relative to it; one that reaches further, by what it is."""
    inside = tuple(path.removeprefix(block) for path in unit.modules if is_within(path, block))
    own = replace(unit, name="", modules=inside)
    return own if len(inside) == len(unit.modules) else (unit.name, own)


def without_blocks(plan: ModelPlan, removed: Sequence[str]) -> ModelPlan:
    """The plan without what lies in `removed` blocks.

    Raises ValueError where something that stays is shared with one of them.
    """

    def stays(path: str) -> bool:
        return not any(is_within(path, block) for block in removed)

    inventory = plan.inventory
    modules = tuple(module for module in inventory.modules if stays(module.path))
    shared = [m.same_as for m in modules] + [p.tied_to for m in modules for p in m.parameters]
    if not all(stays(path) for path in shared if path is not None):
        raise ValueError("blocks share modules or parameters")
    units = (replace(unit, modules=tuple(filter(stays, unit.modules))) for unit in plan.units)
    return ModelPlan(
        replace(inventory, modules=modules, blocks=tuple(filter(stays, inventory.blocks))),
        tuple(unit for unit in units if unit.modules),
        {name: dtype for name, dtype in plan.buffer_dtypes.items() if stays(name)},
    )


def remove_blocks(model: nn.Module, removed: Sequence[str]) -> None:
    """Take blocks out of the containers they are in, in place. Those that stay keep their names: a container has gaps.

    Raises ValueError for a block that is not in a container, which a model would miss.
    """
    for path in removed:
        container = model.get_submodule(parent(path))
        if not isinstance(container, _CONTAINERS):
            raise ValueError(f"{path} is an attribute of a {type(container).__name__}")
        delattr(container, path.rpartition(".")[2])
