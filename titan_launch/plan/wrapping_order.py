"""In which order units are wrapped. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter

from titan_launch.plan.types import Unit, parent


def in_wrapping_order(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Inner units first. Two units that each hold a module inside the other's are divided into one per module."""
    graph = _inner_units(units)
    try:
        return tuple(units[i] for i in TopologicalSorter(graph).static_order())
    except CycleError as error:
        in_cycle = set(error.args[1])
    divided = [part for i, unit in enumerate(units) for part in (_split(unit) if i in in_cycle else [unit])]
    return in_wrapping_order(divided)


def _inner_units(units: Sequence[Unit]) -> dict[int, list[int]]:
    """For every unit, by index: those with a module inside one of its modules."""
    index_of = {path: index for index, unit in enumerate(units) for path in unit.modules}
    inner: dict[int, set[int]] = {index: set() for index in range(len(units))}
    for path, index in index_of.items():
        while path:
            path = parent(path)
            if index_of.get(path, index) != index:
                inner[index_of[path]].add(index)
    return {outer: sorted(found) for outer, found in inner.items()}


def _split(unit: Unit) -> list[Unit]:
    return [replace(unit, name=path, modules=(path,)) for path in unit.modules]
