"""Precision rules become FSDP2 units: which modules are gathered, computed and reduced together, and in which order
they are wrapped. No torch: the trainer and the planner read the same table.

FSDP2 applies one policy to one `fully_shard` call, and casts inputs and outputs at the boundaries of the modules given
to it. So a module with a policy of its own needs a unit of its own, wrapped before its parent. The modules under one
rule share **one** unit for the whole model: 3 more collectives per microbatch, where one unit per module would take 3
each, and the blocks' own all-gathers still start as early as without the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from titan_launch.config.precision import PrecisionConfig
from titan_launch.errors import ConfigError, Problem
from titan_launch.plan.claims import Claim, Claims, claim_modules, parent
from titan_launch.plan.types import Inventory, Policy, Unit, is_within


@dataclass(frozen=True)
class Resharding:
    """Whether the units free their parameters after forward (`reshard_after_forward`)."""

    blocks: bool
    head: bool


def plan_units(
    inventory: Inventory, precision: PrecisionConfig, resharding: Resharding, share_units: bool = True
) -> tuple[Unit, ...]:
    """Compile the precision rules into units, in the order in which they are wrapped (inner before outer, root last).

    `share_units`: whether the modules under one rule may share a unit, which FSDP2 can do from torch 2.13 on; otherwise
    each has its own.

    Raises ConfigError for a rule that matches nothing or only modules without tensors, and for tied parameters that
    the rules would put into two units.
    """
    claims = claim_modules(inventory, precision)
    planner = _UnitPlanner(inventory, precision, resharding, claims)
    units = _order(planner.units(share_units))
    _check_tied_parameters(inventory, units, claims)
    return units


def plan_buffer_dtypes(inventory: Inventory, precision: PrecisionConfig) -> dict[str, str]:
    """Dtypes of the floating buffers that rules with a `buffer_dtype` cover, by the buffers' full names."""
    claims = claim_modules(inventory, precision)
    dtypes: dict[str, str] = {}
    for module in inventory.modules:
        claim = claims.governing(module.path)
        if claim is not None and claim.rule.buffer_dtype is not None:
            floating = [buffer.name for buffer in module.buffers if buffer.is_floating]
            dtypes |= {f"{module.path}.{name}": claim.rule.buffer_dtype for name in floating}
    return dtypes


