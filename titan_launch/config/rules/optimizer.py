"""Rules across sections for the optimizer. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.config.optimizers import ALGORITHMS
from titan_launch.config.sections.base import Section
from titan_launch.config.sections.training import OptimizerConfig
from titan_launch.core.errors import KeyPath, Problem, format_key

_NAME: KeyPath = ("optimizer", "name")
_GROUPS: KeyPath = ("optimizer", "param_groups")
_MOMENTUM: KeyPath = ("optimizer", "sgd", "momentum")
_STATE_DTYPE: KeyPath = ("optimizer", "state_dtype")
_ROUNDING: KeyPath = ("optimizer", "rounding")
_MASTERS: KeyPath = ("optimizer", "master_weights")
_STORAGE: KeyPath = ("precision", "storage_dtype")
_RULES: KeyPath = ("precision", "rules")


def settings_are_of_a_used_algorithm(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for each setting of an algorithm that updates no parameter of the job. (Default values are
    accepted, because the `config.json` of a run contains every key.)"""
    read = {setting for name in _algorithms(config.optimizer) for setting in ALGORITHMS[name].settings}
    for algorithm, row in ALGORITHMS.items():
        reason = (
            f"is a setting of {algorithm}, which updates no parameter of this job; remove this key, set "
            f'optimizer.name = "{algorithm}", or set algorithm = "{algorithm}" in a parameter group'
        )
        for setting in row.settings:
            for key, value in _changed(config.optimizer, setting) if setting not in read else ():
                yield Problem(("optimizer", *key), reason, value, also=(_NAME, _GROUPS))
        read |= {*row.settings}


