"""Rules across sections for the optimizer. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.errors import KeyPath, Problem

_NAME: KeyPath = ("optimizer", "name")
_GROUPS: KeyPath = ("optimizer", "param_groups")
_STATE_DTYPE: KeyPath = ("optimizer", "state_dtype")
_ROUNDING: KeyPath = ("optimizer", "rounding")
_MASTERS: KeyPath = ("optimizer", "master_weights")
_STORAGE: KeyPath = ("precision", "storage_dtype")
_RULES: KeyPath = ("precision", "rules")


def muon_is_used(config: JobConfig) -> Iterator[Problem]:
    """Muon's settings are for parameters that it updates. (Defaults are let pass: a record has them.)"""
    optimizer = config.optimizer
    if optimizer.name == "Muon" or any(group.algorithm == "Muon" for group in optimizer.param_groups):
        return
    reason = (
        f'is for Muon, and optimizer.name is "{optimizer.name}" for all parameters; set that to "Muon", give '
        'a parameter group algorithm = "Muon", or drop this key'
    )
    for name, value in optimizer.muon.changed():
        yield Problem(("optimizer", "muon", name), reason, value, also=(_NAME, _GROUPS))


def masters_are_of_bfloat16(config: JobConfig) -> Iterator[Problem]:
    """A parameter that is stored in float32 is its own master."""
    if config.optimizer.master_weights and not _stores_bfloat16(config):
        reason = (
            "keeps float32 copies of parameters that are stored in bfloat16, and none is; "
            'set precision.storage_dtype = "bfloat16", or drop this key'
        )
        yield Problem(_MASTERS, reason, True, also=(_STORAGE, _RULES))


def stochastic_rounding_is_of_bfloat16(config: JobConfig) -> Iterator[Problem]:
    """Nothing is rounded where everything is float32; with masters, parameters are not what is updated."""
    optimizer = config.optimizer
    if optimizer.rounding != "stochastic" or optimizer.state_dtype == "bfloat16":
        return
    also = (_STATE_DTYPE, _MASTERS, _STORAGE, _RULES)
    if not _stores_bfloat16(config):
        reason = (
            "rounds to bfloat16, and parameters and moments are float32; set precision.storage_dtype or "
            'optimizer.state_dtype = "bfloat16", or "nearest"'
        )
        yield Problem(_ROUNDING, reason, optimizer.rounding, also=also)
    elif optimizer.master_weights and optimizer.state_dtype == "float32":
        reason = (
            "rounds updates, which optimizer.master_weights = true keeps in float32, as optimizer.state_dtype does the "
            'moments; set "nearest", or drop one of these'
        )
        yield Problem(_ROUNDING, reason, optimizer.rounding, also=also)


def implementation_is_pytorchs(config: JobConfig) -> Iterator[Problem]:
    """PyTorch's implementations know neither masters nor other dtypes. (The default is let pass.)"""
    optimizer = config.optimizer
    chosen, _ = next(optimizer.changed("state_dtype", "rounding", "master_weights"), (None, None))
    if optimizer.implementation != "fused" and chosen is not None:
        reason = f"is one of PyTorch's, which have no {chosen}; drop one of the two keys"
        yield Problem(("optimizer", "implementation"), reason, optimizer.implementation, also=(("optimizer", chosen),))


OPTIMIZER_RULES = (
    muon_is_used,
    masters_are_of_bfloat16,
    stochastic_rounding_is_of_bfloat16,
    implementation_is_pytorchs,
)
"""All of them."""


def _stores_bfloat16(config: JobConfig) -> bool:
    """Whether any parameter may be stored in bfloat16."""
    return "bfloat16" in (config.precision.storage_dtype, *(rule.storage_dtype for rule in config.precision.rules))
