"""The tests marked `gpu`, with as many processes as fit into the GPU's memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu.processes import REPO, Ended, run_process

NAME = "tests marked gpu"

WITHOUT_VALUES = (
    "tests/metrics/test_meter.py",
    "tests/parallel/test_activation_offload.py",
    "tests/train/test_cuda.py",
)
"""The files whose tests compare no values."""

TEST_GIB = 33
"""Memory of the largest test: 29.1 GiB by the planner (8B width, 2 layers, deferred), 10 % for workspaces inside of
kernels, and the CUDA context."""

_SECONDS_ONE_BY_ONE = 450
"""Time of all tests without parallelism, on an H200: 14 of them start the launcher, and 18 compile FlexAttention."""


def num_workers(free_gib: float, num_cpus: int) -> int:
    """Return the number of tests that run at the same time. Each has 2 CPU cores."""
    return max(1, min(int(free_gib // TEST_GIB), num_cpus // 2))


def free_gib() -> float:
    """Return the free memory of the GPU; 0 without one, or if `nvidia-smi` does not tell.

    PyTorch's function would open a CUDA context in this process. The context takes memory from the measured processes.
    """
    if not torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return 0
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits", "--id=0"]
    ended = subprocess.run(command, capture_output=True, text=True)
    return float(ended.stdout) / 1024 if ended.returncode == 0 else 0


def workers() -> int:
    """Return the number of tests that run at the same time on this machine."""
    return num_workers(free_gib(), len(os.sched_getaffinity(0)))


def expected_seconds() -> float:
    """Return an estimate of the time for all tests on this machine."""
    return 30 + _SECONDS_ONE_BY_ONE / workers()


def command(*options: str, has_values: bool = True) -> list[str]:
    """Return the command that runs the tests. It collects only their files, since importing all tests takes longer.

    `has_values`: False on a device that computes nothing.
    """
    files = [file for file in sorted((REPO / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in file.read_text()]
    names = [str(file.relative_to(REPO)) for file in files]
    names = [name for name in names if has_values or name in WITHOUT_VALUES]
    return [sys.executable, "-m", "pytest", "-m", "gpu", "-rA", "--numprocesses", str(workers()), *options, *names]


def run_tests(limit: float, log: Path, has_values: bool) -> Ended:
    """Run the tests for at most `limit` seconds."""
    return run_process(command(has_values=has_values), limit, log)


def summary(ended: Ended) -> str:
    """Return one line: pytest's last line and the names of failed tests."""
    if ended.status is None:
        return ended.failure
    lines = ended.output.strip().splitlines()
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return "; ".join([lines[-1] if lines else "no output", *failed])
