"""Rules across sections for float8. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.errors import KeyPath, Problem

_ENABLE: KeyPath = ("float8", "enable")
_TENSOR: KeyPath = ("parallelism", "tensor_parallel_degree")


def float8_options_are_for_float8(config: JobConfig) -> Iterator[Problem]:
    """How to convert is said only where something is. (Defaults are let pass: a record has them.)"""
    if not config.float8.enable:
        reason = "is for float8.enable = true; set that, or drop this key"
        for name, value in config.float8.changed("recipe", "modules", "emulate"):
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


FLOAT8_RULES = (
    float8_options_are_for_float8,
    float8_has_whole_matrices,
    float8_has_units,
    float8_starts_from_bfloat16,
)
"""All of them."""
