"""The allocator of titan_launch.cpu reuses freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from titan_launch.cpu.allocator import keep_freed_memory

PROGRAM = """
import ctypes, resource, sys
from titan_launch.cpu.allocator import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory({})
    end_of_heap = ctypes.CDLL(None).sbrk
    end_of_heap.restype = ctypes.c_void_p
    before = end_of_heap(0)
    bytes(2**31)  # freed at once; its pages are never used
    assert end_of_heap(0) - before >= 2**31
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytes(bytearray(size << 20)) for size in (3, 80, 5)]
    del blocks
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


def faults(word: str) -> int:
    """Return the number of page faults while 176 MiB are allocated and freed for the fourth time."""
    return int(subprocess.run([sys.executable, "-c", PROGRAM, word], check=True, capture_output=True).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_is_reused() -> None:
    assert faults("leave") > 10_000
    assert faults("keep") < 100


def test_settings_of_the_user_are_not_changed() -> None:
    assert not keep_freed_memory({"MALLOC_TRIM_THRESHOLD_": "1000"})
