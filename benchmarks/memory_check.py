"""Repetition of tests under glibc's malloc debugging, one process for each CPU core.

    python benchmarks/memory_check.py
    python benchmarks/memory_check.py --repetitions 3 tests/parallel/test_fsdp.py

glibc 2.34 and later ignore MALLOC_CHECK_ unless libc_malloc_debug.so.0 is preloaded. This script preloads the library
and checks first that an overrun of one byte aborts a process. MALLOC_PERTURB_ overwrites each block when it is freed.
The exit status is 1 if any repetition fails. The output of failed repetitions is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = [
    "tests/distributed/test_collectives.py",
    "tests/parallel/test_batchnorm.py",
    "tests/parallel/test_context_parallel.py",
    "tests/cpu/test_blocked_attention.py",
]
DEBUGGING = {"LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3", "MALLOC_PERTURB_": "165"}
OVERRUN = """
from ctypes import c_size_t, c_void_p, memset, pythonapi
allocate, free = pythonapi.PyMem_RawMalloc, pythonapi.PyMem_RawFree
allocate.argtypes, allocate.restype, free.argtypes = [c_size_t], c_void_p, [c_void_p]
block = allocate(20)  # glibc reserves 24 bytes, so that only debugging detects a write to byte 20
memset(block + 20, 1, 1)
free(block)
"""


def check_debugging(environment: dict[str, str]) -> None:
    """End with an error if glibc does not detect an overrun in this environment."""
    result = subprocess.run([sys.executable, "-c", OVERRUN], env=environment, capture_output=True, text=True)
    if result.returncode != -signal.SIGABRT:
        raise SystemExit(f"error: malloc debugging is not active; glibc >= 2.34 is needed: {result.stderr.strip()}")


def run_at_once(tests: list[str], count: int, environment: dict[str, str]) -> list[str]:
    """Run the tests in `count` processes at the same time. Return the output of those that fail."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(number)) for number in range(count)]
        processes = []
        for output in outputs:
            options = ["-m", "not multi_node", "-p", "no:cacheprovider", "--basetemp", f"{output}.tmp"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
            with output.open("w") as file:
                processes.append(subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT))
        statuses = [process.wait() for process in processes]
        return [output.read_text() for output, status in zip(outputs, statuses, strict=True) if status != 0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10, help="runs of the tests on each core (default: 10)")
    parser.add_argument("tests", nargs="*", default=TESTS, help=f"arguments of pytest ({' '.join(TESTS)})")
    arguments = parser.parse_args()
    environment = {**os.environ, **DEBUGGING}
    check_debugging(environment)
    cores, failures = os.cpu_count() or 1, 0
    for repetition in range(1, arguments.repetitions + 1):
        start = time.monotonic()
        failed = run_at_once(arguments.tests, cores, environment)
        failures += len(failed)
        print(*failed, sep="\n", end="", flush=True)
        print(f"repetition {repetition}: {len(failed)} of {cores} failed, {time.monotonic() - start:.0f} s", flush=True)
    print(f"failed: {failures} of {cores * arguments.repetitions}")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
