"""The precision rule of each module, the checks of these rules, and the modules that a list of globs matches. This
module does not import torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.core.errors import ConfigError, KeyPath, Problem, did_you_mean, listed
from titan_launch.core.globs import alike, matches
from titan_launch.core.terminal import short_name
from titan_launch.models.decoder.huggingface_tensors import ends_in
from titan_launch.plan.types import (
    EXPERTS,
    LORA,
    MIXTURE_OF_EXPERTS,
    Inventory,
    ModuleInfo,
    enclosing,
    is_within,
    outward,
    parent,
)

BATCH_NORM_DEFAULT = "BatchNorm default"
"""Reason in the unit table for a BatchNorm unit without a precision rule."""

_BATCH_NORM = "torch.nn.modules.batchnorm._BatchNorm"

_MATMULS = {"torch.nn.modules.linear.Linear", "torch.nn.modules.conv._ConvNd", EXPERTS, LORA}
"""Classes of the modules that compute matrix products."""


@dataclass(frozen=True)
class RuleAssignment:
    """A precision rule, with its name in the unit table."""

    rule: PrecisionRule
    reason: str
    """Name of the rule: `precision.rules.0`, or `BATCH_NORM_DEFAULT`."""

    key: KeyPath | None
    """Key of the rule in the job file; None for a default."""


@dataclass(frozen=True)
class RuleAssignments:
    """The precision rule of each module. A rule covers the modules that it matches. A module that no rule matches is
    covered by the rule of the nearest enclosing module that a rule matches."""

    own: Mapping[str, RuleAssignment]
    """Assignment of each module that a rule matches directly, by path. For each rule, parents come before children."""

    precision: PrecisionConfig
    frozen: Collection[str] = ()
    """Paths of the modules whose own parameters are never trained. A module without parameters of its own is listed if
    it contains parameters that are never trained, and no others."""

    def governing(self, path: str) -> RuleAssignment | None:
        """Return the assignment of a module, or of the nearest enclosing module that has one; None if there is none."""
        return self.own.get(enclosing(path, self.own))

    def compute_dtype(self, path: str) -> str:
        """Return the dtype that a module computes in."""
        assignment = self.governing(path)
        if assignment is None:
            return self.precision.param_dtype
        return assignment.rule.param_dtype or self.storage_dtype(assignment, path in self.frozen)

    def storage_dtype(self, assignment: RuleAssignment | None, is_frozen: bool = False) -> str:
        """Return the storage dtype of parameters. `assignment`: the rule that covers the parameters; None if no rule
        covers them. `is_frozen`: True if the parameters are never trained."""
        own = None if assignment is None else assignment.rule.storage_dtype
        frozen = self.precision.frozen_storage_dtype if is_frozen else None
        return own or frozen or self.precision.storage_dtype

    def buffer_dtype(self, module: ModuleInfo) -> str | None:
        """Return the dtype that `[precision]` sets for a module's floating buffers; None if the buffers keep their
        dtypes."""
        # Running statistics are moving averages: in bf16 an update of 0.1 % is rounded away. So only a rule that
        # matches the BatchNorm itself sets their dtype. Buffers of a mixture of experts keep float32: selection biases
        # move by small steps, and loads are counts.
        assignment = self.of_buffers(module)
        own = None if assignment is None else assignment.rule.buffer_dtype
        follows_no_default = is_batch_norm(module) or is_mixture_of_experts(module)
        return own or (None if follows_no_default else self.precision.buffer_dtype)

    def of_buffers(self, module: ModuleInfo) -> RuleAssignment | None:
        """Return the assignment whose `buffer_dtype`, if it is set, applies to a module's floating buffers. Return None
        if there is no such assignment."""
        if module.same_as is not None or not any(buffer.is_floating for buffer in module.buffers):
            return None
        if is_mixture_of_experts(module):
            return None
        return self.own.get(module.path) if is_batch_norm(module) else self.governing(module.path)

    def around(self, path: str) -> str:
        """Return the dtype of a module's inputs if its precision rule does not cast inputs: the compute dtype of the
        parent of the nearest match. The nearest match is the module itself or the nearest module around it that has a
        rule."""
        return self.compute_dtype(parent(enclosing(path, self.own)))


def is_batch_norm(module: ModuleInfo) -> bool:
    """Return True if a module is a BatchNorm of any number of dimensions, or a subclass of one."""
    return _BATCH_NORM in module.classes


def is_mixture_of_experts(module: ModuleInfo) -> bool:
    """Return True if a module is of this package's class `MixtureOfExperts`, or of a subclass."""
    return MIXTURE_OF_EXPERTS in module.classes


