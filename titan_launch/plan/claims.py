"""Which precision rule each module is under, and what is wrong with the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_launch.config.precision import PrecisionConfig, PrecisionRule
from titan_launch.errors import ConfigError, KeyPath, Problem, did_you_mean
from titan_launch.globs import matches
from titan_launch.plan.patterns import nothing_matched
from titan_launch.plan.types import Inventory, ModuleInfo, full_name, is_within, parent

BATCH_NORM_DEFAULT = "BatchNorm default"
"""What the unit table gives as the reason of a BatchNorm unit that no rule asked for."""

_BATCH_NORM = "torch.nn.modules.batchnorm._BatchNorm"
_MATMULS = {"torch.nn.modules.linear.Linear", "torch.nn.modules.conv._ConvNd"}
_REDUCED = {"bfloat16"}


@dataclass(frozen=True)
class Claim:
    """A rule, and what it is called in the unit table."""

    rule: PrecisionRule
    reason: str
    key: KeyPath | None
    """Where the rule stands in the job file; None for a default."""


class Claims:
    """Who is under which rule. A rule covers what is inside the modules it matches, up to another rule's."""

    def __init__(self, own: Mapping[str, Claim], precision: PrecisionConfig):
        self.own = own
        """The claims of the modules that rules match themselves, by path, parents first within a rule."""
        self._precision = precision

    def governing(self, path: str) -> Claim | None:
        """The claim of a module, or of the nearest module around it that has one."""
        while path:
            if path in self.own:
                return self.own[path]
            path = parent(path)
        return None

    def compute_dtype(self, path: str) -> str:
        """What a module computes in."""
        claim = self.governing(path)
        return self._precision.param_dtype if claim is None else claim.rule.param_dtype or self.storage_dtype(claim)

    def storage_dtype(self, claim: Claim | None) -> str:
        """What the parameters under a claim, or under none, are stored in."""
        own = None if claim is None else claim.rule.storage_dtype
        return own or self._precision.storage_dtype

    def buffer_dtype(self, module: ModuleInfo) -> str | None:
        """What `[precision]` wants a module's floating buffers to be, if anything.

        Running statistics are moving averages: in bf16 an update of 1 % is rounded away. So only a rule that names the
        BatchNorm itself decides about them.
        """
        claim = self.of_buffers(module)
        own = None if claim is None else claim.rule.buffer_dtype
        return own or (None if is_batch_norm(module) else self._precision.buffer_dtype)

    def of_buffers(self, module: ModuleInfo) -> Claim | None:
        """The claim that decides about a module's floating buffers, if it has any."""
        if module.same_as is not None or not any(buffer.is_floating for buffer in module.buffers):
            return None
        return self.own.get(module.path) if is_batch_norm(module) else self.governing(module.path)

    def around(self, path: str) -> str:
        """What the module around the nearest claimed one computes in: where its inputs come from."""
        while path and path not in self.own:
            path = parent(path)
        return self.compute_dtype(parent(path))


def is_batch_norm(module: ModuleInfo) -> bool:
    """Whether a module is a BatchNorm, of any number of dimensions, or a subclass of one."""
    return _BATCH_NORM in module.classes


def claim_modules(inventory: Inventory, precision: PrecisionConfig) -> Claims:
    """Put every module under the first rule that matches it. Raises ConfigError with all that is wrong with the rules.

    A BatchNorm that would compute in a reduced dtype, and that no rule matches itself, is put under a default rule: its
    parameters are fp32 beside its fp32 running statistics, and its input is taken as it comes, which the kernels allow.
    """
    candidates = [m for m in inventory.modules if m.path and m.has_forward and m.same_as is None]
    claims = _claims_of_rules(candidates, precision)
    problems = [*_unused_rules(inventory, precision.rules, candidates, claims)]
    problems = problems or [
        *_idle_buffer_dtypes(inventory, precision.rules, claims),
        *_mixed_batch_norms(candidates, claims),
        *_mixed_matmuls(candidates, claims),
    ]
    problems += _parameters_without_dtype(inventory)
    if problems:
        raise ConfigError(problems)
    default = Claim(_batch_norm_rule(precision), BATCH_NORM_DEFAULT, None)
    unruled = [m.path for m in candidates if is_batch_norm(m) and m.path not in claims.own]
    defaults = {path: default for path in unruled if claims.compute_dtype(path) in _REDUCED}
    return Claims({**claims.own, **defaults}, precision)


def _claims_of_rules(candidates: Sequence[ModuleInfo], precision: PrecisionConfig) -> Claims:
    own: dict[str, Claim] = {}
    for claim in _rule_claims(precision.rules):
        for module in candidates:
            if rule_matches(claim.rule, module):
                own.setdefault(module.path, claim)
    return Claims(own, precision)


