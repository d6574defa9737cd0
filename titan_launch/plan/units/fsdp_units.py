"""Precision rules become FSDP2 units: which modules are gathered, computed and reduced together, and in which order
they are wrapped. No torch: the trainer and the planner read the same table.

FSDP2 applies one policy to one `fully_shard` call, and casts inputs and outputs at the boundaries of the modules given
to it. So a module with a policy of its own needs a unit of its own, wrapped before its parent. The modules under one
rule share **one** unit for the whole model, which keeps its parameters between forward and backward: 2 collectives more
per microbatch, where one unit per module would take 3 each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from titan_launch.config.sections.precision import PrecisionConfig
from titan_launch.core.errors import ConfigError, Problem
from titan_launch.plan.types import (
    Inventory,
    ModelPlan,
    ModuleInfo,
    Policy,
    Unit,
    enclosing,
    full_name,
    is_within,
    outermost,
    parameters_by_unit,
    parent,
    unit_by_module,
)
from titan_launch.plan.units.order import Resharding, in_wrapping_order
from titan_launch.plan.units.rule_assignment import (
    RuleAssignment,
    RuleAssignments,
    assign_rules,
    with_batch_norm_default,
)
from titan_launch.plan.units.rule_problems import check_rules

_SMALL_UNIT = 2**20
"""Parameters that may be gathered together in any model: at most 4 MB on every rank."""


def plan_model(
    inventory: Inventory, precision: PrecisionConfig, resharding: Resharding, share_units: bool = True
) -> ModelPlan:
    """Compile the precision rules into units, and find the dtypes of the buffers.

    `share_units`: whether modules under one rule may share a unit, which FSDP2 can do from torch 2.13 on; otherwise
    each has its own.

    Raises ConfigError for a rule that matches nothing or only modules without tensors, for dtypes that kernels do not
    take together, and for tied parameters that the rules would put into two units.
    """
    claims = assign_rules(inventory, precision)
    check_rules(inventory, precision, claims)
    claims = with_batch_norm_default(inventory, precision, claims)
    units = in_wrapping_order(_UnitPlanner(inventory, precision, resharding, claims).units(share_units))
    check_tied_parameters(inventory, units, claims)
    return ModelPlan(inventory, units, _buffer_dtypes(inventory, claims))


def _buffer_dtypes(inventory: Inventory, claims: RuleAssignments) -> dict[str, str]:
    return {
        full_name(module.path, buffer.name): claims.buffer_dtype(module) or buffer.dtype
        for module in inventory.modules
        for buffer in module.buffers
        if buffer.is_floating and module.same_as is None
    }


class _UnitPlanner:
    """Builds the units of one model; the units are not in order yet."""

    def __init__(
        self, inventory: Inventory, precision: PrecisionConfig, resharding: Resharding, claims: RuleAssignments
    ):
        self.inventory = inventory
        self.precision = precision
        self.resharding = resharding
        self.claims = claims
        self.default = Policy(precision.param_dtype, precision.reduce_dtype)

    def units(self, share: bool) -> list[Unit]:
        drafts = [
            *self._rule_units(share),
            *self._embedding_units(),
            *self._block_units(),
            *self._head_unit(),
            self._root_unit(),
        ]
        return [
            replace(unit, num_parameters=sum(p.numel for p in own), is_trained=any(p.requires_grad for p in own))
            for unit, own in zip(drafts, parameters_by_unit(self.inventory, drafts), strict=True)
        ]

    def _unit(self, name: str, modules: Sequence[str], reshard: bool | None, reason: str) -> Unit:
        """A unit under no rule."""
        return Unit(name, tuple(modules), self.default, reshard, self.precision.storage_dtype, reason)

    def _ruled_unit(self, name: str, modules: Sequence[str], claim: RuleAssignment, policy: Policy) -> Unit:
        reshard, storage = self._reshard(modules, claim), self.claims.storage_dtype(claim)
        return Unit(name, tuple(modules), policy, reshard, storage, claim.reason, claim.key)

    def _rule_units(self, share: bool) -> list[Unit]:
        """The modules with one rule and one policy together, divided as the rule wants; the blocks are not among them.

        A unit's parameters are gathered together, so one that would hold more than the largest block, and more than a
        few MB, is divided into one per block.
        """
        groups: dict[tuple[str, Policy], tuple[RuleAssignment, list[str]]] = {}
        for path, claim in self.claims.own.items():
            if path not in self.inventory.blocks and self._needs_unit(path, claim):
                policy = self._policy(path, claim)
                groups.setdefault((claim.reason, policy), (claim, []))[1].append(path)
        return [
            self._ruled_unit(claim.reason if len(part) > 1 else part[0], part, claim, policy)
            for (_, policy), (claim, paths) in groups.items()
            for part in self._parts(paths, claim.rule.unit_per if share else "module")
        ]

    def _parts(self, paths: list[str], unit_per: str) -> list[list[str]]:
        if unit_per == "module":
            return [[path] for path in paths]
        largest_block = max((self._numel_within[path] for path in self.inventory.blocks), default=math.inf)
        if unit_per == "model" and sum(self._numel_within[path] for path in paths) <= max(largest_block, _SMALL_UNIT):
            return [paths]
        parts: dict[str, list[str]] = {}
        for path in paths:
            parts.setdefault(self._block_around(path), []).append(path)
        return list(parts.values())

    def _block_around(self, path: str) -> str:
        """The block that a module is or lies in; empty for one outside all blocks."""
        return next((block for block in self.inventory.blocks if is_within(path, block)), "")

    @cached_property
    def _numel_within(self) -> Counter[str]:
        """By path: elements of the parameters in a module and in those inside it."""
        numel: Counter[str] = Counter()
        for module in self.inventory.modules:
            own, path = sum(p.numel for p in module.parameters), module.path
            numel[path] += own
            while path and own:
                path = parent(path)
                numel[path] += own
        return numel

    def _needs_unit(self, path: str, claim: RuleAssignment) -> bool:
        """Not a module that the same rule already covers from further out, nor one that holds no parameters."""
        covered = self.claims.governing(parent(path)) is claim
        return not covered and self._numel_within[path] > 0

    def _embedding_units(self) -> list[Unit]:
        """The embeddings, which backward does not read: as many collectives as in the root, but nothing is held from
        forward to backward.

        Not one whose weight another module reads too (tied embeddings), nor one inside a block.
        """
        reshard = self.resharding.blocks
        return [
            replace(self._unit(path, [path], reshard, "embedding"), unshard_in_backward=not reshard)
            for path in self.inventory.embeddings
            if self.claims.governing(path) is None
            and not self._is_shared(path)
            and not enclosing(path, self.inventory.blocks)
        ]

    def _is_shared(self, path: str) -> bool:
        """Whether a parameter of this module is another's too."""
        module = self.inventory.by_path[path]
        names = {full_name(path, parameter.name) for parameter in module.parameters}
        tied = {parameter.tied_to for other in self.inventory.modules for parameter in other.parameters}
        return bool(names & tied) or self._is_tied([path])

    def _block_units(self) -> list[Unit]:
        units = []
        for path in self.inventory.blocks:
            claim = self.claims.governing(path)
            if claim is None:
                units.append(self._unit(path, [path], self._reshard_near([path]), "block"))
            else:
                units.append(self._ruled_unit(path, [path], claim, self._policy(path, claim)))
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
        return [self._unit(" + ".join(free), free, self.resharding.late, "head")]

    def _is_tied(self, paths: Sequence[str]) -> bool:
        return any(p.tied_to for path in paths for p in self.inventory.by_path[path].parameters)

    def _root_unit(self) -> Unit:
        return self._unit("(root)", [""], None, "root")

    def _reshard(self, modules: Sequence[str], claim: RuleAssignment) -> bool:
        """As the rule says. Else a unit that stays gathered through most of forward anyway, and that backward begins
        with, keeps its parameters: gathering them again would cost a collective and save nothing."""
        if claim.rule.reshard_after_forward is not None:
            return claim.rule.reshard_after_forward
        is_in_one_block = len({self._block_around(path) for path in modules} - {""}) == 1
        if len(modules) > 1 and not is_in_one_block:
            return self.resharding.late
        return self._reshard_near(modules)

    def _reshard_near(self, modules: Sequence[str]) -> bool:
        """Of modules that lie close to each other: the last block, too, would be free only while the head computes."""
        late = (*self.inventory.head, *outermost(self.inventory.blocks)[-1:])
        is_late = any(is_within(path, last) for path in modules for last in late)
        return self.resharding.late if is_late else self.resharding.blocks

    def _policy(self, path: str, claim: RuleAssignment) -> Policy:
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


def check_tied_parameters(inventory: Inventory, units: Sequence[Unit], claims: RuleAssignments) -> None:
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


def _tied_remedy(module: ModuleInfo, first: str, claims: RuleAssignments) -> str:
    """What brings a module and the one that shares its parameter into one unit."""
    own, other = claims.governing(module.path), claims.governing(first)
    if own is None and other is None:
        if module.same_as is None:
            return "set model.blocks so that one block holds both"
        return f'a rule for it makes a unit of its own: match = "{module.same_as}"'
    return "set output_dtype" if own is other else f'one rule must match both: match = ["{first}", "{module.path}"]'
