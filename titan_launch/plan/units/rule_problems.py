"""What is wrong with the precision rules of a job, as far as only its model can tell."""

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

_MATMULS = {"torch.nn.modules.linear.Linear", "torch.nn.modules.conv._ConvNd"}


def check_rules(inventory: Inventory, precision: PrecisionConfig, claims: RuleAssignments) -> None:
    """Raise ConfigError with all that is wrong: rules that match nothing or only modules without tensors, dtypes that
    kernels do not take together, parameters that have no dtype to choose.

    `claims`: those of the rules alone, without defaults.
    """
    candidates = assignable_modules(inventory)
    problems = [*_unused_rules(inventory, precision, candidates, claims)]
    problems = problems or [
        *_idle_buffer_dtypes(inventory, precision, claims),
        *_mixed_batch_norms(candidates, claims),
        *_mixed_matmuls(candidates, claims),
    ]
    problems += _parameters_without_dtype(inventory)
    if problems:
        raise ConfigError(problems)


def _unused_rules(
    inventory: Inventory, precision: PrecisionConfig, candidates: Sequence[ModuleInfo], claims: RuleAssignments
) -> Iterator[Problem]:
    used = {claim.key for claim in claims.own.values()}
    for claim in candidate_assignments(precision):
        matched = [m.path for m in candidates if rule_matches(claim.rule, m)]
        if not matched:
            yield _nothing_matched(inventory, claim, candidates)
        elif useless := [*_useless_patterns(claim, candidates)]:
            yield from useless
        elif claim.key not in used:
            others = sorted({claims.own[path].reason for path in matched})
            reason = f"every module it matches is already under {', '.join(others)}"
            yield _problem(claim, f"{reason}; the first rule wins, so put the narrower one first")
        elif not any(_has_something_to_apply_to(inventory, path, claim.rule) for path in matched):
            tensors = "parameters" if claim.rule.buffer_dtype is None else "parameters or floating buffers"
            yield _problem(claim, f"matches only {listed(matched)}: no {tensors} to apply it to")


def _idle_buffer_dtypes(inventory: Inventory, precision: PrecisionConfig, claims: RuleAssignments) -> Iterator[Problem]:
    """A `buffer_dtype` that no buffer follows: those inside are under other rules, or a BatchNorm's."""
    followed = {claim.key for module in inventory.modules if (claim := claims.of_buffers(module)) is not None}
    for claim in candidate_assignments(precision):
        if claim.rule.buffer_dtype is not None and claim.key not in followed:
            reason = "no floating buffer follows it: there is none inside, or it is met first on another path"
            remedy = "BatchNorm's need a rule for the BatchNorm itself; drop this key"
            yield Problem((*(claim.key or ()), "buffer_dtype"), f"{reason}; {remedy}", claim.rule.buffer_dtype)


def _has_something_to_apply_to(inventory: Inventory, path: str, rule: PrecisionRule) -> bool:
    inside = [m for m in inventory.modules if is_within(m.path, path)]
    buffers = [buffer for m in inside for buffer in m.buffers if buffer.is_floating]
    return any(m.parameters for m in inside) or (rule.buffer_dtype is not None and bool(buffers))


def _useless_patterns(claim: RuleAssignment, candidates: Sequence[ModuleInfo]) -> Iterator[Problem]:
    """Of several patterns in one rule, those that match nothing."""
    for index, pattern in enumerate([] if isinstance(claim.rule.match, str) else rule_patterns(claim.rule)):
        if not any(matches(pattern, module.path) for module in candidates):
            reason = nothing_matched(pattern, [module.path for module in candidates])
            yield Problem((*(claim.key or ()), "match", index), reason, pattern)