def assign_rules(inventory: Inventory, precision: PrecisionConfig) -> RuleAssignments:
    """Return the assignments of `[precision]`. The first rule that matches a module is assigned to it."""
    own: dict[str, RuleAssignment] = {}
    for assignment in _candidate_assignments(precision):
        for module in _assignable_modules(inventory):
            if _rule_matches(assignment.rule, module):
                own.setdefault(module.path, assignment)
    return RuleAssignments(own, precision, _frozen_modules(inventory))


def _frozen_modules(inventory: Inventory) -> frozenset[str]:
    """Return the paths for `RuleAssignments.frozen`."""
    own = {module.path for module in inventory.modules if module.is_frozen}
    trained = {module.path for module in inventory.modules if module.parameters and not module.is_frozen}
    around_frozen, around_trained = ({around for path in paths for around in outward(path)} for paths in (own, trained))
    return frozenset(own | (around_frozen - around_trained))


def _candidate_assignments(precision: PrecisionConfig) -> Iterator[RuleAssignment]:
    """Yield the rules of the job file, in order."""
    for index, rule in enumerate(precision.rules):
        yield RuleAssignment(rule, f"precision.rules.{index}", ("precision", "rules", index))


def _assignable_modules(inventory: Inventory) -> list[ModuleInfo]:
    """Return the modules that a rule can match, each once: those with a forward, except the root."""
    return [m for m in inventory.distinct if m.path and m.has_forward]


def with_batch_norm_default(inventory: Inventory, assignments: RuleAssignments) -> RuleAssignments:
    """Return the assignments with a default rule for every BatchNorm that no rule matches directly and that would
    compute in bfloat16.

    With the default, a BatchNorm computes with float32 parameters, its running statistics keep their dtype, and its
    inputs are not cast. BatchNorm kernels allow inputs in another dtype.
    """
    rule, precision = PrecisionRule(type="BatchNorm"), assignments.precision
    if "bfloat16" in (precision.storage_dtype, precision.frozen_storage_dtype):
        rule = PrecisionRule(type="BatchNorm", param_dtype="float32", cast_forward_inputs=False)
    default = RuleAssignment(rule, BATCH_NORM_DEFAULT, None)
    unruled = [m.path for m in _assignable_modules(inventory) if is_batch_norm(m) and m.path not in assignments.own]
    defaults = {path: default for path in unruled if assignments.compute_dtype(path) == "bfloat16"}
    return replace(assignments, own={**assignments.own, **defaults})


def _rule_matches(rule: PrecisionRule, module: ModuleInfo) -> bool:
    """Return True if a rule matches a module, by class and by path. An unset `type` or `match` matches every module."""
    if rule.type is not None and not any(_is_class(rule.type, name) for name in module.classes):
        return False
    return rule.match is None or any(matches(pattern, module.path) for pattern in _rule_patterns(rule))


def _rule_patterns(rule: PrecisionRule) -> tuple[str, ...]:
    """Return the globs of a rule; an empty tuple if the rule matches by class only."""
    return (rule.match,) if isinstance(rule.match, str) else rule.match or ()


def _is_class(wanted: str, name: str) -> bool:
    if "." in wanted:
        public = re.sub(r"^torch\.nn\.modules\.\w+\.", "torch.nn.", name)
        return wanted in (name, public)
    return wanted.lstrip("_") == name.rpartition(".")[2].lstrip("_")


def matched_modules(inventory: Inventory, patterns: Sequence[str], key: KeyPath) -> tuple[str, ...]:
    """Return the paths of the modules that any of the globs `patterns` matches, in the order of the inventory. Modules
    without a forward do not match. If a module has several parents, a glob may match any of its paths, and its first
    path is returned.

    Raises ConfigError with a problem for every glob that matches nothing. `key`: key of the list of globs.
    """
    containers = [module.path for module in inventory.modules if module.path and not module.has_forward]
    runnable = {m.path: m.same_as or m.path for m in inventory.modules if m.path and m.has_forward}
    problems = [
        Problem((*key, index), nothing_matched(pattern, list(runnable), containers), pattern)
        for index, pattern in enumerate(patterns)
        if not any(matches(pattern, path) for path in runnable)
    ]
    if problems:
        raise ConfigError(problems)
    matched = {first for path, first in runnable.items() if any(matches(pattern, path) for pattern in patterns)}
    return tuple(module.path for module in inventory.modules if module.path in matched)


def nothing_matched(pattern: str, paths: Sequence[str], containers: Sequence[str] = ()) -> str:
    """Return the reason why a glob matches no module. `containers`: modules without a forward, which a glob cannot
    match."""
    if matched := [path for path in containers if matches(pattern, path)]:
        return _only_containers(matched)
    return f"matches no module of the model{suggestion(pattern, paths)}"


