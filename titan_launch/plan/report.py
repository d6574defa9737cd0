"""The unit table as text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from titan_launch.plan.types import Inventory, Unit

_HEADER = ("unit", "modules", "class", "parameters", "storage", "compute", "reduce", "output", "reshard", "from")


def format_units(inventory: Inventory, units: Sequence[Unit]) -> str:
    """An aligned table, one row per unit in wrapping order; units alike but for their path share a row."""
    rows: list[Sequence[str]] = [_HEADER]
    for _, alike in groupby(units, key=lambda unit: _cells(inventory, unit)[1:]):
        group = list(alike)
        cells = list(_cells(inventory, group[0]))
        if len(group) > 1:
            cells[0] = f"{group[0].name} .. {group[-1].name}"
            cells[1] = f"{len(group)} x {cells[1]}"
            cells[3] = f"{len(group)} x {cells[3]}"
        rows.append(cells)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _cells(inventory: Inventory, unit: Unit) -> tuple[str, ...]:
    policy = unit.policy
    classes = list(dict.fromkeys(inventory.by_path[path].class_name for path in unit.modules))
    compute = policy.param_dtype or f"{unit.storage_dtype} (inputs as they come)"
    if policy.param_dtype and not policy.cast_forward_inputs:
        compute += " (inputs as they come)"
    reshard = {True: "yes", False: "no", None: "root"}[unit.reshard_after_forward]
    return (
        unit.name,
        str(len(unit.modules)),
        ", ".join(classes),
        f"{unit.num_parameters:,}",
        unit.storage_dtype,
        compute,
        policy.reduce_dtype or compute,
        policy.output_dtype or "as computed",
        reshard,
        unit.reason,
    )
