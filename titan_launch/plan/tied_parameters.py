"""Whether the units of a model keep tied parameters together. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from titan_launch.errors import ConfigError, Problem
from titan_launch.plan.claims import Claims
from titan_launch.plan.types import Inventory, ModuleInfo, Unit, parent, unit_by_module


def check_tied_parameters(inventory: Inventory, units: Sequence[Unit], claims: Claims) -> None:
    """FSDP2 refuses a parameter in two units, at the first forward and without names; say it here, with names."""
    owners = unit_by_module(inventory, units)
    problems = []
    for module in inventory.modules:
        for parameter in module.parameters:
            first = parent(parameter.tied_to or "")
            if parameter.tied_to is None or owners[first] == owners[module.path]:
                continue
            claim = claims.governing(module.path) or claims.governing(first)
            reason = f"{module.path} and {first} share a parameter (tied), which FSDP2 wants in one unit"
            key = ("model", "blocks") if claim is None else claim.key or ("precision",)
            problems.append(Problem(key, f"{reason}: {_tied_remedy(module, first, claims)}"))
    if problems:
        raise ConfigError(problems)


def _tied_remedy(module: ModuleInfo, first: str, claims: Claims) -> str:
    """What brings a module and the one that shares its parameter into one unit."""
    own, other = claims.governing(module.path), claims.governing(first)
    if own is None and other is None:
        if module.same_as is None:
            return "set model.blocks so that one block holds both"
        return f'a rule for it makes a unit of its own: match = "{module.same_as}"'
    return "set output_dtype" if own is other else f'one rule must match both: match = ["{first}", "{module.path}"]'
