"""The installed release of PyTorch, and differences between releases. This module does not import torch."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

NEWEST_TESTED = (2, 15)
"""Newest tested release (docs/verification/pytorch_releases.md)."""


@cache  # reads a file, and is called in every microbatch of a pipeline
def torch_release() -> tuple[int, int]:
    """Return major and minor number of the installed torch, such as (2, 13). Without torch: NEWEST_TESTED."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return NEWEST_TESTED
    return int(major), int(minor)


def is_tested_release() -> bool:
    """Return True if the installed torch is not newer than NEWEST_TESTED.

    On a newer release, features that use private state of PyTorch are switched off (`torch_private`).
    """
    return torch_release() <= NEWEST_TESTED


def planned_release() -> str:
    """Return the release whose FSDP2 schedule the planner follows, as `2.13`: the installed one, or NEWEST_TESTED."""
    return ".".join(map(str, min(torch_release(), NEWEST_TESTED)))


CAN_SHARE_UNITS = torch_release() >= (2, 13)
"""True if one `fully_shard` call casts the inputs and outputs of each of its modules. Before torch 2.13 the call cast
the inputs of the first module that runs and the outputs of the last. Its count was wrong when a module did not run."""

ACCUMULATES_IN_GRAD = torch_release() >= (2, 15)
"""True if autograd accumulates an unsharded parameter's gradients in the reduce dtype (`Tensor.grad_dtype`).

Before torch 2.15 autograd accumulated gradients in the dtype of the parameter, and FSDP2 converted them after the
backward of the unit. FSDP2 converted only the first gradient of a step; later gradients were added without a cast."""

FREES_EARLIER = torch_release() >= (2, 15)
"""True if FSDP2 frees the previous all-gather buffer before the next copy-out, and gradients before their reduction.
Before torch 2.15 local variables kept one of each alive longer."""

SKIPS_DIVISION_BY_ONE = torch_release() >= (2, 15)
"""True if FSDP2 skips the division of gradients by 1 when there is one shard. The division costs a copy."""
