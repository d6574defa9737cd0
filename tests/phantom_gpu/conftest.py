"""Tests on phantom GPUs. They need a CUDA build of torch, and no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from titan_launch.core.errors import UserError
from titan_launch.phantom_gpu.environment import phantom_gpus

REPO = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = f"torch {torch.__version__} has no code for CUDA; scripts/test_torch.sh installs a build that has"
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("phantom"):
            item.add_marker(pytest.mark.skipif(torch.version.cuda is None, reason=reason))


class Phantom:
    """Runs commands on phantom GPUs."""

    def __init__(self, variables: dict[str, str]):
        self._variables = variables

    def run(
        self, *command: str, timeout: float = 200, input: str | None = None, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments. `input`: its standard input. `variables`: further environment variables."""
        streams: dict[str, Any] = {"capture_output": True, "text": True, "input": input}
        environment, arguments = {**self._variables, **variables}, [sys.executable, *command]
        return subprocess.run(arguments, **streams, cwd=REPO, env=environment, timeout=timeout)

    def train(
        self, ranks: int, folder: Path, *options: str, timeout: float = 200, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a job, on several ranks with `launch`, and check that it ends well and marks all lines of its output."""
        launch = ["launch", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = ["-m", "titan_launch", *launch, f"--job.dump_folder={folder}", *options]
        with ExitStack() as stack:
            ended = self.run(*command, timeout=timeout, **{**_phantoms(stack, ranks), **variables})
        assert ended.returncode == 0, ended.stderr[-4000:] + ended.stdout[-2000:]
        assert "is not implemented; it returns the error" not in ended.stderr, ended.stderr
        assert all(line.startswith("phantom: ") for line in ended.stdout.splitlines()), ended.stdout
        return ended


def _phantoms(stack: ExitStack, count: int) -> dict[str, str]:
    """Return the environment of processes with H100s without values. A host without a compiler, or with too little
    memory for them, skips the test with the reason."""
    try:
        return stack.enter_context(phantom_gpus("h100-80gb", count, hides_gpu=True))
    except UserError as error:
        if "cannot be compiled" in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def phantom() -> Iterator[Phantom]:
    """Four phantom GPUs; `train` has as many as the job has ranks."""
    with ExitStack() as stack:
        yield Phantom(_phantoms(stack, 4))
