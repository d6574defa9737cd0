"""Rules across sections for float8. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.errors import KeyPath, Problem

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