def _rule_claims(rules: Sequence[PrecisionRule]) -> Iterator[Claim]:
    for index, rule in enumerate(rules):
        yield Claim(rule, f"precision.rules.{index}", ("precision", "rules", index))


def _batch_norm_rule(precision: PrecisionConfig) -> PrecisionRule:
    if precision.storage_dtype in _REDUCED:
        return PrecisionRule(type="BatchNorm", param_dtype="float32", cast_forward_inputs=False)
    return PrecisionRule(type="BatchNorm")


def rule_matches(rule: PrecisionRule, module: ModuleInfo) -> bool:
    """Whether a module is what a rule describes, by class and by path; a part that is not given matches all."""
    if rule.type is not None and not any(_is_class(rule.type, name) for name in module.classes):
        return False
    return rule.match is None or any(matches(pattern, module.path) for pattern in _patterns(rule))


def _patterns(rule: PrecisionRule) -> tuple[str, ...]:
    return (rule.match,) if isinstance(rule.match, str) else rule.match or ()


def _is_class(wanted: str, full_name: str) -> bool:
    if "." in wanted:
        public = re.sub(r"^torch\.nn\.modules\.\w+\.", "torch.nn.", full_name)
        return wanted in (full_name, public)
    return wanted.lstrip("_") == full_name.rpartition(".")[2].lstrip("_")


def _unused_rules(
    inventory: Inventory, rules: Sequence[PrecisionRule], candidates: Sequence[ModuleInfo], claims: Claims
) -> Iterator[Problem]:
    used = {claim.key for claim in claims.own.values()}
    for claim in _rule_claims(rules):
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


def _idle_buffer_dtypes(inventory: Inventory, rules: Sequence[PrecisionRule], claims: Claims) -> Iterator[Problem]:
    """A `buffer_dtype` that no buffer follows: those inside are under other rules, or a BatchNorm's."""
    followed = {claim.key for module in inventory.modules if (claim := claims.of_buffers(module)) is not None}
    for claim in _rule_claims(rules):
        if claim.rule.buffer_dtype is not None and claim.key not in followed:
            reason = "no floating buffer follows it: there is none inside, or it is met first on another path"
            remedy = "BatchNorm's need a rule for the BatchNorm itself; drop this key"
            yield Problem((*(claim.key or ()), "buffer_dtype"), f"{reason}; {remedy}", claim.rule.buffer_dtype)


def _has_something_to_apply_to(inventory: Inventory, path: str, rule: PrecisionRule) -> bool:
    inside = [m for m in inventory.modules if is_within(m.path, path)]
    buffers = [buffer for m in inside for buffer in m.buffers if buffer.is_floating]
    return any(m.parameters for m in inside) or (rule.buffer_dtype is not None and bool(buffers))


def _useless_patterns(claim: Claim, candidates: Sequence[ModuleInfo]) -> Iterator[Problem]:
    """Of several patterns in one rule, those that match nothing."""
    for index, pattern in enumerate([] if isinstance(claim.rule.match, str) else _patterns(claim.rule)):
        if not any(matches(pattern, module.path) for module in candidates):
            reason = nothing_matched(pattern, [module.path for module in candidates])
            yield Problem((*(claim.key or ()), "match", index), reason, pattern)


def _nothing_matched(inventory: Inventory, claim: Claim, candidates: Sequence[ModuleInfo]) -> Problem:
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
    found = [m for m in candidates if any(matches(pattern, m.path) for pattern in _patterns(rule))]
    if found:
        others_class = f"{found[0].path} is a {found[0].class_name}"
        return _problem(claim, f"matches no module of class {rule.type}: {others_class}; drop type or match")
    return _problem(claim, nothing_matched(_patterns(rule)[0], [m.path for m in candidates]))


def _mixed_batch_norms(candidates: Sequence[ModuleInfo], claims: Claims) -> Iterator[Problem]:
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


def _mixed_matmuls(candidates: Sequence[ModuleInfo], claims: Claims) -> Iterator[Problem]:
    """Norms and embeddings take inputs of another dtype than their weights; matrix products do not."""
    failing: dict[str, tuple[Claim, list[str]]] = {}
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


def _problem(claim: Claim, reason: str) -> Problem:
    field = "match" if claim.rule.match is not None else "type"
    return Problem((*(claim.key or ("precision",)), field), reason, getattr(claim.rule, field))


def listed(paths: Sequence[str], most: int = 3) -> str:
    """The first few of several paths, and how many more there are."""
    shown = ", ".join(paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"
