"""Prediction of a deep model's memory, traffic and times from shallower models: the blocks to remove, and the plan
without these blocks. This module does not import torch.

Blocks are removed from the plan of the whole model. A plan that is made for the shallower model could differ: rules may
name the path of one block, and some decisions depend on the size of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass

from titan_launch.plan.types import (
    ModelPlan,
    ModuleInfo,
    Unit,
    enclosing,
    full_name,
    is_within,
    outermost,
    parent,
    without_modules,
)

_DEPTHS = (4, 5, 6)
"""Numbers of periods (`Repeat`) that three shallower models keep: the shorter model, the longer model, and the model
that checks the extrapolation."""


@dataclass(frozen=True)
class Shortcut:
    """The blocks to remove for each shallower model, and the factor of the linear extrapolation to the whole model."""

    removed_from_shorter: tuple[str, ...]
    removed_from_longer: tuple[str, ...]
    factor: float
    """The prediction for the whole model is `shorter + factor * (longer - shorter)`."""

    removed_for_check: tuple[str, ...]
    """Blocks to remove for a third model, which checks the extrapolation: its memory and traffic must equal the
    extrapolation with `factor = 2`."""


def find_shortcut(plan: ModelPlan) -> Shortcut | None:
    """Return the blocks to remove for shallower models; None if the longest repeated part of the blocks
    (`longest_repeat`) has at most 5 periods."""
    blocks, repeat = outermost(plan.inventory.blocks), longest_repeat(block_signatures(plan))
    if repeat.times <= _DEPTHS[1]:
        return None
    kept = [set(shorten(len(blocks), repeat, times)) for times in _DEPTHS]
    shorter, longer, check = (tuple(path for i, path in enumerate(blocks) if i not in indices) for indices in kept)
    return Shortcut(shorter, longer, repeat.times - _DEPTHS[0], check)


def _inside(block: str, paths: Collection[str]) -> tuple[str, ...]:
    """Return those of `paths` that are the block or lie in it, relative to the block."""
    return tuple(path.removeprefix(block) for path in paths if is_within(path, block))


def block_signatures(plan: ModelPlan) -> list[Hashable]:
    """Return a signature of each outer block. Blocks with equal signatures allocate and communicate the same.

    A signature has the block's modules with their tensors, units and buffer dtypes, and the block's checkpointed
    modules. It has the path of the module around the block, and the dtypes of the previous block (for the first block,
    its own dtypes). A flag is True if backward computes a gradient of the block's inputs.
    """
    inside: dict[str, list[ModuleInfo]] = {path: [] for path in outermost(plan.inventory.blocks)}
    for module in plan.inventory.modules:
        if block := enclosing(module.path, inside):
            inside[block].append(module)
    modules, embeddings = plan.inventory.by_path, plan.inventory.embeddings
    # Backward computes a gradient of a block's inputs only if a parameter before the block is trained. An unknown
    # embedding counts as trained, so that the first block is like the others.
    follows_trained = not embeddings or any(p.requires_grad for path in embeddings for p in modules[path].parameters)
    signatures: list[Hashable] = []
    blocks = [*inside]
    for before, (block, own) in zip(blocks[:1] + blocks, inside.items(), strict=False):
        context = plan.unit_of[before].policy, follows_trained
        described = [
            (_relative(module, block), _unit_signature(plan.unit_of[module.path], block), _buffer_dtypes(plan, module))
            for module in own
        ]
        signatures.append((parent(block), _inside(block, plan.checkpointed), *context, *described))
        follows_trained |= any(parameter.requires_grad for module in own for parameter in module.parameters)
    return signatures


def _relative(module: ModuleInfo, block: str) -> Hashable:
    """Return the inventory entry with paths relative to the block. Paths outside of the block stay unchanged."""
    own, same_as = module.path.removeprefix(block), _within(module.same_as, block)
    ties = tuple(_within(parameter.tied_to, block) for parameter in module.parameters)
    parameters = tuple((p.name, p.shape, p.dtype, p.requires_grad) for p in module.parameters)
    return own, module.classes, same_as, parameters, ties, module.buffers if module.same_as is None else ()


def _buffer_dtypes(plan: ModelPlan, module: ModuleInfo) -> tuple[str | None, ...]:
    """Return the planned dtype of each buffer of a module; None for a buffer that is not floating."""
    path = module.path if module.same_as is None else module.same_as
    return tuple(plan.buffer_dtypes.get(full_name(path, buffer.name)) for buffer in module.buffers)


def _within(path: str | None, block: str) -> str | None:
    return path if path is None or not is_within(path, block) else path.removeprefix(block)


def _unit_signature(unit: Unit, block: str) -> Hashable:
    """Return the signature of a unit: its modules in the block, relative to the block, and its settings. If the unit
    has modules outside of the block, its name stands for the settings."""
    inside = _inside(block, unit.modules)
    if len(inside) < len(unit.modules):
        return unit.name, inside
    return inside, unit.policy, unit.storage_dtype, unit.reshard_after_forward, unit.unshard_in_backward


def without_blocks(plan: ModelPlan, removed: Collection[str]) -> ModelPlan:
    """Return the plan without the `removed` blocks. Raises ValueError if the remaining model has a second
    occurrence of a module or parameter whose first occurrence is removed."""
    left = without_modules(plan, removed)
    shared = {m.same_as or "" for m in left.inventory.modules}
    shared |= {p.tied_to or "" for m in left.inventory.modules for p in m.parameters}
    if any(enclosing(path, removed) for path in shared):
        raise ValueError("a removed block shares a module or a parameter with the remaining model")
    return left


@dataclass(frozen=True)
class Repeat:
    """A part of a sequence that consists of `times` repetitions of the same `period` entries."""

    start: int
    period: int
    times: int

    @property
    def end(self) -> int:
        """The first index after the repeated part."""
        return self.start + self.period * self.times


def longest_repeat(sequence: Sequence[Hashable]) -> Repeat:
    """Return the longest repeated part: in `a b b b c` the three `b`, in `a b a b a b` the three `a b`. Of several
    longest parts, return one with the shortest period. If nothing repeats, return `Repeat(0, 1, 1)`; for an empty
    sequence, `Repeat(0, 1, 0)`."""
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
            if found.times > 1 and found.times * period > best.times * best.period * (best.times > 1):
                best = found
            start = max(end - period + 1, start + 1)
    return best


def shorten(length: int, repeat: Repeat, times: int) -> list[int]:
    """Return the remaining indices of a sequence of `length` entries, after its repeated part is cut to `times`
    periods. If the part has at most `times` periods, all indices remain.

    The first half and the last half of the remaining periods are kept, so that FSDP2's prefetches and late reductions
    at both ends stay. Of 80 equal blocks, 0, 1, 78, 79 remain for `times = 4`, and 0, 1, 2, 78, 79 for `times = 5`.
    """
    if times >= repeat.times:
        return list(range(length))
    first = repeat.start + (times - times // 2) * repeat.period
    last = repeat.end - times // 2 * repeat.period
    return [*range(first), *range(last, length)]
