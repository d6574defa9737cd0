"""Which precision rule each module is under, and what is wrong with the rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_launch.config.precision import PrecisionConfig, PrecisionRule
from titan_launch.errors import ConfigError, KeyPath, Problem, did_you_mean
from titan_launch.globs import matches
from titan_launch.plan.types import Inventory, ModuleInfo, is_within

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
    key: KeyPath


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
        return self._precision.param_dtype if claim is None else claim.rule.param_dtype or self._precision.storage_dtype

    def around(self, path: str) -> str:
        """What the module around the nearest claimed one computes in: where its inputs come from."""
        while path and path not in self.own:
            path = parent(path)
        return self.compute_dtype(parent(path))


def parent(path: str) -> str:
    """The path of the module around a module; empty for the root."""
    return path.rpartition(".")[0]


def claim_modules(inventory: Inventory, precision: PrecisionConfig) -> Claims:
    """Put every module under the first rule that matches it. Raises ConfigError with all that is wrong with the rules.

    A BatchNorm that would compute in a reduced dtype, and that no rule matches itself, is put under a default rule: its
    parameters are fp32 beside its fp32 running statistics, and its input is taken as it comes, which the kernels allow.
    """
    candidates = [m for m in inventory.modules if m.path and m.has_forward and m.same_as is None]
    claims = _claims_of_rules(candidates, precision)
    problems = [*_unused_rules(inventory, precision.rules, candidates, claims)]
    problems = problems or [*_reduced_batch_norms(candidates, claims), *_matmuls_of_two_dtypes(candidates, claims)]
    if problems:
        raise ConfigError(problems)
    default = Claim(_batch_norm_rule(precision), BATCH_NORM_DEFAULT, ("precision",))
    unruled = [m.path for m in candidates if _BATCH_NORM in m.classes and m.path not in claims.own]
    defaults = {path: default for path in unruled if claims.compute_dtype(path) in _REDUCED}
    return Claims({**claims.own, **defaults}, precision)


def _claims_of_rules(candidates: Sequence[ModuleInfo], precision: PrecisionConfig) -> Claims:
    own: dict[str, Claim] = {}
    for index, rule in enumerate(precision.rules):
        claim = Claim(rule, f"precision.rules.{index}", ("precision", "rules", index))
        for module in candidates:
            if rule_matches(rule, module):
                own.setdefault(module.path, claim)
    return Claims(own, precision)


def _batch_norm_rule(precision: PrecisionConfig) -> PrecisionRule:
    if precision.storage_dtype in _REDUCED:
        return PrecisionRule(type="BatchNorm", param_dtype="float32", cast_forward_inputs=False)
    return PrecisionRule(type="BatchNorm")


def rule_matches(rule: PrecisionRule, module: ModuleInfo) -> bool:
    """Whether a module is what a rule describes, by class and by path; a part that is not given matches all."""
    if rule.type is not None and not any(_is_class(rule.type, name) for name in module.classes):
        return False
    return rule.match is None or matches(rule.match, module.path)


def _is_class(wanted: str, full_name: str) -> bool:
    if "." in wanted:
        return wanted == full_name
    return wanted.lstrip("_") == full_name.rpartition(".")[2].lstrip("_")


def _unused_rules(
    inventory: Inventory, rules: Sequence[PrecisionRule], candidates: Sequence[ModuleInfo], claims: Claims
) -> Iterator[Problem]:
    used = {claim.key for claim in claims.own.values()}
    for index, rule in enumerate(rules):
        matched = [m.path for m in candidates if rule_matches(rule, m)]
        key: KeyPath = ("precision", "rules", index)
        if not matched:
            yield _nothing_matched(inventory, key, rule, candidates)
        elif key not in used:
            others = sorted({claims.own[path].reason for path in matched})
            yield _problem(key, rule, f"every module it matches is already under {', '.join(others)}")
        elif not any(_has_something_to_apply_to(inventory, path, rule) for path in matched):
            yield _problem(key, rule, f"matches only {listed(matched)}: no parameters or buffers to apply it to")


def _has_something_to_apply_to(inventory: Inventory, path: str, rule: PrecisionRule) -> bool:
    inside = [m for m in inventory.modules if is_within(m.path, path)]
    return any(m.parameters for m in inside) or (rule.buffer_dtype is not None and any(m.buffers for m in inside))


def _nothing_matched(
    inventory: Inventory, key: KeyPath, rule: PrecisionRule, candidates: Sequence[ModuleInfo]
) -> Problem:
    others = [m for m in inventory.modules if m.path not in {c.path for c in candidates} and rule_matches(rule, m)]
    if others and others[0].same_as:
        reason = f"{others[0].path} is the same module as {others[0].same_as}; match it under that path"
        return _problem(key, rule, reason)
    if [m for m in others if not m.path]:
        return _problem(key, rule, "matches only the model itself, whose dtypes are those of [precision]")
    if others:
        reason = f"matches only {listed([m.path for m in others])}, a container without a forward"
        return _problem(key, rule, f'{reason}; did you mean "{others[0].path}.*"?')
    if rule.match is None:
        names = {name.rpartition(".")[2] for m in candidates for name in m.classes}
        return _problem(key, rule, f"no module of the model is of this class{did_you_mean(rule.type or '', names)}")
    reason = "matches no module of the model" if rule.type is None else f"matches no module of class {rule.type}"
    return _problem(key, rule, reason + did_you_mean(rule.match, [m.path for m in candidates]))


def _reduced_batch_norms(candidates: Sequence[ModuleInfo], claims: Claims) -> Iterator[Problem]:
    """BatchNorm's kernels take parameters in bf16 only with running statistics in bf16, which would corrupt them."""
    for module in candidates:
        claim, dtype = claims.own.get(module.path), claims.compute_dtype(module.path)
        if claim is None or _BATCH_NORM not in module.classes or dtype not in _REDUCED:
            continue
        if any(buffer.is_floating for buffer in module.buffers) and claim.rule.buffer_dtype != dtype:
            reason = f"{module.path} would have {dtype} parameters beside float32 running statistics, which fails"
            yield _problem(claim.key, claim.rule, f'{reason}; set param_dtype = "float32", or drop the rule')
            return


def _matmuls_of_two_dtypes(candidates: Sequence[ModuleInfo], claims: Claims) -> Iterator[Problem]:
    """Norms and embeddings take inputs of another dtype than their weights; matrix products do not."""
    failing: dict[KeyPath, tuple[Claim, list[str]]] = {}
    for module in candidates:
        claim = claims.governing(module.path)
        if claim is None or claim.rule.param_dtype is not None or not _MATMULS & set(module.classes):
            continue
        if claims.around(module.path) != claims.compute_dtype(module.path):
            failing.setdefault(claim.key, (claim, []))[1].append(module.path)
    for claim, paths in failing.values():
        dtypes = f"{claims.around(paths[0])} inputs with {claims.compute_dtype(paths[0])} weights"
        reason = f"leaves param_dtype unset, which would give {listed(paths)} {dtypes}, and fails"
        yield _problem(claim.key, claim.rule, f"{reason}; set param_dtype")


def _problem(key: KeyPath, rule: PrecisionRule, reason: str) -> Problem:
    field = "match" if rule.match is not None else "type"
    return Problem((*key, field), reason, getattr(rule, field))


def listed(paths: Sequence[str], most: int = 3) -> str:
    """The first few of several paths, and how many more there are."""
    shown = ", ".join(paths[:most])
    return shown if len(paths) <= most else f"{shown} and {len(paths) - most} more"
