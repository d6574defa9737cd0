"""Precision rules become FSDP2 units: which modules are gathered, computed and reduced together, and in which order
they are wrapped. No torch: the trainer and the planner read the same table.

FSDP2 applies one policy to one `fully_shard` call, and casts inputs and outputs at the boundaries of the modules given
to it. So a module with a policy of its own needs a unit of its own, wrapped before its parent. The modules under one
rule share **one** unit for the whole model: 3 more collectives per microbatch, where one unit per module would take 3
each, and the blocks' own all-gathers still start as early as without the rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from titan_launch.config.precision import PrecisionConfig, PrecisionRule
from titan_launch.errors import ConfigError, KeyPath, Problem, did_you_mean
from titan_launch.globs import matches
from titan_launch.plan.types import Inventory, ModuleInfo, Policy, TensorInfo, Unit, is_within

BATCH_NORM_DEFAULT = "BatchNorm default"
"""What the unit table gives as the reason of a BatchNorm unit that no rule asked for."""

_BATCH_NORM = "torch.nn.modules.batchnorm._BatchNorm"
_REDUCED = {"bfloat16"}


@dataclass(frozen=True)
class Claim:
    """A rule, and what it is called in the unit table."""

    rule: PrecisionRule
    reason: str
    key: KeyPath


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
        claim = _governing(module.path, claims)
        if claim is not None and claim.rule.buffer_dtype is not None:
            for buffer in _floating(module.buffers):
                dtypes[f"{module.path}.{buffer.name}"] = claim.rule.buffer_dtype
    return dtypes


def claim_modules(inventory: Inventory, precision: PrecisionConfig) -> dict[str, Claim]:
    """Who is under which rule, by module path: the first rule that matches wins.

    A BatchNorm that would compute in a reduced dtype and that no rule mentions is put under a default rule: its
    parameters stay as stored, its input is taken as it comes (the kernels take bf16 input with fp32 parameters and
    statistics), so that the running statistics stay fp32.
    """
    candidates = [m for m in inventory.modules if m.path and m.has_forward]
    claims: dict[str, Claim] = {}
    for index, rule in enumerate(precision.rules):
        claim = Claim(rule, f"precision.rules.{index}", ("precision", "rules", index))
        for module in candidates:
            if rule_matches(rule, module):
                claims.setdefault(module.path, claim)
    problems = list(_unused_rules(inventory, precision.rules, candidates, claims))
    if problems:
        raise ConfigError(problems)
    for module in candidates:
        if _BATCH_NORM in module.classes and _is_reduced(_governing(module.path, claims), precision):
            claims[module.path] = Claim(PrecisionRule(type="BatchNorm"), BATCH_NORM_DEFAULT, ("precision",))
    return claims


def rule_matches(rule: PrecisionRule, module: ModuleInfo) -> bool:
    """Whether a module is what a rule describes, by class and by path; a part that is not given matches all."""
    if rule.type is not None and not any(_is_class(rule.type, name) for name in module.classes):
        return False
    return rule.match is None or matches(rule.match, module.path)


def _is_class(wanted: str, full_name: str) -> bool:
    if "." in wanted:
        return wanted == full_name
    return wanted.lstrip("_") == full_name.rpartition(".")[2].lstrip("_")


def _is_reduced(claim: Claim | None, precision: PrecisionConfig) -> bool:
    return (claim is None and precision.param_dtype in _REDUCED) or (
        claim is not None and (claim.rule.param_dtype in _REDUCED)
    )


def _governing(path: str, claims: Mapping[str, Claim]) -> Claim | None:
    """The claim of a module, or of the nearest module around it that has one."""
    while path:
        if path in claims:
            return claims[path]
        path = path.rpartition(".")[0]
    return None


def _unused_rules(
    inventory: Inventory, rules: Sequence[PrecisionRule], candidates: Sequence[ModuleInfo], claims: Mapping[str, Claim]
) -> Iterator[Problem]:
    used = {claim.key for claim in claims.values()}
    for index, rule in enumerate(rules):
        matched = [m for m in candidates if rule_matches(rule, m)]
        key: KeyPath = ("precision", "rules", index)
        if not matched:
            yield _nothing_matched(inventory, key, rule, candidates)
        elif key not in used:
            others = sorted({claims[m.path].reason for m in matched})
            yield _rule_problem(key, rule, f"every module it matches is already under {', '.join(others)}")
        elif not any(_has_tensors(inventory, m.path) for m in matched):
            yield _rule_problem(
                key, rule, f"{_listed([m.path for m in matched])}: no parameters or buffers to apply it to"
            )


def _nothing_matched(
    inventory: Inventory, key: KeyPath, rule: PrecisionRule, candidates: Sequence[ModuleInfo]
) -> Problem:
    containers = [m.path for m in inventory.modules if m.path and not m.has_forward and rule_matches(rule, m)]
    if containers:
        return _rule_problem(
            key,
            rule,
            f'matches only {_listed(containers)}, a container without a forward; did you mean "{containers[0]}.*"?',
        )
    if rule.match is None:
        assert rule.type is not None
        names = {name.rpartition(".")[2] for m in candidates for name in m.classes}
        return Problem(
            (*key, "type"), f"no module of the model is of this class{did_you_mean(rule.type, names)}", rule.type
        )
    reason = "matches no module of the model" if rule.type is None else f"matches no module of class {rule.type}"
    return Problem((*key, "match"), reason + did_you_mean(rule.match, [m.path for m in candidates]), rule.match)


def _rule_problem(key: KeyPath, rule: PrecisionRule, reason: str) -> Problem:
    field = "match" if rule.match is not None else "type"
    return Problem((*key, field), reason, getattr(rule, field))


def _listed(paths: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"


def _has_tensors(inventory: Inventory, path: str) -> bool:
    return any(is_within(m.path, path) and (m.parameters or m.buffers) for m in inventory.modules)


def _floating(tensors: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    return (tensor for tensor in tensors if tensor.is_floating)


class _UnitPlanner:
    """Builds the units of one model; the units are not in order yet."""

    def __init__(
        self, inventory: Inventory, precision: PrecisionConfig, resharding: Resharding, claims: Mapping[str, Claim]
    ):
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
        """One unit for all modules with the same rule and the same policy; the blocks are not among them."""
        groups: dict[tuple[str, Policy, bool], list[str]] = {}
        for path, claim in self.claims.items():
            if path in self.inventory.blocks or not self._needs_unit(path, claim):
                continue
            reshard = self._reshard(claim)
            groups.setdefault((claim.reason, self._policy(path, claim), reshard), []).append(path)
        return [
            self._unit(reason if len(paths) > 1 else paths[0], paths, policy, reshard, reason)
            for (reason, policy, reshard), paths in groups.items()
        ]

    def _needs_unit(self, path: str, claim: Claim) -> bool:
        """Not a module that the same rule already covers from further out, nor one that holds nothing."""
        covered = _governing(path.rpartition(".")[0], self.claims) is claim
        return not covered and _has_tensors(self.inventory, path)

    def _block_units(self) -> list[Unit]:
        units = []
        for path in self.inventory.blocks:
            claim = _governing(path, self.claims)
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
        free = [path for path in self.inventory.head if _governing(path, self.claims) is None]
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
            output_dtype=rule.output_dtype or self._consumer_dtype(path),
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
        around = _governing(path.rpartition(".")[0], self.claims)
        if around is None:
            return self.precision.param_dtype
        return around.rule.param_dtype or self.precision.storage_dtype


def unit_by_module(inventory: Inventory, units: Sequence[Unit]) -> dict[str, int]:
    """The index of the unit that holds the parameters each module owns: that of the nearest module around it."""
    members = {path: index for index, unit in enumerate(units) for path in unit.modules}
    owners: dict[str, int] = {}
    for module in inventory.modules:  # parents come first
        inherited = owners.get(module.path.rpartition(".")[0], members[""])
        owners[module.path] = members.get(module.path, inherited)
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


def _check_tied_parameters(inventory: Inventory, units: Sequence[Unit], claims: Mapping[str, Claim]) -> None:
    """FSDP2 refuses a parameter in two units, at the first forward and without names; say it here, with names."""
    owners = unit_by_module(inventory, units)
    problems = []
    for module in inventory.modules:
        for parameter in module.parameters:
            first = (parameter.tied_to or "").rpartition(".")[0]
            if parameter.tied_to is None or owners[first] == owners[module.path]:
                continue
            claim = _governing(module.path, claims) or _governing(first, claims)
            reason = f"{module.path} and {first} share a parameter (tied), so one rule must match both or neither"
            problems.append(Problem(claim.key if claim else ("model", "blocks"), reason))
    if problems:
        raise ConfigError(problems)
