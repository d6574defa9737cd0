"""Reuse of the memory of freed tensors on a CPU.

`keep_freed_memory` changes glibc's defaults, which return large freed blocks to the operating system. A test compares
the page faults with and without this change (tests/cpu/test_allocator.py). The allocator does not affect values.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of mallopt(3)."""

_NEVER = -1
"""Threshold that is never reached: glibc converts -1 to the largest `size_t`."""

_OLDER_LIMIT = 32 * 2**20
"""The largest `M_MMAP_THRESHOLD` that older versions of glibc accept on 64-bit systems, in bytes. They reject -1."""

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
"""Environment variables with which a user configures malloc."""


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Keep the memory of freed tensors in this process for later tensors, as PyTorch's allocator for CUDA does.

    By default glibc returns large blocks to the system and requests them again in every step. The system then clears
    each page at its first use (mallopt(3)). Return True if glibc accepts the new thresholds. Without glibc, or if
    `environment` has one of `_VARIABLES`, change nothing and return False.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in environment for name in _VARIABLES):
        return False
    set_option = ctypes.CDLL(None).mallopt
    is_set = set_option(_MMAP_THRESHOLD, _NEVER) or set_option(_MMAP_THRESHOLD, _OLDER_LIMIT)
    return bool(is_set and set_option(_TRIM_THRESHOLD, _NEVER))
