"""Replacement of PyTorch's functional all-gather of CPU tensors, which corrupts memory on gloo.

A gloo process group has two worker threads. After each collective, a worker stores its name in a `std::string` of the
group without a lock (`pgStatus_->lastCompletedWorkName` in `ProcessGroupGloo::runLoop`). If both workers do so at the
same time, one buffer is freed twice. Only names of more than 15 characters have a buffer on the heap. These are
`ALLGATHER_COALESCED`, the collective behind the functional all-gather, and `_ALLREDUCE_SPARSE`.

Plain twin: PyTorch's own kernel of the same operator. A test compares both (tests/parallel/test_gloo_all_gather.py).
The replacement is for correctness, not for speed, and GPU runs need it for tensors on the host. So it is not in `cpu/`.

PyTorch 2.11 to 2.15 have this race (docs/verification/reliability.md); no upstream issue was found. DTensor and
synchronized BatchNorm call the functional all-gather. Newer releases keep their own, because the operators used here
are private.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from titan_launch.core.torch_release import is_tested_release


@cache
def replace_gloo_all_gather() -> torch.library.Library | None:
    """Make the functional all-gather of CPU tensors use the collective `ALLGATHER`, until the process ends.

    The operator stays the same for autograd, tracing, torch.compile and dispatch modes. Repeated calls do nothing.
    """
    if not is_tested_release():
        return None
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor", _all_gather, "CPU")
    return library  # the cache keeps it alive: PyTorch removes the kernel with it


def _all_gather(x: Tensor, ranks: int, group_name: str) -> Tensor:
    """Start to gather [n, ...] of every rank into [ranks * n, ...]; `wait_tensor` waits for the result."""
    values = torch.view_as_real(x) if x.is_complex() else x  # gloo has no complex dtypes
    gathered = values.new_empty((ranks * values.shape[0], *values.shape[1:]))
    torch.ops._c10d_functional.all_gather_into_tensor_out.default(values, ranks, group_name, out=gathered)
    return torch.view_as_complex(gathered) if x.is_complex() else gathered
