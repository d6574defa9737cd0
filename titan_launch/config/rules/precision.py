"""Rules across sections for `[[precision.rules]]`, attention kernels and gradient accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.data import beyond_causal_attention
from titan_launch.config.rules.parallelism import SPLIT_BACKWARD_RULES
from titan_launch.config.sections.precision import PrecisionRule
from titan_launch.core.errors import KeyPath, Problem, format_key
from titan_launch.models.architectures import known_args


def precision_rules_have_a_target(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each precision rule that has neither `type` nor `match`."""
    for index, rule in enumerate(config.precision.rules):
        if not rule.type and not rule.match:
            key: KeyPath = ("precision", "rules", index)
            reason = 'has neither type nor match; set type = "ClassName", match = "module.path", or both'
            yield Problem(key, reason, also=((*key, "type"), (*key, "match")))


def precision_rules_can_be_reached(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each precision rule with the same `type` and `match` as an earlier rule. The later rule
    never applies, because the first matching rule applies."""
    first: dict[tuple[str | None, str | tuple[str, ...] | None], int] = {}
    for index, rule in enumerate(config.precision.rules):
        earlier = first.setdefault(_target(rule), index)
        if earlier != index and any(_target(rule)):
            reason = (
                f"this rule never applies, because precision.rules.{earlier} has the same type and match, and the "
                "first matching rule applies (rules are counted from 0); merge the two rules"
            )
            yield Problem(("precision", "rules", index), reason, also=(("precision", "rules", earlier),))


def deferred_gradients_accumulate_in_float32(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each reduce dtype that is bfloat16 in a deferred mode, because deferred modes accumulate
    gradients in the reduce dtype. (With `mode = "auto"` the job is valid, and `auto` chooses no deferred mode.)"""
    mode = config.gradient_accumulation.mode
    if mode == "auto" or not config.gradient_accumulation.row.defers:
        return
    reason = (
        f'gradient_accumulation.mode = "{mode}" accumulates gradients in this dtype, with a relative error of 3e-3 '
        "over 4 microbatches and 6e-3 over 64 (float32: 2e-9 and 2e-8; measured); "
        'set reduce_dtype = "float32", or gradient_accumulation.mode = "immediate"'
    )
    for key, dtype in _with_rules(config, ("precision", "reduce_dtype"), "reduce_dtype"):
        if dtype == "bfloat16":
            yield Problem(key, reason, dtype, also=(("gradient_accumulation", "mode"),))


def deferred_all_reduces_exist(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the mode defers only the all-reduces between replicas, but FSDP2 runs none. FSDP2 runs no
    such all-reduce if the model has only one replica, or if the optimizer is sharded over the replicas."""
    degree = ("parallelism", "data_parallel_replicate_degree")
    mode = config.gradient_accumulation.mode
    if mode == "auto" or not config.gradient_accumulation.row.needs_all_reduces:
        return
    if config.parallelism.shard_optimizer_over_replicas:
        reason = (
            "has no all-reduce between replicas to defer: with parallelism.shard_optimizer_over_replicas = true, "
            'gradients are exchanged between replicas once per step in every mode; set mode = "immediate"'
        )
        also: KeyPath = ("parallelism", "shard_optimizer_over_replicas")
        yield Problem(("gradient_accumulation", "mode"), reason, mode, also=(also,))
    elif config.parallelism.data_parallel_replicate_degree == 1:
        remedy = 'set data_parallel_replicate_degree to 2 or more, or set mode = "immediate" or "deferred"'
        reason = f"requires {format_key(degree)} > 1 (HSDP); {remedy}"
        yield Problem(("gradient_accumulation", "mode"), reason, mode, also=(degree,))


def parameters_can_stay_unsharded(config: JobConfig) -> Iterator[Problem]:
    """With `keep_params_unsharded = true`, report a problem for each key that reshards parameters after forward, and
    for a loss that frees the parameters in each step."""
    key = ("gradient_accumulation", "keep_params_unsharded")
    if not config.gradient_accumulation.keep_params_unsharded:
        return
    if config.loss.frees_parameters:
        name = config.loss.name
        cause = f'loss.name = "{name}"' if config.loss.kind.frees_parameters else f'loss.{name}.reference = "base"'
        reason = f"{cause} also runs the model without a backward, which reshards the parameters; set it to false"
        yield Problem(key, reason, True, also=(("loss",),))
    reshards = ("parallelism", "fsdp_reshard_after_forward")
    for other, reshard in _with_rules(config, reshards, "reshard_after_forward"):
        if reshard in ("always", True):
            reason = (
                "reshards parameters that gradient_accumulation.keep_params_unsharded = true keeps unsharded; "
                "remove one of the two keys"
            )
            yield Problem(other, reason, reshard, also=(key,))


def attention_backend_is_used(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `kernels.attention` names a kernel of `scaled_dot_product_attention`, but the job's attention
    runs as FlexAttention."""
    backend = config.kernels.attention
    if backend == "auto" or known_args(config.model) is None:
        return
    for what, also in islice(beyond_causal_attention(config), 1):
        reason = f'supports only plain causal attention, but the job has {what}; set attention = "auto"'
        yield Problem(("kernels", "attention"), reason, backend, also)


ACCUMULATION_RULES = (
    deferred_gradients_accumulate_in_float32,
    deferred_all_reduces_exist,
    parameters_can_stay_unsharded,
    *SPLIT_BACKWARD_RULES,
)
"""Rules for gradient accumulation modes. The planner does not compare modes that violate one of these rules."""

PRECISION_RULES = (
    precision_rules_have_a_target,
    precision_rules_can_be_reached,
    attention_backend_is_used,
    *ACCUMULATION_RULES,
)
"""Rules for precision, kernels and gradient accumulation."""


def _target(rule: PrecisionRule) -> tuple[str | None, str | tuple[str, ...] | None]:
    return rule.type, rule.match


def _with_rules(config: JobConfig, key: tuple[str, str], of_rule: str) -> Iterator[tuple[KeyPath, object]]:
    """Yield (key, value) for a key of the job, and for the key `of_rule` of each precision rule."""
    yield key, getattr(getattr(config, key[0]), key[1])
    for index, rule in enumerate(config.precision.rules):
        yield ("precision", "rules", index, of_rule), getattr(rule, of_rule)
