"""Exit of a training process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_launch.core.process import has_exited_directly, remove_folders

REPO = Path(__file__).parents[2]

RANK = """
import os, signal
from multiprocessing.reduction import DupFd
from titan_launch.config.loading.provenance import Provenance
from titan_launch.core.process import run_and_exit

def action():
    DupFd(0)  # makes a socket in a temporary folder, as a tensor does that is sent to another process
    assert len(os.listdir(os.environ["TMPDIR"])) == 2
    {end}

run_and_exit(action, Provenance("job.toml", {{}}, {{}}, ()))
"""


@pytest.mark.parametrize(
    ("end", "status", "is_known"),
    [("pass", 0, True), ("1 / 0", 1, True), ("os._exit(7)", 7, False), ("os.kill(os.getpid(), 9)", -9, False)],
)
def test_a_rank_leaves_no_temporary_files_however_it_exits(
    end: str, status: int, is_known: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "launch" / "attempt_0" / "0"
    folder.mkdir(parents=True)
    rank = {**os.environ, "TORCHELASTIC_ERROR_FILE": str(folder / "error.json"), "TMPDIR": str(tmp_path)}
    code = RANK.format(end=end)
    assert subprocess.run([sys.executable, "-c", code], cwd=REPO, env=rank, capture_output=True).returncode == status
    assert has_exited_directly(rank) != is_known
    assert len(os.listdir(tmp_path)) == (1 if is_known else 2)
    remove_folders(str(tmp_path / "launch"))
    assert os.listdir(tmp_path) == []
