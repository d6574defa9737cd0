"""The host's memory, where tensors live on it."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of mallopt(3)."""

_NEVER = 2**31 - 1
"""The largest C int, in bytes."""

_OLDER_LIMIT = 32 * 2**20
"""What older versions of glibc take at most, where addresses have 64 bits."""

_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory(environment: Mapping[str, str] = os.environ) -> bool:
    """Have this process keep the memory of freed tensors for those to come, as PyTorch's allocator for CUDA does.

    glibc gives large blocks back to the system and asks for them again in every step, and the system then clears each
    page when it is first touched (mallopt(3)). Nothing is changed with another C library (returns False), or where the
    user's environment says how to allocate.
    """
    if platform.libc_ver()[0] != "glibc" or any(name in environment for name in _VARIABLES):
        return False
    set_option = ctypes.CDLL(None).mallopt
    is_set = set_option(_MMAP_THRESHOLD, _NEVER) or set_option(_MMAP_THRESHOLD, _OLDER_LIMIT)
    return bool(is_set and set_option(_TRIM_THRESHOLD, _NEVER))
