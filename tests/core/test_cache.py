"""Entries of the cache: they are on disk before they appear, and are used only with the content that was built."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_launch.core.cache import built_once
from titan_launch.core.errors import UserError
from titan_launch.core.files import CACHE_VARIABLE


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


class Build:
    """A function that writes two files, and counts its calls."""

    calls = 0

    def __call__(self, folder: Path) -> None:
        self.calls += 1
        (folder / "a").write_bytes(b"first")
        (folder / "b").write_bytes(b"second")


def rewritten(folder: Path) -> None:
    (folder / "b").write_bytes(b"SECOND")


def as_fifo(folder: Path) -> None:
    (folder / "files.json").unlink()
    os.mkfifo(folder / "files.json")


def as_link(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


def as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


@pytest.mark.parametrize(
    "damage",
    [
        rewritten,
        lambda folder: (folder / "a").unlink(),
        lambda folder: (folder / "files.json").unlink(),
        lambda folder: (folder / "files.json").write_text("[1]"),
        lambda folder: (folder / "files.json").write_text('{"a": ["", [5, 0, 0, 0]]}'),
        lambda folder: (folder / "files.json").write_text('{"../a": ["", [5, 0, 0, 0]]}'),
        lambda folder: (folder / "files.json").write_text("[" * 10**6),
        lambda folder: (folder / "files.json").write_text('{"a": 1, "b": NaN}'),
        as_fifo,
        as_link,
        as_file,
    ],
)
def test_a_damaged_entry_is_built_again(cache: Path, damage: Callable[[Path], object]) -> None:
    build = Build()
    folder = built_once("kind", 1, build)
    damage(folder)
    assert built_once("kind", 1, build) == folder and build.calls == 2
    assert [(folder / name).read_bytes() for name in "ab"] == [b"first", b"second"]
    assert built_once("kind", 1, build) == folder and build.calls == 2


def test_a_list_of_files_that_was_not_completely_written_is_not_part_of_the_entry(cache: Path) -> None:
    folder = built_once("kind", 1, Build())
    folder.rename(folder.with_suffix(".partial"))
    (folder.with_suffix(".partial") / "files.json").rename(folder.with_suffix(".partial") / "files.json.tmp")
    built_once("kind", 1, build := Build())
    built_once("kind", 1, build)
    assert build.calls == 1


def test_an_entry_without_a_list_of_files_is_not_compared(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="titan_launch")
    (built_once("kind", 1, Build()) / "files.json").write_text("[1]")
    built_once("kind", 1, Build())
    assert "is damaged" in caplog.text and "comparing" not in caplog.text


def test_a_copied_cache_is_compared_once_and_used(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="titan_launch")
    build = Build()
    built_once("kind", 1, build)
    shutil.copytree(cache, tmp_path / "copy")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "copy"))
    for _ in range(2):
        folder = built_once("kind", 1, build)
        assert folder.is_relative_to(tmp_path / "copy") and build.calls == 1
    assert [record.getMessage().partition(" the cached")[0] for record in caplog.records] == ["comparing"]


def test_a_cache_that_can_only_be_read_is_used_if_its_content_is_right(cache: Path) -> None:
    """A folder in the place of the lock fails for every user, as a cache without write permission does."""
    build = Build()
    folder = built_once("kind", 1, build)
    folder.with_suffix(".lock").unlink()
    folder.with_suffix(".lock").mkdir()
    (folder / "a").touch()
    assert built_once("kind", 1, build) == folder and build.calls == 1
    rewritten(folder)
    with pytest.raises(Exception, match="the cache of prepared data cannot be written"):
        built_once("kind", 1, build)


def test_a_source_that_cannot_be_read_is_named(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"error: {tmp_path / 'source'}: No such file or directory; correct")):
        built_once("kind", 1, lambda folder: (tmp_path / "source").read_bytes())


def test_files_are_on_disk_before_the_entry_appears(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checked_rename(source: Path, target: Path) -> Path:
        if source.suffix == ".partial":
            assert {path.stat().st_ino for path in (source, *source.iterdir())} <= set(synced)
        return rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", checked_rename)
    folder = built_once("kind", 1, Build())
    assert synced[-1] == folder.parent.stat().st_ino


@pytest.mark.parametrize("make", [lambda lock: lock.symlink_to("/etc/passwd"), os.mkfifo, lambda lock: lock.mkdir()])
def test_a_lock_of_another_kind_is_refused(cache: Path, make: Callable[[Path], object]) -> None:
    build = Build()
    folder = built_once("kind", 1, build)
    shutil.rmtree(folder)
    lock = folder.with_suffix(".lock")
    lock.unlink()
    make(lock)
    with pytest.raises(UserError, match=f"the cache of prepared data cannot be written .{re.escape(str(lock))}: "):
        built_once("kind", 1, build)
    assert build.calls == 1


def test_folders_and_locks_are_only_for_their_user(cache: Path) -> None:
    folder = built_once("kind", 1, Build())
    modes = [path.stat().st_mode & 0o777 for path in (cache, folder.parent, folder.with_suffix(".lock"))]
    assert modes == [0o700, 0o700, 0o600]


def test_what_stands_at_the_place_of_a_new_entry_is_not_followed(cache: Path, tmp_path: Path) -> None:
    folder = built_once("kind", 1, Build())
    shutil.rmtree(folder)
    (tmp_path / "other").mkdir()
    folder.with_suffix(".partial").symlink_to(tmp_path / "other")
    assert built_once("kind", 1, Build()) == folder
    assert not list((tmp_path / "other").iterdir())
