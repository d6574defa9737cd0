"""Tests on phantom GPUs. They need a CUDA build of torch, and no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

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

    def run(self, *command: str, timeout: float = 200, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments. `variables`: further environment variables."""
        environment = {**self._variables, **variables}
        arguments = [sys.executable, *command]
        return subprocess.run(arguments, capture_output=True, text=True, cwd=REPO, env=environment, timeout=timeout)

    def train(self, ranks: int, folder: Path, *options: str, **variables: str) -> list[str]:
        """Run a job with `launch`. Return the lines of its output, after a check that all are marked."""
        command = ["-m", "titan_launch", "launch", f"--nproc-per-node={ranks}", f"--job.dump_folder={folder}", *options]
        ended = self.run(*command, **variables)
        assert ended.returncode == 0, ended.stderr[-4000:] + ended.stdout[-2000:]
        assert "is not answered" not in ended.stderr, ended.stderr
        lines = ended.stdout.splitlines()
        assert all(line.startswith("phantom: ") for line in lines), ended.stdout
        return lines


@pytest.fixture(scope="session")
def phantom() -> Iterator[Phantom]:
    """Four H100 without values. A host without a compiler, or with little memory, skips the tests with the reason."""
    with ExitStack() as stack:
        try:
            variables = stack.enter_context(phantom_gpus("h100-80gb", 4, hides_gpu=True))
        except UserError as error:
            if "cannot be compiled" in str(error):
                raise
            pytest.skip(str(error))
        yield Phantom(variables)
