"""Rules across sections for precision rules, gradient accumulation and float8."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.parallelism import SPLIT_BACKWARD_RULES
from titan_launch.config.sections.precision import PrecisionRule
from titan_launch.core.errors import KeyPath, Problem, format_key


def precision_rules_say_what_they_match(config: JobConfig) -> Iterator[Problem]:
    """A precision rule has `type`, `match` or both."""
    for index, rule in enumerate(config.precision.rules):
        if not rule.type and not rule.match:
            key: KeyPath = ("precision", "rules", index)
            reason = 'matches nothing: give it type = "ClassName", match = "module.path", or both'
            yield Problem(key, reason, also=((*key, "type"), (*key, "match")))


def precision_rules_can_be_reached(config: JobConfig) -> Iterator[Problem]:
    """The first rule that matches wins, so a second one for the same modules does nothing."""
    first: dict[tuple[str | None, str | tuple[str, ...] | None], int] = {}
    for index, rule in enumerate(config.precision.rules):
        earlier = first.setdefault(_target(rule), index)
        if earlier != index and any(_target(rule)):
            reason = f"matches what precision.rules.{earlier} matches, which comes first and wins; merge the two"
            yield Problem(("precision", "rules", index), reason, also=(("precision", "rules", earlier),))


def deferred_gradients_accumulate_in_float32(config: JobConfig) -> Iterator[Problem]:
    """Deferred modes accumulate in the reduce dtype, where bfloat16 is too coarse. (`auto` then leaves them out.)"""
    mode = config.gradient_accumulation.mode
    if mode in ("immediate", "auto"):
        return
    reason = (
        f'gradient_accumulation.mode = "{mode}" adds gradients up in this dtype, with a relative error of 4e-3 over 4 '
        "microbatches and 8e-3 over 64, against 1e-9 and 2e-8 in float32 (measured); "
        'set "float32", or gradient_accumulation.mode = "immediate"'
    )
    for key, dtype in _reduce_dtypes(config):
        if dtype == "bfloat16":
            yield Problem(key, reason, dtype, also=(("gradient_accumulation", "mode"),))


def deferred_all_reduce_has_replicas(config: JobConfig) -> Iterator[Problem]:
    """Without replicas there is no all-reduce to defer."""
    degree = ("parallelism", "data_parallel_replicate_degree")
    mode = config.gradient_accumulation.mode
    if mode == "deferred_all_reduce" and config.parallelism.data_parallel_replicate_degree == 1:
        reason = f'needs {format_key(degree)} > 1 (HSDP); without replicas use "immediate" or "deferred"'
        yield Problem(("gradient_accumulation", "mode"), reason, mode, also=(degree,))


def parameters_can_stay_unsharded(config: JobConfig) -> Iterator[Problem]:
    """Parameters cannot both be kept whole and be freed after forward."""
    key = ("gradient_accumulation", "keep_params_unsharded")
    if not config.gradient_accumulation.keep_params_unsharded:
        return
    for other, reshard in _reshard_after_forward(config):
        if reshard in ("always", True):
            reason = "frees after forward what gradient_accumulation.keep_params_unsharded = true keeps; drop one"
            yield Problem(other, reason, reshard, also=(key,))


ACCUMULATION_RULES = (
    deferred_gradients_accumulate_in_float32,
    deferred_all_reduce_has_replicas,
    parameters_can_stay_unsharded,
    *SPLIT_BACKWARD_RULES,
)
"""What a mode of accumulation must go with; the planner leaves out the modes that break one."""

PRECISION_RULES = (
    precision_rules_say_what_they_match,
    precision_rules_can_be_reached,
    *ACCUMULATION_RULES,
)
"""All of them."""


def _target(rule: PrecisionRule) -> tuple[str | None, str | tuple[str, ...] | None]:
    return rule.type, rule.match


def _reduce_dtypes(config: JobConfig) -> Iterator[tuple[KeyPath, str | None]]:
    yield ("precision", "reduce_dtype"), config.precision.reduce_dtype
    for index, rule in enumerate(config.precision.rules):
        yield ("precision", "rules", index, "reduce_dtype"), rule.reduce_dtype


def _reshard_after_forward(config: JobConfig) -> Iterator[tuple[KeyPath, str | bool | None]]:
    yield ("parallelism", "fsdp_reshard_after_forward"), config.parallelism.fsdp_reshard_after_forward
    for index, rule in enumerate(config.precision.rules):
        yield ("precision", "rules", index, "reshard_after_forward"), rule.reshard_after_forward


_ENABLE: KeyPath = ("float8", "enable")
_ALL_GATHER: KeyPath = ("float8", "all_gather")
_TENSOR: KeyPath = ("parallelism", "tensor_parallel_degree")


def float8_options_are_for_float8(config: JobConfig) -> Iterator[Problem]:
    """How to convert is said only where something is. (Defaults are let pass: a record has them.)"""
    if not config.float8.enable:
        reason = "is for float8.enable = true; set that, or drop this key"
        for name, value in config.float8.changed("recipe", "modules", "all_gather", "emulate"):
            yield Problem(("float8", name), reason, value, also=(_ENABLE,))


def float8_has_whole_matrices(config: JobConfig) -> Iterator[Problem]:
    """A rank that has a part of a matrix would scale by that part."""
    degree = config.parallelism.tensor_parallel_degree
    if config.float8.enable and degree > 1:
        reason = (
            f"is not for matrices that {degree} ranks share (parallelism.tensor_parallel_degree): each would scale by "
            "its own part; shard over more ranks instead (data_parallel_shard_degree), or set false"
        )
        yield Problem(_ENABLE, reason, True, also=(_TENSOR,))


def float8_has_units(config: JobConfig) -> Iterator[Problem]:
    """CPUs have no 8-bit matrix units. (Where `job.device` is "auto", the run finds out.)"""
    if config.float8.enable and not config.float8.emulate and config.job.device == "cpu":
        reason = 'needs the matrix units of a GPU, and the device is "cpu"; set float8.emulate = true, or false here'
        yield Problem(_ENABLE, reason, True, also=(("job", "device"), ("float8", "emulate")))


def float8_starts_from_bfloat16(config: JobConfig) -> Iterator[Problem]:
    """The products' results are bfloat16. (Rules for single modules are looked at with the model.)"""
    dtype = config.precision.param_dtype
    if config.float8.enable and dtype != "bfloat16":
        reason = f'is for computation in bfloat16, and precision.param_dtype is "{dtype}"; set "bfloat16" there'
        yield Problem(_ENABLE, reason, True, also=(("precision", "param_dtype"),))


