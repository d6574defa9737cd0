"""Exit of a training process, and work in several processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_launch.core import process
from titan_launch.core.process import (
    PRINTS_HIDDEN,
    announce_once,
    has_exited_directly,
    in_forks,
    print_hidden_announcement,
    remove_folders,
    wrong_path,
)

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

run_and_exit(action, Provenance("job.toml"))
"""

WITHOUT_FOLDER = """
from titan_launch.config.loading.provenance import Provenance
from titan_launch.core.process import run_and_exit

run_and_exit(lambda: print("ran"), Provenance("job.toml"))
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


def test_a_process_without_a_temporary_folder_runs_its_action() -> None:
    code = f"import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/missing']{WITHOUT_FOLDER}"
    ended = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ran\n", "")


@pytest.mark.parametrize("is_launched", [True, False])
def test_the_error_of_a_rank_whose_output_is_hidden_is_printed_later(
    is_launched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The torchrun command prints no error later, so a visible rank prints its own."""
    monkeypatch.delenv(PRINTS_HIDDEN, raising=False)
    if is_launched:
        monkeypatch.setenv(PRINTS_HIDDEN, "1")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "1" / "error.json"))
    with open(os.devnull, "w") as hidden, monkeypatch.context() as patch:  # `--local-ranks-filter` without this rank
        patch.setattr(sys, "stderr", hidden)
        announce_once("error: no memory", "Traceback")
    announce_once("error: rank 1 is gone")
    print_hidden_announcement(os.environ)
    expected = "Traceback\nerror: no memory\n" if is_launched else "error: rank 1 is gone\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(("number", "is_wrong"), [(errno.EISDIR, True), (errno.EROFS, True), (errno.ENOSPC, False)])
def test_errors_that_another_path_mends(number: int, is_wrong: bool) -> None:
    assert (wrong_path(OSError(number, os.strerror(number), "out")) is not None) == is_wrong


def test_forks_share_the_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: 3)
    is_shared = multiprocessing.get_context("fork").Barrier(3) if sys.platform == "linux" else None

    def function(item: int) -> tuple[int, int]:
        if is_shared is not None:
            is_shared.wait(60)  # until each process has an item
        return item, os.getpid()

    found = in_forks(function, range(6))
    assert [item for item, _ in found] == list(range(6))
    assert len({pid for _, pid in found}) == (3 if sys.platform == "linux" else 1)
    assert in_forks(lambda item: (item, os.getpid()), [5]) == [(5, os.getpid())]
    assert in_forks(lambda item: item, range(20_000)) == list(range(20_000))  # more than a pipe holds


def test_an_error_in_a_fork_is_raised_and_a_killed_fork_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "usable_cores", lambda: 2)
    with pytest.raises(ZeroDivisionError):
        in_forks(lambda item: 1 / item, [1, 0])
    own = os.getpid()
    assert in_forks(lambda item: item if os.getpid() == own else os._exit(1), range(4)) == [0, 1, 2, 3]