class _UnitPlanner:
    """Builds the units of one model; the units are not in order yet."""

    def __init__(self, inventory: Inventory, precision: PrecisionConfig, resharding: Resharding, claims: Claims):
        self.inventory = inventory
        self.precision = precision
        self.resharding = resharding
        self.claims = claims
        self.default = Policy(precision.param_dtype, precision.reduce_dtype)

    def units(self, share: bool) -> list[Unit]:
        shared = self._rule_units()
        ruled = shared if share else [part for unit in shared for part in _split(unit)]
        drafts = [*ruled, *self._block_units(), *self._head_unit(), self._root_unit()]
        owners = unit_by_module(self.inventory, drafts)
        sizes = dict.fromkeys(range(len(drafts)), 0)
        for module in self.inventory.modules:
            sizes[owners[module.path]] += sum(p.numel for p in module.parameters if p.tied_to is None)
        return [replace(unit, num_parameters=sizes[index]) for index, unit in enumerate(drafts)]

    def _unit(self, name: str, modules: Sequence[str], policy: Policy, reshard: bool | None, reason: str) -> Unit:
        return Unit(name, tuple(modules), policy, reshard, 0, self.precision.storage_dtype, reason)

    def _rule_units(self) -> list[Unit]:
        """One unit for all modules with the same rule and the same policy; the blocks are not among them.

        A unit's parameters are gathered together, so one that would hold more than the largest block is divided into
        one per block.
        """
        groups: dict[tuple[str, Policy, bool], list[str]] = {}
        for path, claim in self.claims.own.items():
            if path in self.inventory.blocks or not self._needs_unit(path, claim):
                continue
            reshard = self._reshard(claim)
            groups.setdefault((claim.reason, self._policy(path, claim), reshard), []).append(path)
        return [
            self._unit(reason if len(part) > 1 else part[0], part, policy, reshard, reason)
            for (reason, policy, reshard), paths in groups.items()
            for part in self._parts(paths)
        ]

    def _parts(self, paths: list[str]) -> list[list[str]]:
        largest_block = max(map(self._numel_within, self.inventory.blocks), default=0)
        if not largest_block or sum(map(self._numel_within, paths)) <= largest_block:
            return [paths]
        parts: dict[str, list[str]] = {}
        for path in paths:
            block = next((block for block in self.inventory.blocks if is_within(path, block)), "")
            parts.setdefault(block, []).append(path)
        return list(parts.values())

    def _numel_within(self, path: str) -> int:
        return sum(p.numel for m in self.inventory.modules if is_within(m.path, path) for p in m.parameters)

    def _needs_unit(self, path: str, claim: Claim) -> bool:
        """Not a module that the same rule already covers from further out, nor one that holds no parameters."""
        covered = self.claims.governing(parent(path)) is claim
        return not covered and any(m.parameters for m in self.inventory.modules if is_within(m.path, path))

    def _block_units(self) -> list[Unit]:
        units = []
        for path in self.inventory.blocks:
            claim = self.claims.governing(path)
            if claim is None:
                units.append(self._unit(path, [path], self.default, self.resharding.blocks, "block"))
            else:
                units.append(self._unit(path, [path], self._policy(path, claim), self._reshard(claim), claim.reason))
        return units

    def _head_unit(self) -> list[Unit]:
        """The modules that run last, together: their gradients come first and need not wait for the whole backward.

        None where the output layer has a rule of its own, or shares its weight with a module that runs first (tied
        embeddings): the two must then be in one unit, the root's.
        """
        ruled = [path for path in self.inventory.head if self.claims.governing(path) is not None]
        free = [path for path in self.inventory.head if path not in (*ruled, *self.inventory.blocks)]
        if not free or free[-1] != self.inventory.head[-1] or self._is_tied(free):
            return []
        return [self._unit(" + ".join(free), free, self.default, self.resharding.head, "head")]

    def _is_tied(self, paths: Sequence[str]) -> bool:
        return any(p.tied_to for path in paths for p in self.inventory.by_path[path].parameters)

    def _root_unit(self) -> Unit:
        return self._unit("(root)", [""], self.default, None, "root")

    def _reshard(self, claim: Claim) -> bool:
        wanted = claim.rule.reshard_after_forward
        return self.resharding.blocks if wanted is None else wanted

    def _policy(self, path: str, claim: Claim) -> Policy:
        rule = claim.rule
        return Policy(
            param_dtype=rule.param_dtype,
            reduce_dtype=rule.reduce_dtype or self.precision.reduce_dtype,
            # What a rule says of the outputs holds for the modules it matches, not for blocks inside them.
            output_dtype=(rule.output_dtype if path in self.claims.own else None) or self._consumer_dtype(path),
            cast_forward_inputs=rule.cast_forward_inputs,
        )

    def _consumer_dtype(self, path: str) -> str | None:
        """What the module around this one computes in, and so expects its children to return.

        FSDP2 casts inputs only at unit boundaries: without this, an fp32 norm would hand fp32 to a bf16 `nn.Linear`,
        which fails. The model's own output goes to the loss, which takes any dtype; rounding it would undo an fp32
        head.
        """
        if self.inventory.head and path == self.inventory.head[-1]:
            return None
        return self.claims.compute_dtype(parent(path))


def unit_by_module(inventory: Inventory, units: Sequence[Unit]) -> dict[str, int]:
    """The index of the unit that holds the parameters each module owns: that of the nearest module around it."""
    members = {path: index for index, unit in enumerate(units) for path in unit.modules}
    owners: dict[str, int] = {}
    for module in inventory.modules:  # parents come first
        inherited = owners.get(parent(module.path), members[""])
        owners[module.path] = members.get(module.same_as or module.path, members.get(module.path, inherited))
    return owners


def _order(units: Sequence[Unit]) -> tuple[Unit, ...]:
    """Inner units first. Two units that each hold a module inside the other's are divided into one per module."""
    graph = {
        i: {j for j, inner in enumerate(units) if i != j and _has_module_within(inner, units[i])}
        for i in range(len(units))
    }
    try:
        return tuple(units[i] for i in TopologicalSorter(graph).static_order())
    except CycleError as error:
        in_cycle = set(error.args[1])
    divided = [part for i, unit in enumerate(units) for part in (_split(unit) if i in in_cycle else [unit])]
    return _order(divided)


def _has_module_within(inner: Unit, outer: Unit) -> bool:
    return any(a != b and is_within(a, b) for b in outer.modules for a in inner.modules)


def _split(unit: Unit) -> list[Unit]:
    return [replace(unit, name=path, modules=(path,)) for path in unit.modules]


def _check_tied_parameters(inventory: Inventory, units: Sequence[Unit], claims: Claims) -> None:
    """FSDP2 refuses a parameter in two units, at the first forward and without names; say it here, with names."""
    owners = unit_by_module(inventory, units)
    problems = []
    for module in inventory.modules:
        for parameter in module.parameters:
            first = parent(parameter.tied_to or "")
            if parameter.tied_to is None or owners[first] == owners[module.path]:
                continue
            claim = claims.governing(module.path) or claims.governing(first)
            remedy = "one rule must match both or neither" if claim else "set model.blocks so that one block holds both"
            reason = f"{module.path} and {first} share a parameter (tied), which FSDP2 wants in one unit: {remedy}"
            problems.append(Problem(claim.key if claim else ("model", "blocks"), reason))
    if problems:
        raise ConfigError(problems)
