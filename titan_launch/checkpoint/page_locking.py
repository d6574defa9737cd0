"""Page-locked (pinned) host memory: a GPU copies into it at full speed, and without the host waiting."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from titan_launch.plan.hardware import GIB

_log = logging.getLogger(__name__)

_PORTABLE = 1
"""`cudaHostRegisterPortable`: the memory counts as page-locked in the CUDA contexts of all devices."""


@contextmanager
def page_locked(memory: Tensor, device: torch.device) -> Iterator[None]:
    """Register host memory with CUDA until the end of the block; on a CPU, do nothing.

    `memory` is of any kind, shared memory too, and of exactly the size that is needed: PyTorch's allocator of pinned
    memory rounds up to a power of two. Memory that CUDA refuses stays as it is; copies to it are slower.
    """
    is_locked = device.type == "cuda" and _succeeds(
        lambda cudart: cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE),
        device,
        f"{memory.nbytes / GIB:.3f} GiB of host memory cannot be page-locked, so copies to it are slower",
    )
    yield
    if is_locked:
        _succeeds(lambda cudart: cudart.cudaHostUnregister(memory.data_ptr()), device, "host memory cannot be unlocked")


def _succeeds(call: Callable[[Any], Any], device: torch.device, failure: str) -> bool:
    """Call the CUDA runtime, and log a failure.

    The call is made in a thread of its own: CUDA keeps the last error of each thread, and PyTorch would raise it when
    that thread launches its next kernel. The device is set since a new thread's is GPU 0, on which every rank of the
    host would open a context.
    """

    def checked() -> None:
        with torch.cuda.device(device):
            torch.cuda.check_error(call(torch.cuda.cudart()))

    with ThreadPoolExecutor(1) as thread:
        error = thread.submit(checked).exception()
    if isinstance(error, torch.cuda.CudaError):
        _log.warning("%s: CUDA says: %s", failure, error)
    elif error is not None:
        raise error
    return error is None