def _only_containers(paths: Sequence[str]) -> str:
    kind = "a container" if len(paths) == 1 else "containers"
    return f'matches only {listed(paths)}, {kind} without a forward; did you mean "{paths[0]}.*"?'


def suggestion(glob: str, paths: Collection[str]) -> str:
    """Return a hint for a glob that matches none of `paths`, which are paths of modules or of parameters.

    The hint names (1) a longer glob, if the last parts of some paths match `glob`; or (2) the paths whose
    `transformers` names match `glob`; or (3) a similar path. If there is none of these, the hint is empty.
    """
    for ends in (glob, f"{glob}.*"):
        found = ends_in(ends, paths)
        if any(matches(f"**.{ends}", path) for path in found):
            return f'; did you mean "**.{short_name(ends)}"?'
        if found:
            every, some = alike(paths), alike(found)
            names = dict.fromkeys(
                pattern if some[pattern] == every[pattern] else path for path in found for pattern in alike([path])
            )
            return f"; {short_name(glob)} of transformers is {listed(list(names))} here"
    return did_you_mean(glob, paths)


# Checks


def check_rules(inventory: Inventory, assignments: RuleAssignments) -> None:
    """Raise ConfigError for rules, globs and `buffer_dtype`s without effect, for combinations of dtypes that kernels do
    not support, and for parameters that are not floating. Combinations and `buffer_dtype`s are checked only if all
    rules and globs have an effect. `assignments`: result of `assign_rules`."""
    candidates = _assignable_modules(inventory)
    problems = [*_unused_rules(inventory, candidates, assignments)]
    problems = problems or [
        *_idle_buffer_dtypes(inventory, assignments),
        *_mixed_batch_norms(candidates, assignments),
        *_mixed_matmuls(candidates, assignments),
    ]
    problems += _parameters_without_dtype(inventory)
    if problems:
        raise ConfigError(problems)


def _unused_rules(
    inventory: Inventory, candidates: Sequence[ModuleInfo], assignments: RuleAssignments
) -> Iterator[Problem]:
    used = {assignment.key for assignment in assignments.own.values()}
    for assignment in _candidate_assignments(assignments.precision):
        matched = [m.path for m in candidates if _rule_matches(assignment.rule, m)]
        if not matched:
            yield _unmatched_rule(inventory, assignment, candidates)
        elif useless := [*_useless_patterns(inventory, assignment, candidates)]:
            yield from useless
        elif assignment.key not in used:
            others = sorted({assignments.own[path].reason for path in matched})
            reason = f"every module that this rule matches already follows {', '.join(others)}"
            yield _problem(assignment, f"{reason}; the first matching rule applies, so put the narrower rule first")
        elif not any(_has_tensors(inventory, path, assignment.rule) for path in matched):
            tensors = "parameters" if assignment.rule.buffer_dtype is None else "parameters or floating buffers"
            yield _problem(assignment, f"matches only modules without {tensors} ({listed(matched)}); remove the rule")


def _idle_buffer_dtypes(inventory: Inventory, assignments: RuleAssignments) -> Iterator[Problem]:
    """Yield a problem for each `buffer_dtype` that sets the dtype of no buffer."""
    followed = {
        assignment.key for module in inventory.modules if (assignment := assignments.of_buffers(module)) is not None
    }
    for assignment in _candidate_assignments(assignments.precision):
        if assignment.rule.buffer_dtype is not None and assignment.key not in followed:
            reason = "applies to no floating buffer: the rule's modules have none, or other rules apply to them"
            remedy = (
                "remove this key (buffers of a BatchNorm follow only a rule that matches the BatchNorm itself, and "
                "buffers of a mixture of experts stay float32)"
            )
            yield Problem(
                (*(assignment.key or ()), "buffer_dtype"), f"{reason}; {remedy}", assignment.rule.buffer_dtype
            )


def _has_tensors(inventory: Inventory, path: str, rule: PrecisionRule) -> bool:
    """Return True if a module, or a module inside it, has parameters. If the rule sets `buffer_dtype`, floating buffers
    count, too."""
    inside = [m for m in inventory.modules if is_within(m.path, path)]
    buffers = [buffer for m in inside for buffer in m.buffers if buffer.is_floating]
    return any(m.parameters for m in inside) or (rule.buffer_dtype is not None and bool(buffers))


