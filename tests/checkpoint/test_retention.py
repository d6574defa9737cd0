"""Retention: the checkpoints that stay, those that are deleted, and the order of the steps."""

from __future__ import annotations

import errno
import math
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from titan_launch.checkpoint.manifest import Manifest, checkpoint_steps, write_manifest
from titan_launch.checkpoint.retention import Retention, clean, set_aside, tidy

LOSSES = {10: 3.0, 20: 1.0, 30: None, 40: 2.0, 50: math.nan, 60: 2.5}


@pytest.mark.parametrize(
    ("retention", "gone"),
    [
        (Retention(latest=0, every=0, best=0), []),
        (Retention(latest=1, every=0, best=0), [50, 40, 30, 20, 10]),
        (Retention(latest=2, every=0, best=0), [40, 30, 20, 10]),
        (Retention(latest=1, every=20, best=0), [50, 30, 10]),
        (Retention(latest=1, every=0, best=1), [50, 40, 30, 10]),
        (Retention(latest=1, every=0, best=9), [50, 30]),  # their losses are NaN and missing
        (Retention(latest=9, every=0, best=0), []),
    ],
)
def test_checkpoints_that_are_deleted(retention: Retention, gone: list[int]) -> None:
    assert retention.expendable(LOSSES) == gone


def fill(folder: Path, losses: dict[int, float | None]) -> None:
    for step, loss in losses.items():
        (folder / f"step-{step}").mkdir()
        write_manifest(folder / f"step-{step}", Manifest(1, "", {}, {}, {}, "", None, step, None, {}, loss, {}))


def test_links_are_updated_and_their_checkpoints_are_not_deleted(tmp_path: Path) -> None:
    fill(tmp_path, {1: 2.0, 2: 1.0, 3: 3.0})
    assert tidy(tmp_path, 3, Retention(latest=1, every=0, best=1)) == ([1], [])
    assert (tmp_path / "latest").resolve().name == "step-3" and (tmp_path / "best").resolve().name == "step-2"
    fill(tmp_path, {4: 0.5})
    assert tidy(tmp_path, 4, Retention(latest=1, every=0, best=1)) == ([3, 2], [])
    assert (tmp_path / "latest").resolve().name == (tmp_path / "best").resolve().name == "step-4"
    fill(tmp_path, {5: 0.1})
    assert tidy(tmp_path, 5, Retention(latest=1, every=0, best=0)) == ([4], [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-5"]


def test_the_checkpoint_just_saved_stays_even_if_older_ones_have_later_steps(tmp_path: Path) -> None:
    fill(tmp_path, {1: None, 9: None})
    assert tidy(tmp_path, 1, Retention(latest=1, every=0, best=0)) == ([], [])
    assert checkpoint_steps(tmp_path) == [9, 1]


def test_a_folder_without_a_manifest_is_never_deleted(tmp_path: Path) -> None:
    fill(tmp_path, {1: None, 2: None})
    (tmp_path / "step-0").mkdir()
    assert tidy(tmp_path, 2, Retention(latest=1, every=0, best=0)) == ([1], [])
    assert checkpoint_steps(tmp_path) == [2, 0]


def test_a_killed_deletion_leaves_no_partial_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, {1: None, 2: None})

    def killed(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise KeyboardInterrupt

    def busy(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        tidy(tmp_path, 2, Retention(latest=1, every=0, best=0))
    assert checkpoint_steps(tmp_path) == [2]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        clean(tmp_path)  # the next save tries again
    clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2"]


def test_each_damaged_checkpoint_is_set_aside_under_its_own_name(tmp_path: Path) -> None:
    for number in (1, 2):
        fill(tmp_path, {7: None})
        assert set_aside(tmp_path / "step-7").name == f"step-7.damaged-{number}"
    assert checkpoint_steps(tmp_path) == []


def test_links_that_a_copy_turned_into_folders_do_not_stop_deletion(tmp_path: Path) -> None:
    """`cp -rL` replaces links by folders. A checkpoint that cannot be deleted does not stop the deletion of the others
    either."""
    fill(tmp_path, {step: step / 10 for step in (1, 2, 3, 4)})
    for link in ("latest", "best", "latest.tmp"):
        shutil.copytree(tmp_path / "step-1", tmp_path / link)
    (tmp_path / "step-3.deleted.tmp").mkdir()
    (tmp_path / "step-3.deleted.tmp" / "file").touch()
    gone, notes = tidy(tmp_path, 4, Retention(latest=1, every=0, best=1))
    assert gone == [3, 2] and notes == [
        f"{link} was a folder (a copy of a checkpoint), not a link; renamed to {link}.copy-1"
        for link in ("latest", "best")
    ]
    assert {name: os.readlink(tmp_path / name) for name in ("latest", "best")} == {"latest": "step-4", "best": "step-1"}
    names = ["best", "best.copy-1", "latest", "latest.copy-1", "step-1", "step-4"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    (tmp_path / "best").unlink()
    (tmp_path / "best").mkdir()
    assert tidy(tmp_path, 4, Retention(latest=2, every=0, best=0))[0] == []
    assert not (tmp_path / "best").exists() and (tmp_path / "best.copy-2").is_dir()


def test_a_failed_link_or_rename_does_not_stop_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system does not support links, and one folder cannot be renamed."""
    fill(tmp_path, dict.fromkeys((1, 2, 3)))
    rename = Path.rename

    def refuse(path: Path, *args: Any, **options: Any) -> Any:
        if path.name in ("latest.tmp", "step-2"):
            raise PermissionError(errno.EPERM, "Operation not permitted", str(path))
        return rename(path, *args)

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(Path, "rename", refuse)
    gone, notes = tidy(tmp_path, 3, Retention(latest=1, every=0, best=1))
    assert gone == [1] and [note.partition(":")[0] for note in notes] == [
        "the link latest could not be changed",
        "step-2 could not be deleted",
    ]


def test_a_copied_checkpoint_is_ignored(tmp_path: Path) -> None:
    """A folder of step 50 with the manifest of step 3 stays, is not the best checkpoint, and does not count towards
    `keep_latest`."""
    fill(tmp_path, {3: 0.1, 6: 2.0, 9: 1.0})
    shutil.copytree(tmp_path / "step-3", tmp_path / "step-50")
    assert tidy(tmp_path, 9, Retention(latest=2, every=0, best=0)) == ([3], [])
    assert tidy(tmp_path, 9, Retention(latest=2, every=0, best=1)) == ([], [])
    assert os.readlink(tmp_path / "best") == "step-9" and checkpoint_steps(tmp_path) == [50, 9, 6]
