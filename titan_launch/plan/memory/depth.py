"""Fewer blocks in place of many equal ones: which may go, and the plan without them. No torch.

The plan is made for the whole model and then cut, not made anew: a rule for one block's path finds that block, and
what is decided by size is decided by the whole model's.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from titan_launch.plan.types import ModelPlan, ModuleInfo, Unit, enclosing, is_within, outermost, parent

_DEPTHS = (4, 5, 6)
"""To how many repetitions a stretch of equal blocks is cut: half of them at the front, half at the back, so that what
FSDP2 gathers ahead, and holds behind, is there at both ends."""


@dataclass(frozen=True)
class Shortcut:
    """Two shallower models, between which memory and traffic are on one line with the whole model's."""

    removed_from_shorter: tuple[str, ...]
    removed_from_longer: tuple[str, ...]
    factor: float
    """The whole model is at `shorter + factor * (longer - shorter)`."""

    removed_for_check: tuple[str, ...]
    """A third model, which must be on that line as well, at a factor of 2."""


def find_shortcut(signatures: Sequence[Hashable], blocks: Sequence[str], again: Collection[str]) -> Shortcut | None:
    """A shortcut through equal blocks; None where none repeats often enough.

    `signatures`: of each of `blocks`, as `block_signatures` makes them. `again`: the modules that backward computes
    again.
    """
    repeat = longest_repeat([(_inside(block, again), s) for block, s in zip(blocks, signatures, strict=True)])
    if repeat.times <= _DEPTHS[1]:
        return None
    kept = [set(shorten(len(blocks), repeat, times)) for times in _DEPTHS]
    shorter, longer, check = (tuple(path for i, path in enumerate(blocks) if i not in indices) for indices in kept)
    return Shortcut(shorter, longer, repeat.times - _DEPTHS[0], check)


def _inside(block: str, paths: Collection[str]) -> tuple[str, ...]:
    """Those of the modules that are the block or lie in it, relative to it."""
    return tuple(path.removeprefix(block) for path in paths if is_within(path, block))


def block_signatures(plan: ModelPlan) -> list[Hashable]:
    """For each outer block, what tells it from another: its modules, their tensors and units."""
    inside: dict[str, list[ModuleInfo]] = {path: [] for path in outermost(plan.inventory.blocks)}
    for module in plan.inventory.modules:
        if block := enclosing(module.path, inside):
            inside[block].append(module)
    return [
        (parent(block), *(_signature(plan, module, block) for module in modules)) for block, modules in inside.items()
    ]


def _signature(plan: ModelPlan, module: ModuleInfo, block: str) -> Hashable:
    return _relative(module, block), _unit_signature(plan.unit_of[module.path], block)


def _relative(module: ModuleInfo, block: str) -> Hashable:
    """The entry of the inventory as if the block were the model; what it shares with others stays as it is."""
    own, same_as = module.path.removeprefix(block), _within(module.same_as, block)
    ties = tuple(_within(parameter.tied_to, block) for parameter in module.parameters)
    parameters = tuple((p.name, p.shape, p.dtype, p.requires_grad) for p in module.parameters)
    return own, module.classes, same_as, parameters, ties, module.buffers if module.same_as is None else ()


def _within(path: str | None, block: str) -> str | None:
    return path if path is None or not is_within(path, block) else path.removeprefix(block)


def _unit_signature(unit: Unit, block: str) -> Hashable:
    """A unit that lies in the block, relative to it; one that reaches further, by what it is."""
    inside = tuple(path.removeprefix(block) for path in unit.modules if is_within(path, block))
    if len(inside) < len(unit.modules):
        return unit.name, inside
    return inside, unit.policy, unit.storage_dtype, unit.reshard_after_forward, unit.unshard_in_backward


def without_blocks(plan: ModelPlan, removed: Collection[str]) -> ModelPlan:
    """The plan without what lies in `removed` blocks.

    Raises ValueError where something that stays is shared with one of them.
    """
    gone = frozenset(removed)

    def stays(path: str) -> bool:
        return not enclosing(path, gone)

    inventory = plan.inventory
    modules = tuple(module for module in inventory.modules if stays(module.path))
    shared = {m.same_as for m in modules} | {p.tied_to for m in modules for p in m.parameters}
    if not all(stays(path) for path in shared if path is not None):
        raise ValueError("blocks share modules or parameters")
    units = (replace(unit, modules=tuple(filter(stays, unit.modules))) for unit in plan.units)
    return ModelPlan(
        replace(
            inventory,
            modules=modules,
            blocks=tuple(filter(stays, inventory.blocks)),
            pipeline_order=tuple(filter(stays, inventory.pipeline_order)),
        ),
        tuple(unit for unit in units if unit.modules),
        {name: dtype for name, dtype in plan.buffer_dtypes.items() if stays(name)},
        recomputed=tuple(filter(stays, plan.recomputed)),
        compiled=tuple(filter(stays, plan.compiled)),
        float8=tuple(filter(stays, plan.float8)),
        stages=tuple(replace(stage, modules=tuple(filter(stays, stage.modules))) for stage in plan.stages),
    )


@dataclass(frozen=True)
class Repeat:
    """A stretch of a sequence in which the same `period` entries come again and again."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The first index behind the stretch."""
        return self.start + self.period * self.times


def longest_repeat(sequence: Sequence[Hashable]) -> Repeat:
    """The longest stretch with the shortest period: of `a b b b c` the three `b`, of `a b a b a b` the three `a b`.

    An empty sequence has none: `Repeat(0, 1, 0)`.
    """
    numbers: dict[Hashable, int] = {}
    sequence = [numbers.setdefault(entry, len(numbers)) for entry in sequence]  # entries may be slow to compare
    best = Repeat(0, 1, min(1, len(sequence)))
    for period in range(1, len(sequence) // 2 + 1):
        start = 0
        while start + period < len(sequence):
            end = start + period
            while end < len(sequence) and sequence[end] == sequence[end - period]:
                end += 1
            found = Repeat(start, period, (end - start) // period)
            if found.times > 1 and found.times * period > best.times * best.period * (1 if best.times > 1 else 0):
                best = found
            start = max(end - period + 1, start + 1)
    return best


def shorten(length: int, repeat: Repeat, times: int) -> list[int]:
    """The indices that are left of a sequence of `length` when its repeated stretch is cut to so many periods.

    Half of those left are the first ones and half the last, so that entries have the same index at every depth: of 80
    blocks, 0, 1, 78, 79 are left of four and 0, 1, 77, 78, 79 of five.
    """
    if times >= repeat.times:
        return list(range(length))
    first = repeat.start + times // 2 * repeat.period
    last = repeat.end - (times - times // 2) * repeat.period
    return [*range(first), *range(last, length)]
