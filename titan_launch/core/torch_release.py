"""The installed release of PyTorch: whether it was tested, and what releases do differently. No torch is imported."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

NEWEST_TESTED = (2, 15)
"""The newest release that was tested (docs/verification/pytorch_releases.md)."""


@cache  # reads a file, and is asked in every microbatch of a pipeline
def torch_release() -> tuple[int, int]:
    """Major and minor number of the installed torch, such as (2, 13). Without torch: the newest one tested."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return NEWEST_TESTED
    return int(major), int(minor)


def is_tested_release() -> bool:
    """Return whether the installed torch is not newer than the newest one tested.

    On a newer release, features that rest on private state of PyTorch are switched off (`torch_private`).
    """
    return torch_release() <= NEWEST_TESTED


def planned_release() -> str:
    """Return the release whose schedule the planner follows, as `2.13`: the installed one, or the newest tested."""
    return ".".join(map(str, min(torch_release(), NEWEST_TESTED)))


CAN_SHARE_UNITS = torch_release() >= (2, 13)
"""True if one `fully_shard` call casts the inputs and outputs of every module it is given. Before torch 2.13 it cast
the inputs of the first that runs and the outputs of the last, and lost count when one of them did not run."""

ACCUMULATES_IN_GRAD = torch_release() >= (2, 15)
"""True if autograd accumulates an unsharded parameter's gradients in the reduce dtype (`Tensor.grad_dtype`). Before
torch 2.15 it accumulated them in the dtype of the parameter, and FSDP2 converted them after the backward of the unit.
Only the first gradient of a step is converted; later ones are added to it as they are."""

FREES_EARLIER = torch_release() >= (2, 15)
"""True if FSDP2 frees the previous all-gather before it copies out the next, and gradients before it reduces them.
Before torch 2.15 local variables kept one of each alive longer."""

SKIPS_DIVISION_BY_ONE = torch_release() >= (2, 15)
"""True if FSDP2 does not divide gradients by the factor 1 where there is one shard, which costs a copy of them."""
