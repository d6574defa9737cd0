"""The installed release of PyTorch, and differences between releases. This module does not import torch."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

NEWEST_TESTED = (2, 15)
"""Newest tested release (docs/verification/pytorch_releases.md)."""


@cache  # reads a file, and is called in every microbatch of a pipeline
def torch_release() -> tuple[int, int]:
    """Return the release of the installed torch as (major, minor), such as (2, 13). Without torch, return
    NEWEST_TESTED."""
    try:
        major, minor = version("torch").split(".")[:2]
    except PackageNotFoundError:
        return NEWEST_TESTED
    return int(major), int(minor)


def is_tested_release() -> bool:
    """Return True if the installed torch is not newer than NEWEST_TESTED.

    On a newer release, features that use private state of PyTorch are disabled
    (`titan_launch.distributed.torch_private`).
    """
    return torch_release() <= NEWEST_TESTED


def planned_release() -> str:
    """Return the release of PyTorch whose FSDP2 the planner simulates, such as `2.13`: the installed release, or
    NEWEST_TESTED if the installed release is newer."""
    return ".".join(map(str, min(torch_release(), NEWEST_TESTED)))


CAN_SHARE_UNITS = torch_release() >= (2, 13)
"""True if one `fully_shard` call casts the inputs and outputs of each of its modules. Before torch 2.13, FSDP2 cast
only the inputs of the first module that ran, and the outputs of the last module. If a module did not run, FSDP2 counted
the modules wrongly."""

MIXES_DTYPES_IN_UNIT = torch_release() >= (2, 15)
"""True if the parameters of one FSDP2 unit may have several compute dtypes (`param_dtype_override_fn`)."""

SPLITS_BACKWARD_OF_EXPERTS = torch_release() >= (2, 13)
"""True if pipeline schedules can split the backward of a mixture of experts: gradients of inputs, then of weights.

PyTorch 2.11 frees the nodes of custom (Python) autograd functions before it computes the gradients of weights. PyTorch
2.12 was not tried.
"""

ACCUMULATES_IN_GRAD = torch_release() >= (2, 15)
"""True if autograd accumulates an unsharded parameter's gradients in the reduce dtype (`Tensor.grad_dtype`).

Before torch 2.15 autograd accumulated gradients in the dtype of the parameter, and FSDP2 converted them after the
backward of the unit. FSDP2 converted only the first gradient of a step; later gradients were added without a cast.
"""

FREES_EARLIER = torch_release() >= (2, 15)
"""True if FSDP2 frees the previous all-gather buffer before the next copy-out, and all gradients of a unit once they
are copied for the reduction. Before torch 2.15 local variables kept that buffer and the last gradient alive longer."""

KEEPS_REDUCED_GRADIENTS = torch_release() >= (2, 15)
"""True if FSDP2 keeps the reduced gradients of a unit in the reduce dtype until it has called the hooks of the
parameters. Copies in the storage dtype exist at the same time. Earlier releases free the originals at the cast."""

FREES_WITHOUT_GRADIENTS = torch_release() >= (2, 12)
"""True if FSDP2 frees the reduce-scatter input of the previous unit even if the current unit has no gradients to
reduce."""

FINALIZES_BACKWARD = torch_release() >= (2, 15)
"""True if a schedule with a separate backward of weights ends FSDP2's backward with `FSDPModule.finalize_backward`."""

SKIPS_DIVISION_BY_ONE = torch_release() >= (2, 15)
"""True if FSDP2 skips the division of gradients by 1 if there is one shard. Earlier releases divide, which costs a
copy."""

KEEPS_WORKSPACES = torch_release() < (2, 15)
"""True if PyTorch keeps a cuBLAS workspace for each pair of a thread and a stream that has run a matrix product. From
torch 2.15 on, each product allocates its workspace and frees it (tried on 2.11 and 2.15)."""

DUMPS_FLIGHT_RECORDS_BY = "TORCH_FR_DUMP_ON_TIMEOUT" if torch_release() >= (2, 15) else "TORCH_NCCL_DUMP_ON_TIMEOUT"
"""Environment variable that lets NCCL's watchdog write the flight records. Torch 2.15 warns of the older name."""
