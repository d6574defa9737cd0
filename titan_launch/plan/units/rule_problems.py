"""Checks of the precision rules of a job against the modules of the model. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.core.errors import ConfigError, Problem, did_you_mean, listed
from titan_launch.core.globs import matches
from titan_launch.plan.types import Inventory, ModuleInfo, full_name, is_within
from titan_launch.plan.units.rule_assignment import (
    RuleAssignment,
    RuleAssignments,
    assignable_modules,
    candidate_assignments,
    is_batch_norm,
    nothing_matched,
    rule_matches,
    rule_patterns,
)

_MATMULS = {
    "torch.nn.modules.linear.Linear",
    "torch.nn.modules.conv._ConvNd",
    "titan_launch.models.decoder.mixture_of_experts.Experts",
}


def check_rules(inventory: Inventory, precision: PrecisionConfig, assignments: RuleAssignments) -> None:
    """Raise ConfigError for rules, globs and `buffer_dtype`s without effect, for combinations of dtypes that kernels do
    not support, and for parameters that are not floating. Combinations and `buffer_dtype`s are checked only if all
    rules and globs have an effect. `assignments`: result of `assign_rules`."""
    candidates = assignable_modules(inventory)
    problems = [*_unused_rules(inventory, precision, candidates, assignments)]
    problems = problems or [
        *_idle_buffer_dtypes(inventory, precision, assignments),
        *_mixed_batch_norms(candidates, assignments),
        *_mixed_matmuls(candidates, assignments),
    ]
    problems += _parameters_without_dtype(inventory)
    if problems:
        raise ConfigError(problems)


def _unused_rules(
    inventory: Inventory, precision: PrecisionConfig, candidates: Sequence[ModuleInfo], assignments: RuleAssignments
) -> Iterator[Problem]:
    used = {assignment.key for assignment in assignments.own.values()}
    for assignment in candidate_assignments(precision):
        matched = [m.path for m in candidates if rule_matches(assignment.rule, m)]
        if not matched:
            yield _nothing_matched(inventory, assignment, candidates)
        elif useless := [*_useless_patterns(assignment, candidates)]:
            yield from useless
        elif assignment.key not in used:
            others = sorted({assignments.own[path].reason for path in matched})
            reason = f"every module that this rule matches already follows {', '.join(others)}"
            yield _problem(assignment, f"{reason}; the first matching rule applies, so put the narrower rule first")
        elif not any(_has_tensors(inventory, path, assignment.rule) for path in matched):
            tensors = "parameters" if assignment.rule.buffer_dtype is None else "parameters or floating buffers"
            yield _problem(assignment, f"matches only modules without {tensors} ({listed(matched)}); remove the rule")


def _idle_buffer_dtypes(
    inventory: Inventory, precision: PrecisionConfig, assignments: RuleAssignments
) -> Iterator[Problem]:
    """Yield a problem for each `buffer_dtype` that sets the dtype of no buffer."""
    followed = {
        assignment.key for module in inventory.modules if (assignment := assignments.of_buffers(module)) is not None
    }
    for assignment in candidate_assignments(precision):
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
    """Return True if a module has parameters, or floating buffers to which `buffer_dtype` of the rule applies."""
    inside = [m for m in inventory.modules if is_within(m.path, path)]
    buffers = [buffer for m in inside for buffer in m.buffers if buffer.is_floating]
    return any(m.parameters for m in inside) or (rule.buffer_dtype is not None and bool(buffers))


def _useless_patterns(assignment: RuleAssignment, candidates: Sequence[ModuleInfo]) -> Iterator[Problem]:
    """If a rule has several globs, yield a problem for each glob that matches no module."""
    for index, pattern in enumerate([] if isinstance(assignment.rule.match, str) else rule_patterns(assignment.rule)):
        if not any(matches(pattern, module.path) for module in candidates):
            reason = nothing_matched(pattern, [module.path for module in candidates])
            yield Problem((*(assignment.key or ()), "match", index), reason, pattern)


def _nothing_matched(inventory: Inventory, assignment: RuleAssignment, candidates: Sequence[ModuleInfo]) -> Problem:
    rule = assignment.rule
    others = [m for m in inventory.modules if m.path not in {c.path for c in candidates} and rule_matches(rule, m)]
    if others and others[0].same_as:
        reason = f"{others[0].path} is the same module as {others[0].same_as}; match {others[0].same_as} instead"
        return _problem(assignment, reason)
    if [m for m in others if not m.path]:
        return _problem(assignment, "matches only the model itself; set its dtypes in [precision]")
    if others:
        reason = f"matches only {listed([m.path for m in others])}, a container without a forward"
        return _problem(assignment, f'{reason}; did you mean "{others[0].path}.*"?')
    if rule.match is None:
        names = {name.rpartition(".")[2] for m in candidates for name in m.classes}
        return _problem(assignment, f"no module of the model is of this class{did_you_mean(rule.type or '', names)}")
    found = [m for m in candidates if any(matches(pattern, m.path) for pattern in rule_patterns(rule))]
    if found:
        others_class = f"{found[0].path} is a {found[0].class_name}"
        return _problem(assignment, f"matches no module of class {rule.type}: {others_class}; remove type or match")
    return _problem(assignment, nothing_matched(rule_patterns(rule)[0], [m.path for m in candidates]))


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
    for module in inventory.modules:
        for parameter in module.parameters:
            if not parameter.is_floating:
                name = full_name(module.path, parameter.name)
                reason = f"the parameter {name} is {parameter.dtype}, and FSDP2 would cast it to a floating dtype"
                yield Problem(("model", "name"), f"{reason}; register it as a buffer")


def _problem(assignment: RuleAssignment, reason: str) -> Problem:
    field = "match" if assignment.rule.match is not None else "type"
    return Problem((*(assignment.key or ("precision",)), field), reason, getattr(assignment.rule, field))
