"""The FSDP2 units of a model, from its precision rules. The trainer and the planner read the same table, so this module
does not import torch.

A `fully_shard` call has one policy. From torch 2.15 on, however, single parameters may compute in their storage dtype.
Most rules are then carried out **in place**: the parameters stay in the unit of their block, and hooks cast the inputs
and outputs of the modules. This adds no collective. Trained modules inside of frozen blocks, such as adapters, are in
place too. Each of these blocks then reduces gradients.

Other rules need units of their own, wrapped before the enclosing units. Experts that are divided over ranks (expert
parallelism) also need units of their own. By default, all modules of a rule share **one** unit, which does not reshard
after forward. This unit adds 2 collectives per microbatch. With one unit per module, each module would add up to 3
collectives.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.core.errors import ConfigError, Problem, config_error
from titan_launch.core.torch_release import planned_release
from titan_launch.plan.experts import check_experts
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
    outward,
    parameters_by_unit,
    parent,
    unit_by_module,
    with_parameters,
)
from titan_launch.plan.units.order import Resharding, in_wrapping_order
from titan_launch.plan.units.rule_assignment import (
    RuleAssignment,
    RuleAssignments,
    assign_rules,
    check_rules,
    with_batch_norm_default,
)

_SMALL_UNIT = 2**20
"""Number of elements. A rule's unit with at most this number stays one unit, even if it is larger than every block:
its unsharded parameters take at most 4 MiB per rank."""


@dataclass(frozen=True)
class UnitLimits:
    """Limits of units that follow from the parallelism of a job and the release of PyTorch."""

    share_units: bool = True
    """True if modules under one rule may share a unit, which FSDP2 supports from torch 2.13 on. False: each module has
    its own unit."""

    expert_parallel: int = 1
    """Number of ranks over which experts are divided."""

    is_pipelined: bool = False
    mixes_dtypes: bool = False
    """True if parameters of a unit may have several compute dtypes, which FSDP2 supports from torch 2.15 on."""


def plan_model(
    inventory: Inventory, precision: PrecisionConfig, resharding: Resharding, limits: UnitLimits | None = None
) -> ModelPlan:
    """Return the units of a model, and the dtypes of its buffers. Raises ConfigError as `check_rules` does, and for
    rules that cannot be in place although `precision.placement` requires it. Also raises ConfigError for tied
    parameters that would be in two units, and for experts that cannot be divided."""
    limits = limits or UnitLimits()
    check_experts(inventory, limits.expert_parallel)
    assignments = assign_rules(inventory, precision)
    check_rules(inventory, assignments)
    assignments = with_batch_norm_default(inventory, assignments)
    units, in_place = _UnitPlanner(inventory, precision, resharding, assignments, limits).units()
    _check_tied_parameters(inventory, (*units, *in_place), assignments)
    buffer_dtypes = {
        full_name(module.path, buffer.name): assignments.buffer_dtype(module) or buffer.dtype
        for module in inventory.distinct
        for buffer in module.buffers
        if buffer.is_floating
    }
    return ModelPlan(inventory, units, buffer_dtypes, in_place)


_Phase = int | None
"""Number of steps during which parameters are frozen. None: they are never trained."""


def _latest_first(phase: _Phase) -> float:
    return -math.inf if phase is None else -phase


def _kept(phases: Iterable[_Phase]) -> _Phase:
    """Return the latest phase of a unit's parameters. Parameters of this phase stay in the unit. None (never trained)
    is later than any number."""
    return min(phases, key=_latest_first, default=None)


@dataclass
class _UnitPlanner:
    """Builder of the units of one model. Drafts are the units before `_uniform` divides them."""

    inventory: Inventory
    precision: PrecisionConfig
    resharding: Resharding
    assignments: RuleAssignments
    limits: UnitLimits

    _own_because: dict[str, str] = field(default_factory=dict)
    """Reasons why rules are not carried out in place, by the name of the rule (`RuleAssignment.reason`)."""

    @cached_property
    def experts(self) -> list[str]:
        """Paths of the modules that expert parallelism divides. Each has its own unit, because FSDP2 shards the other
        parameters of its block over more ranks."""
        divided = self.inventory.distinct if self.limits.expert_parallel > 1 else ()
        return [module.path for module in divided if module.has_experts]

    def units(self) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
        """Return the units in wrapping order, and the entries for `ModelPlan.in_place`. Raises ConfigError for a rule
        that must be in place but cannot be."""
        drafts = self._drafts()
        while why := self._not_in_place(drafts):
            self._own_because |= why
            drafts = self._drafts()
        uniform, rules = self._uniform(drafts, self._in_place_units())
        units, in_place = with_parameters(self.inventory, in_wrapping_order(uniform), rules)
        before = self._before_gradients()
        return (
            tuple(self._finished(unit, self._governing(unit.modules[0]), before) for unit in units),
            tuple(self._finished(rule, self.assignments.governing(rule.modules[0]), ()) for rule in in_place),
        )

    def _drafts(self) -> list[Unit]:
        degree = self.limits.expert_parallel
        return [
            *self._rule_units(),
            *self._embedding_units(),
            *(replace(self._own_unit(path, "experts"), expert_parallel=degree) for path in self.experts),
            *(self._own_unit(path, "block") for path in self.inventory.blocks if path not in self.experts),
            *self._head_unit(),
            self._unit("(root)", [""], None, "root"),
        ]

    def _not_in_place(self, drafts: Sequence[Unit]) -> dict[str, str]:
        """Return, by rule, the reason why the rule cannot be in place. Only rules that are in place in `drafts` are
        checked. Raises ConfigError if `precision.placement` requires such a rule to be in place."""
        owners, parameters = unit_by_module(self.inventory, drafts), parameters_by_unit(self.inventory, drafts)
        around: list[set[_Phase]] = [set() for _ in drafts]
        for (index, _), phase in self._kept_phases(drafts, [*drafts, *self._in_place_units()]).items():
            around[index].add(phase)
        found: dict[str, str] = {}
        for (reason, policy), (assignment, paths) in self._rule_groups.items():
            if reason in self._own_because or reason in found:
                continue
            why = self._why_own_unit(assignment.rule)
            for path in paths if why is None else ():
                unit = drafts[owners[path]]
                others = sum(p.numel for p in parameters[owners[path]]) - self._numel_within[path]
                why = why or self._why_not_inside(path, policy, assignment, unit, others)
                for phase in around[owners[path]]:
                    why = why or self._why_not_together(_kept(self._phases_within[path]), phase, unit)
                why = why or self._why_not_shared(path, owners)
            if why is not None:
                found[reason] = why
                if self.precision.placement == "in_place":
                    key = ("precision", "placement")
                    raise config_error(key, f'{reason} cannot be in place: {why}; set "auto" instead', "in_place")
        return found

    @property
    def _why_nothing_in_place(self) -> str | None:
        """The reason why no rule may be in place; None if rules may be in place."""
        if self.precision.placement == "own_unit":
            return 'precision.placement = "own_unit"'
        if not self.limits.mixes_dtypes:
            return f"torch {planned_release()} allows one compute dtype per FSDP2 unit; torch 2.15 allows several"
        return None

    def _why_own_unit(self, rule: PrecisionRule) -> str | None:
        """Return the reason why a rule needs units of its own, wherever its modules are; None if there is none."""
        if self._why_nothing_in_place:
            return self._why_nothing_in_place
        if rule.unit_per != "model":
            return f'unit_per = "{rule.unit_per}"'
        if rule.reshard_after_forward is not None:
            return f"reshard_after_forward = {str(rule.reshard_after_forward).lower()}"
        return None

    def _why_not_inside(
        self, path: str, policy: Policy, assignment: RuleAssignment, unit: Unit, others: int
    ) -> str | None:
        """Return the reason why a module cannot be inside of `unit`; None if it can. `policy`, `assignment`: policy and
        assignment of the module's rule. `others`: number of elements of the other parameters in the unit."""
        phases = self._phases_within[path]
        stored = {self.assignments.storage_dtype(assignment, is_frozen=phase is None) for phase in phases}
        if unit.is_divided:
            return f"expert parallelism divides {unit.name}"
        if not others and unit.modules == ("",):
            return f"the root unit would have no parameters beside those of {path}"
        # FSDP2 requires one storage dtype and one reduce dtype for all trained parameters of a unit.
        trained = self.assignments.storage_dtype(assignment)
        if phases != {None} and trained != unit.storage_dtype:
            return f"{path} is stored in {trained}, and {unit.name} in {unit.storage_dtype}"
        if policy.reduce_dtype != unit.policy.reduce_dtype:
            return f"{path} reduces gradients in {policy.reduce_dtype}, and {unit.name} in {unit.policy.reduce_dtype}"
        if any((policy.param_dtype or dtype) not in (dtype, unit.policy.param_dtype) for dtype in stored):
            own = f"{path} computes in {policy.param_dtype}"
            return f"{own}, which is neither its storage dtype nor the compute dtype of {unit.name}"
        return None

    def _why_not_together(self, one: _Phase, other: _Phase, unit: Unit) -> str | None:
        """Return the reason why parameters of two phases cannot both be in `unit`; None if they can."""
        if one == other:
            return None
        if {one, other} != {None, 0}:
            return "the other parameters of the enclosing unit are not trained in the same steps"
        if self._why_nothing_in_place is None and not unit.unshard_in_backward:
            return f"backward does not all-gather the parameters of {unit.name}"
        return self._why_nothing_in_place

    def _why_not_shared(self, path: str, owners: Mapping[str, int]) -> str | None:
        """Return a reason why a module cannot be inside of its unit: the module, or one inside it, shares a parameter
        with a module of a different unit. Return None otherwise. `owners`: result of `unit_by_module`."""
        for one, other in self._sharing:
            if owners[one] != owners[other] and (is_within(one, path) or is_within(other, path)):
                return f"{one} and {other} share parameters"
        return None

    @cached_property
    def _sharing(self) -> list[tuple[str, str]]:
        """Pairs of paths: two modules that share a parameter."""
        pairs = []
        for module in self.inventory.modules:
            pairs += [(parent(p.tied_to), module.path) for p in module.parameters if p.tied_to is not None]
            if module.same_as is not None and self._numel_within[module.same_as]:
                pairs.append((module.same_as, module.path))
        return pairs

    def _in_place_units(self) -> list[Unit]:
        """Return an entry of `ModelPlan.in_place` for each rule in place, before `_uniform` divides it."""
        return [
            replace(self._ruled_unit(paths, assignment, policy), reshard_after_forward=None)
            for (reason, policy), (assignment, paths) in self._rule_groups.items()
            if reason not in self._own_because
        ]

    def _governing(self, path: str) -> RuleAssignment | None:
        """Return the assignment that sets the policy of a module's unit: the assignment of the module itself, or of the
        nearest enclosing module that has one. Rules in place are skipped, except those of blocks and of divided
        experts. None: no rule sets the policy."""
        while path:
            assignment = self.assignments.own.get(path)
            if assignment is not None and (assignment.reason in self._own_because or self._has_own_unit(path)):
                return assignment
            path = parent(path)
        return None

    def _has_own_unit(self, path: str) -> bool:
        return path in self.inventory.blocks or path in self.experts

    def _finished(self, unit: Unit, assignment: RuleAssignment | None, before: Sequence[str]) -> Unit:
        """Return a unit with its final `storage_dtype` and `unshard_in_backward`. `assignment`: the rule that sets the
        unit's policy, or None. `before`: result of `_before_gradients`, or () for an entry of a rule in place."""
        has_no_backward = unit.reshard_after_forward and all(enclosing(path, before) for path in unit.modules)
        is_frozen = unit.num_parameters > 0 and not unit.is_trained
        return replace(
            unit,
            storage_dtype=self.assignments.storage_dtype(assignment, is_frozen) if is_frozen else unit.storage_dtype,
            unshard_in_backward=unit.unshard_in_backward and not has_no_backward,
        )

    def _before_gradients(self) -> tuple[str, ...]:
        """Return the embeddings and the blocks that run before all trained parameters. These modules have no backward,
        but FSDP2 would still prefetch their parameters in backward.

        The result is empty if the order of modules is unknown, or if parameters outside of the blocks and the head are
        trained. The result is also empty with pipeline parallelism, where the inputs of later stages take gradients.
        """
        blocks, head = self.inventory.blocks, self.inventory.head
        trained = [m.path for m in self.inventory.modules if any(p.requires_grad for p in m.parameters)]
        if self.limits.is_pipelined or not head or not all(enclosing(path, (*blocks, *head)) for path in trained):
            return ()
        reached = {enclosing(path, blocks) for path in trained}
        num_before = next((index for index, block in enumerate(blocks) if block in reached), len(blocks))
        return (*self.inventory.embeddings, *blocks[:num_before])

    def _uniform(self, drafts: Sequence[Unit], rules: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
        """Divide the drafts, and the entries of rules in place (`rules`), by the phase of their parameters, because
        FSDP2 all-gathers, reshards and reduces a unit as a whole. Return the units, and the entries in place.

        A module whose phase differs from that of its unit moves to another unit, or stays and gets an entry in place.
        Modules that move out of units with equal settings share a unit, like the modules of one rule (see `_parts`).
        A module stays without an entry if parameters inside of it have several phases.
        """
        boundaries, shards = [*drafts, *rules], unit_by_module(self.inventory, drafts)
        kept_in = self._kept_phases(drafts, boundaries)
        groups: dict[tuple[Policy, str, int, str, _Phase, str | None], tuple[Unit, list[str]]] = {}
        units: list[Unit] = []
        in_place: list[Unit] = []
        for index, (unit, own) in enumerate(zip(boundaries, self._modules_by_unit(boundaries), strict=True)):
            is_rule, kept = index >= len(drafts), _kept(own.values())
            moved = {
                path: self._why_not_together(phase, kept_in[shards[path], index], drafts[shards[path]])
                for path, phase in own.items()
                if phase != kept and self._can_be_taken(path, own, unit)
            }
            for path, why in moved.items():
                policy = unit.policy
                if path not in unit.modules:  # FSDP2 cast nothing at this module when it was inside of the unit
                    policy = replace(policy, output_dtype=None, cast_forward_inputs=False)
                assignment = self.assignments.governing(path)
                rule = "" if assignment is None else assignment.reason
                key = policy, unit.storage_dtype, unit.expert_parallel, rule, own[path], why
                groups.setdefault(key, (replace(unit, policy=policy), []))[1].append(path)
            gone = {path for path, why in moved.items() if is_rule or why is not None}
            modules = tuple(path for path in unit.modules if path not in gone)
            is_sum = unit.name == " + ".join(unit.modules)
            if modules:
                left = replace(unit, modules=modules, name=" + ".join(modules) if is_sum else unit.name)
                (in_place if is_rule else units).append(left)
        for (*_, phase, why), (like, paths) in groups.items():
            (in_place if why is None else units).extend(self._taken_units(phase, like, paths, why))
        return units, in_place

    def _taken_units(self, phase: _Phase, like: Unit, paths: list[str], own_because: str | None) -> Iterator[Unit]:
        """Yield the units of the modules `paths`, which `_uniform` takes out of other units. `like`: a unit with the
        settings of the new units. `own_because`: the reason for units of their own. None: the modules are in place, and
        share one entry."""
        what = "trained" if not phase else f"trained after step {phase}"
        assignment = self.assignments.governing(paths[0])
        reason = what if assignment is None else f"{what}, {assignment.reason}"
        unit_per = "model" if assignment is None else assignment.rule.unit_per
        modules = list(outermost(paths))
        for part in [modules] if own_because is None else self._parts(modules, unit_per):
            reshard = self._reshard_together(part) if assignment is None else self._reshard(part, assignment)
            yield replace(
                like,
                name=part[0] if len(part) == 1 else reason,
                modules=tuple(part),
                reshard_after_forward=None if own_because is None else reshard,
                unshard_in_backward=True,  # even in an embedding, the backward of an adapter reads its parameters
                reason=reason,
                own_because=own_because or "",
            )

    @cached_property
    def _phases(self) -> dict[str, _Phase]:
        """The phase of each module with parameters, by path. If the parameters of a module have several phases, this is
        the phase whose training begins first."""
        return {
            module.path: max([p.trained_from if p.requires_grad else None for p in own], key=_latest_first)
            for module in self.inventory.distinct
            if (own := module.parameters)
        }

    @cached_property
    def _phases_within(self) -> Mapping[str, set[_Phase]]:
        """The phases of each module, including those of the modules inside it, by path."""
        found: defaultdict[str, set[_Phase]] = defaultdict(set)
        for path, phase in self._phases.items():
            for around in outward(path):
                found[around].add(phase)
        return found

    def _kept_phases(self, drafts: Sequence[Unit], boundaries: Sequence[Unit]) -> dict[tuple[int, int], _Phase]:
        """Return the phase that stays (`_kept`), by pair of units: (index in `drafts`, index in `boundaries`). Each
        pair has common modules: the first unit shards these modules, and the policy of the second unit applies to
        them."""
        shards, policies = unit_by_module(self.inventory, drafts), unit_by_module(self.inventory, boundaries)
        found: dict[tuple[int, int], list[_Phase]] = {}
        for path, phase in self._phases.items():
            found.setdefault((shards[path], policies[path]), []).append(phase)
        return {key: _kept(phases) for key, phases in found.items()}

    def _modules_by_unit(self, units: Sequence[Unit]) -> list[dict[str, _Phase]]:
        """Return for each unit a dict of its modules that own parameters: path -> phase."""
        owners = unit_by_module(self.inventory, units)
        found: list[dict[str, _Phase]] = [{} for _ in units]
        for path, phase in self._phases.items():
            found[owners[path]][path] = phase
        return found

    def _can_be_taken(self, path: str, own: Mapping[str, _Phase], unit: Unit) -> bool:
        """Return True if a module can be taken out of a unit, with all modules inside of it: `fully_shard` can wrap the
        module, and all its parameters in this unit have one phase. In a unit of divided experts, the module must also
        be an adapter. `own`: the unit's dict of `_modules_by_unit`."""
        module = self.inventory.by_path[path]
        if not path or not module.has_forward or (unit.is_divided and not module.is_adapter):
            return False
        return all(phase == own[path] for inner, phase in own.items() if is_within(inner, path))

    def _unit(self, name: str, modules: Sequence[str], reshard: bool | None, reason: str) -> Unit:
        """Return a unit to which no precision rule applies."""
        policy = Policy(self.precision.param_dtype, self.precision.reduce_dtype)
        return Unit(name, tuple(modules), policy, reshard, self.precision.storage_dtype, reason)

    def _ruled_unit(self, modules: Sequence[str], assignment: RuleAssignment, policy: Policy) -> Unit:
        reshard, storage = self._reshard(modules, assignment), self.assignments.storage_dtype(assignment)
        name, reason = modules[0] if len(modules) == 1 else assignment.reason, assignment.reason
        why = self._own_because.get(reason, "")
        return Unit(name, tuple(modules), policy, reshard, storage, reason, assignment.key, own_because=why)

    def _rule_units(self) -> list[Unit]:
        """Return the units of rules that are not in place, without blocks and divided experts. Modules with the same
        rule and policy share a unit (see `_parts`)."""
        return [
            self._ruled_unit(part, assignment, policy)
            for (reason, policy), (assignment, paths) in self._rule_groups.items()
            if reason in self._own_because
            for part in self._parts(paths, assignment.rule.unit_per)
        ]

    @cached_property
    def _rule_groups(self) -> dict[tuple[str, Policy], tuple[RuleAssignment, list[str]]]:
        """The modules that rules match, by rule and policy, each entry with the rule's assignment. Blocks, divided
        experts, and modules that need no unit (`_needs_unit`) are not included."""
        groups: dict[tuple[str, Policy], tuple[RuleAssignment, list[str]]] = {}
        for path, assignment in self.assignments.own.items():
            if not self._has_own_unit(path) and self._needs_unit(path, assignment):
                policy = self._policy(path, assignment)
                groups.setdefault((assignment.reason, policy), (assignment, []))[1].append(path)
        return groups

    def _parts(self, paths: list[str], unit_per: str) -> list[list[str]]:
        """Divide the modules `paths` into units. `unit_per`: value of this key in the modules' rule.

        A unit all-gathers all its parameters at once. So a unit that is larger than the largest block, and larger than
        `_SMALL_UNIT`, is divided into one unit per block.
        """
        if unit_per == "module" or not self.limits.share_units:
            return [[path] for path in paths]
        largest_block = max((self._numel_within[path] for path in self.inventory.blocks), default=math.inf)
        if unit_per == "model" and sum(self._numel_within[path] for path in paths) <= max(largest_block, _SMALL_UNIT):
            return [paths]
        parts: dict[str, list[str]] = {}
        for path in paths:
            parts.setdefault(self._block_around(path), []).append(path)
        return list(parts.values())

    def _block_around(self, path: str) -> str:
        """Return the path of the block that contains a module or is the module; empty outside of all blocks."""
        return next((block for block in self.inventory.blocks if is_within(path, block)), "")

    @cached_property
    def _numel_within(self) -> Counter[str]:
        """Number of parameter elements of each module, including those of the modules inside it, by path."""
        numel: Counter[str] = Counter()
        for module in self.inventory.modules:
            own = sum(p.numel for p in module.parameters)
            for path in outward(module.path):
                numel[path] += own
        return numel

    def _needs_unit(self, path: str, assignment: RuleAssignment) -> bool:
        """Return False if the same rule covers an enclosing module, or if the module contains no parameters."""
        covered = self.assignments.governing(parent(path)) is assignment
        return not covered and self._numel_within[path] > 0

    def _embedding_units(self) -> list[Unit]:
        """Return a unit for each embedding that is not tied, not inside a block, and has no unit of a rule. Backward
        does not read its weight. So a unit that reshards after forward needs no second all-gather."""
        reshard = self.resharding.blocks
        return [
            replace(self._unit(path, [path], reshard, "embedding"), unshard_in_backward=not reshard)
            for path in self.inventory.embeddings
            if self._governing(path) is None
            and not self._is_shared(path)
            and not enclosing(path, self.inventory.blocks)
        ]

    def _is_shared(self, path: str) -> bool:
        module = self.inventory.by_path[path]
        names = {full_name(path, parameter.name) for parameter in module.parameters}
        tied = {parameter.tied_to for other in self.inventory.modules for parameter in other.parameters}
        return bool(names & tied) or self._is_tied([path])

    def _own_unit(self, path: str, reason: str) -> Unit:
        """Return a unit of one module, with the policy of the rule that governs the module. `reason`: the reason for
        the unit if no rule governs it."""
        assignment = self._governing(path)
        if assignment is None:
            return self._unit(path, [path], self._reshard_near([path]), reason)
        return self._ruled_unit([path], assignment, self._policy(path, assignment))

    def _head_unit(self) -> list[Unit]:
        """Return a unit of the modules that run last, without blocks and modules with the unit of a rule. Backward can
        then reduce the gradients of these modules early.

        The list is empty if the output layer is not among these modules, or if it shares its weight with the embedding.
        FSDP2 requires tied parameters in one unit, and the root unit then has both modules.
        """
        ruled = [path for path in self.inventory.head if self._governing(path) is not None]
        free = [path for path in self.inventory.head if path not in (*ruled, *self.inventory.blocks)]
        if not free or free[-1] != self.inventory.head[-1] or self._is_tied(free):
            return []
        return [self._unit(" + ".join(free), free, self.resharding.late, "head")]

    def _is_tied(self, paths: Sequence[str]) -> bool:
        return any(p.tied_to for path in paths for p in self.inventory.by_path[path].parameters)

    def _reshard(self, modules: Sequence[str], assignment: RuleAssignment) -> bool:
        if assignment.rule.reshard_after_forward is not None:
            return assignment.rule.reshard_after_forward
        return self._reshard_together(modules)

    def _reshard_together(self, modules: Sequence[str]) -> bool:
        """Return True if a unit without a setting of its own reshards after forward. A unit of modules of several
        blocks, or of several modules outside of blocks, has the setting `Resharding.late`. The parameters of such a
        unit are unsharded during most of forward anyway, and backward needs them first."""
        is_in_one_block = len({self._block_around(path) for path in modules} - {""}) == 1
        if len(modules) > 1 and not is_in_one_block:
            return self.resharding.late
        return self._reshard_near(modules)

    def _reshard_near(self, modules: Sequence[str]) -> bool:
        """Return True if a unit reshards after forward. `modules`: modules of one block, or a single module outside of
        blocks. A unit with modules of the last block or the head has the setting `Resharding.late`, because its
        backward follows soon after its forward. Other units have the setting `Resharding.blocks`."""
        is_late = any(is_within(path, last) for path in modules for last in self._last)
        return self.resharding.late if is_late else self.resharding.blocks

    @cached_property
    def _last(self) -> tuple[str, ...]:
        """The modules that run last: the last block, and the head."""
        return (*self.inventory.head, *outermost(self.inventory.blocks)[-1:])

    def _policy(self, path: str, assignment: RuleAssignment) -> Policy:
        rule = assignment.rule
        return Policy(
            param_dtype=rule.param_dtype,
            reduce_dtype=rule.reduce_dtype or self.precision.reduce_dtype,
            # `output_dtype` of a rule applies to the modules that the rule matches, not to blocks inside them.
            output_dtype=(rule.output_dtype if path in self.assignments.own else None) or self._consumer_dtype(path),
            cast_forward_inputs=rule.cast_forward_inputs,
        )

    def _consumer_dtype(self, path: str) -> str | None:
        """Return the dtype to which a module's output is cast: the compute dtype of its parent. None: no cast.

        FSDP2 casts inputs only at unit boundaries. Without this cast, an fp32 norm would pass fp32 to a bf16
        `nn.Linear`, which fails. The output of the model is not cast: the loss takes any dtype, and a cast would
        round the result of an fp32 head.
        """
        if self.inventory.head and path == self.inventory.head[-1]:
            return None
        return self.assignments.compute_dtype(parent(path))


def _check_tied_parameters(inventory: Inventory, units: Sequence[Unit], assignments: RuleAssignments) -> None:
    """Raise ConfigError for tied parameters in two units. FSDP2's own error occurs in the first forward, and names no
    module."""
    owners = unit_by_module(inventory, units)
    problems = []
    for module in inventory.modules:
        for parameter in module.parameters:
            first = parent(parameter.tied_to or "")
            if parameter.tied_to is None or owners[first] == owners[module.path]:
                continue
            assignment = assignments.governing(module.path) or assignments.governing(first)
            reason = f"{module.path} and {first} share a parameter (tied), which FSDP2 requires in one unit"
            key = ("model", "blocks") if assignment is None else assignment.key or ("precision",)
            problems.append(Problem(key, f"{reason}: {_tied_remedy(module, first, assignments)}"))
    if problems:
        raise ConfigError(problems)


def _tied_remedy(module: ModuleInfo, first: str, assignments: RuleAssignments) -> str:
    """Return the remedy that brings two modules with a shared parameter into one unit."""
    own, other = assignments.governing(module.path), assignments.governing(first)
    if own is not other:
        return f'write one precision rule for both: match = ["{first}", "{module.path}"]'
    if own is not None:
        return "set output_dtype in the rule that covers both modules"
    if module.same_as is None:
        return "set model.blocks so that one block holds both"
    return f'give the shared module a precision rule: match = "{module.same_as}"'