def _nothing_matched(inventory: Inventory, claim: RuleAssignment, candidates: Sequence[ModuleInfo]) -> Problem:
    rule = claim.rule
    others = [m for m in inventory.modules if m.path not in {c.path for c in candidates} and rule_matches(rule, m)]
    if others and others[0].same_as:
        reason = f"{others[0].path} is the same module as {others[0].same_as}; match it under that path"
        return _problem(claim, reason)
    if [m for m in others if not m.path]:
        return _problem(claim, "matches only the model itself, whose dtypes are those of [precision]")
    if others:
        reason = f"matches only {listed([m.path for m in others])}, a container without a forward"
        return _problem(claim, f'{reason}; did you mean "{others[0].path}.*"?')
    if rule.match is None:
        names = {name.rpartition(".")[2] for m in candidates for name in m.classes}
        return _problem(claim, f"no module of the model is of this class{did_you_mean(rule.type or '', names)}")
    found = [m for m in candidates if any(matches(pattern, m.path) for pattern in rule_patterns(rule))]
    if found:
        others_class = f"{found[0].path} is a {found[0].class_name}"
        return _problem(claim, f"matches no module of class {rule.type}: {others_class}; drop type or match")
    return _problem(claim, nothing_matched(rule_patterns(rule)[0], [m.path for m in candidates]))


def _mixed_batch_norms(candidates: Sequence[ModuleInfo], claims: RuleAssignments) -> Iterator[Problem]:
    """BatchNorm's kernels take parameters in bf16 only with running statistics in bf16, and fp32 only with fp32."""
    for module in candidates:
        claim, dtype = claims.own.get(module.path), claims.compute_dtype(module.path)
        statistics = [buffer for buffer in module.buffers if buffer.is_floating]
        if claim is None or not is_batch_norm(module) or not statistics:
            continue
        statistics_dtype = claims.buffer_dtype(module) or statistics[0].dtype
        if statistics_dtype != dtype:
            reason = f"{module.path} would have {dtype} parameters beside {statistics_dtype} running statistics"
            remedy = 'set param_dtype = "float32" without a buffer_dtype, or drop the rule'
            yield _problem(claim, f"{reason}, which fails; {remedy}")
            return


def _mixed_matmuls(candidates: Sequence[ModuleInfo], claims: RuleAssignments) -> Iterator[Problem]:
    """Norms and embeddings take inputs of another dtype than their weights; matrix products do not."""
    failing: dict[str, tuple[RuleAssignment, list[str]]] = {}
    for module in candidates:
        claim = claims.governing(module.path)
        if claim is None or _casts_inputs(claim.rule) or not _MATMULS & set(module.classes):
            continue
        if claims.around(module.path) != claims.compute_dtype(module.path):
            failing.setdefault(claim.reason, (claim, []))[1].append(module.path)
    for claim, paths in failing.values():
        cause, remedy = ("leaves param_dtype unset", "set param_dtype")
        if claim.rule.param_dtype is not None:
            cause, remedy = ("has cast_forward_inputs = false", "drop that key")
        dtypes = f"{claims.around(paths[0])} inputs with {claims.compute_dtype(paths[0])} weights"
        yield _problem(claim, f"{cause}, which would give {listed(paths)} {dtypes}, and fails; {remedy}")


def _casts_inputs(rule: PrecisionRule) -> bool:
    return rule.param_dtype is not None and rule.cast_forward_inputs


def _parameters_without_dtype(inventory: Inventory) -> Iterator[Problem]:
    """FSDP2 casts every parameter of a unit to the unit's dtype, whatever it is: integers and complex numbers too."""
    for module in inventory.modules:
        for parameter in module.parameters:
            if not parameter.is_floating:
                name = full_name(module.path, parameter.name)
                reason = f"the parameter {name} is {parameter.dtype}, and FSDP2 would cast it to a floating dtype"
                yield Problem(("model", "name"), f"{reason}; register it as a buffer")


def _problem(claim: RuleAssignment, reason: str) -> Problem:
    field = "match" if claim.rule.match is not None else "type"
    return Problem((*(claim.key or ("precision",)), field), reason, getattr(claim.rule, field))
