"""The installed release of PyTorch: whether it was tested, and what releases do differently. No torch is imported."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

OLDEST_TESTED, NEWEST_TESTED = (2, 11), (2, 15)
"""The releases on which the whole test suite has passed, from and to (docs/pytorch_releases.md)."""


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
"""Whether one `fully_shard` call casts the inputs and outputs of every module it is given. Before torch 2.13 it cast
the inputs of the first that runs and the outputs of the last, and lost count when one of them did not run."""

ACCUMULATES_IN_GRAD = torch_release() >= (2, 15)
"""Whether autograd accumulates an unsharded parameter's gradients in the dtype of the reduction (`Tensor.grad_dtype`).
Before torch 2.15 it accumulated them in the dtype of the parameter, and FSDP2 converted them after the backward of the
unit. Only the first gradient of a step is converted; later ones are added to it as they are."""