def float8_gathers_by_one_scale(config: JobConfig) -> Iterator[Problem]:
    """A rank has rows of a matrix: it can scale them before they are gathered if one number is the scale of all."""
    float8 = config.float8
    if float8.enable and float8.all_gather and float8.recipe != "tensorwise":
        reason = (
            f'is for one scale for each tensor, and float8.recipe is "{float8.recipe}"; set "tensorwise" there, or '
            "false here"
        )
        yield Problem(_ALL_GATHER, reason, True, also=(("float8", "recipe"),))


def float8_gathers_from_the_device(config: JobConfig) -> Iterator[Problem]:
    """FSDP2 copies an offloaded weight to the device as another object, without the scale that the step left on it."""
    if config.float8.enable and config.float8.all_gather and config.training.enable_cpu_offload:
        reason = (
            "is not for parameters on the host (training.enable_cpu_offload): on the way to the device they lose the "
            "scales that are computed after each step; set false in one of the two"
        )
        yield Problem(_ALL_GATHER, reason, True, also=(("training", "enable_cpu_offload"),))


FLOAT8_RULES = (
    float8_options_are_for_float8,
    float8_has_whole_matrices,
    float8_has_units,
    float8_starts_from_bfloat16,
    float8_gathers_by_one_scale,
    float8_gathers_from_the_device,
)
"""All of them."""