def _useless_patterns(
    inventory: Inventory, assignment: RuleAssignment, candidates: Sequence[ModuleInfo]
) -> Iterator[Problem]:
    """If a rule has several globs, yield a problem for each glob that matches none of `candidates`."""
    for index, pattern in enumerate([] if isinstance(assignment.rule.match, str) else _rule_patterns(assignment.rule)):
        if not any(matches(pattern, module.path) for module in candidates):
            alone = replace(assignment, rule=assignment.rule.model_copy(update={"match": pattern}))
            reason = _unmatched_rule(inventory, alone, candidates).reason
            yield Problem((*(assignment.key or ()), "match", index), reason, pattern)


def _unmatched_rule(inventory: Inventory, assignment: RuleAssignment, candidates: Sequence[ModuleInfo]) -> Problem:
    rule = assignment.rule
    others = [m for m in inventory.modules if m.path not in {c.path for c in candidates} and _rule_matches(rule, m)]
    if others and others[0].same_as:
        reason = f"{others[0].path} is the same module as {others[0].same_as}; match {others[0].same_as} instead"
        return _problem(assignment, reason)
    if [m for m in others if not m.path]:
        return _problem(assignment, "matches only the model itself; set its dtypes in [precision]")
    if others:
        return _problem(assignment, _only_containers([m.path for m in others]))
    if rule.match is None:
        names = {name.rpartition(".")[2] for m in candidates for name in m.classes}
        return _problem(assignment, f"no module of the model is of this class{did_you_mean(rule.type or '', names)}")
    found = [m for m in candidates if any(matches(pattern, m.path) for pattern in _rule_patterns(rule))]
    if found:
        others_class = f"{found[0].path} is a {found[0].class_name}"
        return _problem(assignment, f"matches no module of class {rule.type}: {others_class}; remove type or match")
    return _problem(assignment, nothing_matched(_rule_patterns(rule)[0], [m.path for m in candidates]))


def _mixed_batch_norms(candidates: Sequence[ModuleInfo], assignments: RuleAssignments) -> Iterator[Problem]:
    """Yield a problem for the first BatchNorm to which a rule gives different dtypes of parameters and running
    statistics. Kernels do not support that."""
    for module in candidates:
        assignment, dtype = assignments.own.get(module.path), assignments.compute_dtype(module.path)
        statistics = [buffer for buffer in module.buffers if buffer.is_floating]
        if assignment is None or not is_batch_norm(module) or not statistics:
            continue
        statistics_dtype = assignments.buffer_dtype(module) or statistics[0].dtype
        if statistics_dtype != dtype:
            reason = f"{module.path} would have {dtype} parameters and {statistics_dtype} running statistics"
            remedy = 'set param_dtype = "float32" without a buffer_dtype, or remove the rule'
            yield _problem(assignment, f"{reason}, which kernels do not support; {remedy}")
            return


def _mixed_matmuls(candidates: Sequence[ModuleInfo], assignments: RuleAssignments) -> Iterator[Problem]:
    """Yield a problem for each rule that would give a matrix product inputs and weights of different dtypes."""
    failing: dict[str, tuple[RuleAssignment, list[str]]] = {}
    for module in candidates:
        assignment = assignments.governing(module.path)
        if assignment is None or not _MATMULS & set(module.classes):
            continue
        if assignment.rule.param_dtype is not None and assignment.rule.cast_forward_inputs:
            continue
        if assignments.around(module.path) != assignments.compute_dtype(module.path):
            failing.setdefault(assignment.reason, (assignment, []))[1].append(module.path)
    for assignment, paths in failing.values():
        cause, remedy = ("leaves param_dtype unset", "set param_dtype")
        if assignment.rule.param_dtype is not None:
            cause, remedy = ("has cast_forward_inputs = false", "remove cast_forward_inputs")
        dtypes = f"{assignments.around(paths[0])} inputs with {assignments.compute_dtype(paths[0])} weights"
        yield _problem(assignment, f"{cause}, so {listed(paths)} would have {dtypes}, which fails; {remedy}")


def _parameters_without_dtype(inventory: Inventory) -> Iterator[Problem]:
    """Yield a problem for each integer or complex parameter: FSDP2 would cast it to the dtype of the unit."""
    for name, parameter in inventory.parameters.items():
        if not parameter.is_floating:
            reason = f"the parameter {name} is {parameter.dtype}, and FSDP2 would cast it to a floating dtype"
            yield Problem(("model", "name"), f"{reason}; register it as a buffer")


def _problem(assignment: RuleAssignment, reason: str) -> Problem:
    field = "match" if assignment.rule.match is not None else "type"
    return Problem((*(assignment.key or ("precision",)), field), reason, getattr(assignment.rule, field))