def nesterov_has_momentum(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `nesterov` is true but `momentum` is 0 (SGD)."""
    if config.optimizer.sgd.nesterov and not config.optimizer.sgd.momentum:
        reason = f"requires momentum, but {format_key(_MOMENTUM)} is 0; set momentum above 0, or nesterov = false"
        yield Problem(("optimizer", "sgd", "nesterov"), reason, True, also=(_MOMENTUM,))


def state_dtype_has_a_state(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `state_dtype` is set but the optimizer has no state tensors (SGD without momentum)."""
    optimizer = config.optimizer
    if optimizer.state_dtype and not any(ALGORITHMS[name].state(optimizer) for name in _algorithms(optimizer)):
        reason = (
            f"is the dtype of the momentum, but {format_key(_MOMENTUM)} is 0; remove this key, or set momentum above 0"
        )
        yield Problem(_STATE_DTYPE, reason, optimizer.state_dtype, also=(_MOMENTUM, _NAME, _GROUPS))


def eight_bit_state_has_whole_rows(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if the state is in 8 bits with tensor parallelism, which divides rows, and so blocks."""
    degree = config.parallelism.tensor_parallel_degree
    if config.optimizer.state_dtype == "int8" and degree > 1:
        reason = (
            f"is not supported with parallelism.tensor_parallel_degree = {degree}: tensor parallelism divides the rows "
            'of some matrices, whose elements share scales; set "bfloat16", or tensor_parallel_degree = 1'
        )
        yield Problem(_STATE_DTYPE, reason, "int8", also=(("parallelism", "tensor_parallel_degree"),))


def masters_are_of_bfloat16(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `master_weights` is true but no parameter is stored in bfloat16."""
    if config.optimizer.master_weights and not _stores_bfloat16(config):
        reason = (
            "keeps float32 copies of bfloat16 parameters, but no parameter is stored in bfloat16; "
            'set precision.storage_dtype = "bfloat16", or remove this key'
        )
        yield Problem(_MASTERS, reason, True, also=(_STORAGE, _RULES))


def stochastic_rounding_is_of_bfloat16(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if rounding is stochastic but neither the moments nor the updated parameters are bfloat16. (With
    master weights, the optimizer updates float32 copies of the parameters.)"""
    optimizer = config.optimizer
    if optimizer.rounding != "stochastic" or optimizer.state_dtype == "bfloat16":
        return
    also = (_STATE_DTYPE, _MASTERS, _STORAGE, _RULES)
    if not _stores_bfloat16(config):
        reason = (
            "rounds to bfloat16, but parameters and moments are float32; set precision.storage_dtype or "
            'optimizer.state_dtype = "bfloat16", or set optimizer.rounding = "nearest"'
        )
        yield Problem(_ROUNDING, reason, optimizer.rounding, also=also)
    elif optimizer.master_weights and optimizer.state_dtype == "float32":
        reason = (
            "rounds to bfloat16, but optimizer.master_weights = true updates float32 copies, and optimizer.state_dtype "
            'keeps the moments in float32; set "nearest", or remove one of these two keys'
        )
        yield Problem(_ROUNDING, reason, optimizer.rounding, also=also)


def implementation_is_pytorchs(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `implementation` is set together with a setting that PyTorch's optimizers do not support.
    (`fused` is accepted, because it is the default.)"""
    optimizer = config.optimizer
    chosen, _ = next(optimizer.changed("state_dtype", "rounding", "master_weights"), (None, None))
    if optimizer.implementation != "fused" and chosen is not None:
        reason = f"is PyTorch's implementation, which does not support {chosen}; remove one of the two keys"
        yield Problem(("optimizer", "implementation"), reason, optimizer.implementation, also=(("optimizer", chosen),))


def ema_settings_have_an_effect(config: JobConfig) -> Iterator[Problem]:
    """Report settings of `[ema]` without `ema.decay`, weights to validate without a validation, and an average that the
    run ends without. (Defaults are accepted: the `config.json` of a run contains them.)"""
    ema, decay, training = config.ema, ("ema", "decay"), config.training
    if ema.decay is None:
        for name, value in ema.changed():
            reason = "has no effect without ema.decay; set a decay such as 0.999, or remove this key"
            yield Problem(("ema", name), reason, value, also=(decay,))
        return
    if not config.validation.freq and ema.validate_with != "both":
        reason = "has no effect with validation.freq = 0; set validation.freq, or remove this key"
        yield Problem(("ema", "validate_with"), reason, ema.validate_with, also=(("validation", "freq"),))
    if training.steps is not None and ema.start_step + ema.every_steps > training.steps:
        name = "every_steps" if ema.every_steps > training.steps else "start_step"
        length = f"{training.steps} steps ({format_key(training.length_key)})"
        reason = f"leaves no update of the average in {length}; set less"
        yield Problem(("ema", name), reason, getattr(ema, name), also=(training.length_key,))


OPTIMIZER_RULES = (
    settings_are_of_a_used_algorithm,
    nesterov_has_momentum,
    state_dtype_has_a_state,
    eight_bit_state_has_whole_rows,
    masters_are_of_bfloat16,
    stochastic_rounding_is_of_bfloat16,
    implementation_is_pytorchs,
    ema_settings_have_an_effect,
)
"""The rules of this file."""


def _algorithms(optimizer: OptimizerConfig) -> set[str]:
    """Return the algorithms that may update parameters."""
    named = {optimizer.name, *(group.algorithm for group in optimizer.param_groups if group.algorithm)}
    for_others = ALGORITHMS[optimizer.name].for_others
    return named if for_others is None else named | {for_others}


def _changed(optimizer: OptimizerConfig, setting: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (key, value) for each key whose value differs from its default. `setting`: a key or a table of
    `[optimizer]`."""
    section = getattr(optimizer, setting)
    if isinstance(section, Section):
        yield from (((setting, name), value) for name, value in section.changed())
    else:
        yield from (((name,), value) for name, value in optimizer.changed(setting))


def _stores_bfloat16(config: JobConfig) -> bool:
    """Return True if any parameter may be stored in bfloat16."""
    return "bfloat16" in (config.precision.storage_dtype, *(rule.storage_dtype for rule in config.precision.rules))
