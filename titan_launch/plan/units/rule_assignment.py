"""The precision rule of each module, and the modules that a list of globs matches. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from titan_launch.config.sections.precision import PrecisionConfig, PrecisionRule
from titan_launch.core.errors import ConfigError, KeyPath, Problem, did_you_mean
from titan_launch.core.globs import matches
from titan_launch.plan.types import Inventory, ModuleInfo, parent

BATCH_NORM_DEFAULT = "BatchNorm default"
"""What the unit table gives as the reason of a BatchNorm unit that no rule asked for."""

_BATCH_NORM = "torch.nn.modules.batchnorm._BatchNorm"
_REDUCED = {"bfloat16"}


@dataclass(frozen=True)
class RuleAssignment:
    """A rule, and what it is called in the unit table."""

    rule: PrecisionRule
    reason: str
    key: KeyPath | None
    """Where the rule stands in the job file; None for a default."""


class RuleAssignments:
    """Who is under which rule. A rule covers what is inside the modules it matches, up to another rule's."""

    def __init__(self, own: Mapping[str, RuleAssignment], precision: PrecisionConfig):
        self.own = own
        """The claims of the modules that rules match themselves, by path, parents first within a rule."""
        self._precision = precision

    def governing(self, path: str) -> RuleAssignment | None:
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

    def storage_dtype(self, claim: RuleAssignment | None) -> str:
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

    def of_buffers(self, module: ModuleInfo) -> RuleAssignment | None:
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


def assign_rules(inventory: Inventory, precision: PrecisionConfig) -> RuleAssignments:
    """Put every module under the first rule that matches it."""
    own: dict[str, RuleAssignment] = {}
    for claim in candidate_assignments(precision):
        for module in assignable_modules(inventory):
            if rule_matches(claim.rule, module):
                own.setdefault(module.path, claim)
    return RuleAssignments(own, precision)


def candidate_assignments(precision: PrecisionConfig) -> Iterator[RuleAssignment]:
    """The rules of the job file, in order."""
    for index, rule in enumerate(precision.rules):
        yield RuleAssignment(rule, f"precision.rules.{index}", ("precision", "rules", index))


def assignable_modules(inventory: Inventory) -> list[ModuleInfo]:
    """The modules that a rule can match: what runs inside the model, each under its first path."""
    return [m for m in inventory.modules if m.path and m.has_forward and m.same_as is None]


def with_batch_norm_default(
    inventory: Inventory, precision: PrecisionConfig, claims: RuleAssignments
) -> RuleAssignments:
    """A BatchNorm that would compute in a reduced dtype, and that no rule matches itself, is put under a default rule:
    its parameters are fp32 beside its fp32 running statistics, and its input is taken as it comes, which the kernels
    allow."""
    default = RuleAssignment(_batch_norm_rule(precision), BATCH_NORM_DEFAULT, None)
    unruled = [m.path for m in assignable_modules(inventory) if is_batch_norm(m) and m.path not in claims.own]
    defaults = {path: default for path in unruled if claims.compute_dtype(path) in _REDUCED}
    return RuleAssignments({**claims.own, **defaults}, precision)


def _batch_norm_rule(precision: PrecisionConfig) -> PrecisionRule:
    if precision.storage_dtype in _REDUCED:
        return PrecisionRule(type="BatchNorm", param_dtype="float32", cast_forward_inputs=False)
    return PrecisionRule(type="BatchNorm")


def rule_matches(rule: PrecisionRule, module: ModuleInfo) -> bool:
    """Whether a module is what a rule describes, by class and by path; a part that is not given matches all."""
    if rule.type is not None and not any(_is_class(rule.type, name) for name in module.classes):
        return False
    return rule.match is None or any(matches(pattern, module.path) for pattern in rule_patterns(rule))


def rule_patterns(rule: PrecisionRule) -> tuple[str, ...]:
    """The globs of a rule; none where it goes by class alone."""
    return (rule.match,) if isinstance(rule.match, str) else rule.match or ()


def _is_class(wanted: str, full_name: str) -> bool:
    if "." in wanted:
        public = re.sub(r"^torch\.nn\.modules\.\w+\.", "torch.nn.", full_name)
        return wanted in (full_name, public)
    return wanted.lstrip("_") == full_name.rpartition(".")[2].lstrip("_")


def matched_modules(inventory: Inventory, patterns: Sequence[str], key: KeyPath) -> tuple[str, ...]:
    """Paths of the modules that can be run and that a glob matches, in order. A module with several parents, which is
    matched under any of its paths, stands under the first.

    Raises ConfigError at `key` and its index for every glob that matches nothing.
    """
    problems = list(_unused(inventory, patterns, key))
    if problems:
        raise ConfigError(problems)
    matched = {
        module.same_as or module.path
        for module in inventory.modules
        if module.path and module.has_forward and any(matches(pattern, module.path) for pattern in patterns)
    }
    return tuple(module.path for module in inventory.modules if module.path in matched)


def nothing_matched(pattern: str, paths: Sequence[str], containers: Sequence[str] = ()) -> str:
    """Why a glob names none of the modules it could, in words. `containers`: modules that it cannot name, since they
    have no forward."""
    container = next((path for path in containers if matches(pattern, path)), None)
    if container is not None:
        return f'matches only {container}, a container without a forward; did you mean "{container}.*"?'
    return f"matches no module of the model{did_you_mean(pattern, paths)}"


def _unused(inventory: Inventory, patterns: Sequence[str], key: KeyPath) -> Iterator[Problem]:
    containers = [module.path for module in inventory.modules if module.path and not module.has_forward]
    runnable = [module.path for module in inventory.modules if module.path and module.has_forward]
    for index, pattern in enumerate(patterns):
        if not any(matches(pattern, path) for path in runnable):
            yield Problem((*key, index), nothing_matched(pattern, runnable, containers), pattern)
