"""Rules across sections for kernels. Part of `titan_launch.config.rules`."""

from __future__ import annotations

from collections.abc import Iterator

from titan_launch.config.job import JobConfig
from titan_launch.config.kernels import KernelsConfig
from titan_launch.errors import KeyPath, Problem

_DEVICE: KeyPath = ("job", "device")
_ATTENTION: KeyPath = ("kernels", "attention")


def kernels_are_there(config: JobConfig) -> Iterator[Problem]:
    """A job for CPUs asks for no kernel that only GPUs have. (Where `job.device` is "auto", the run finds out.)"""
    if config.job.device == "cpu":
        yield from missing_on_cpu(config.kernels)


def missing_on_cpu(kernels: KernelsConfig) -> Iterator[Problem]:
    """What of `[kernels]` a CPU does not have."""
    if kernels.attention in ("cudnn", "efficient"):
        reason = 'is a kernel for GPUs, and the device is "cpu"; set "auto", "flash" or "math", or train on GPUs'
        yield Problem(_ATTENTION, reason, kernels.attention, also=(_DEVICE,))
    for name, value in kernels.changed("float32_precision", "bf16_reduced_precision_reduction"):
        reason = 'is a setting of GPUs, and the device is "cpu"; drop this key, or train on GPUs'
        yield Problem(("kernels", name), reason, value, also=(_DEVICE,))


def ring_has_kernels(config: JobConfig) -> Iterator[Problem]:
    """PyTorch's ring attention divides fused kernels only."""
    degree = config.parallelism.context_parallel_degree
    if degree > 1 and config.kernels.attention == "math":
        reason = (
            f"cannot be divided over parallelism.context_parallel_degree = {degree} ranks: ring attention is there for "
            'the fused kernels; set "auto"'
        )
        yield Problem(_ATTENTION, reason, "math", also=(("parallelism", "context_parallel_degree"),))


KERNEL_RULES = (kernels_are_there, ring_has_kernels)
"""All of them."""
