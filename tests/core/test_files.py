"""Reads of files that may be of any kind."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from titan_launch.core.errors import UserError
from titan_launch.core.files import CACHE_VARIABLE, cache_folder, check_output, open_regular, read_regular, write_output

OTHERS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "folder": lambda path: path.mkdir(),
    "socket": lambda path: socket.socket(socket.AF_UNIX).bind(str(path)),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "text of the kernel": lambda path: path.symlink_to("/proc/self/maps"),
    "messages of the kernel": lambda path: path.symlink_to("/proc/kmsg"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_no_regular_file_is_refused_without_waiting(kind: str, tmp_path: Path) -> None:
    OTHERS[kind](tmp_path / "a")
    for read in (open_regular, read_regular):
        with pytest.raises(OSError):
            read(tmp_path / "a")


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    assert read_regular(path, 0) == b""
    path.write_bytes(b"abc")
    assert read_regular(path) == read_regular(path, 3) == b"abc"
    with pytest.raises(OSError, match="larger than"):
        read_regular(path, 2)


def test_an_output_is_replaced_or_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").touch()
    (tmp_path / "old").write_text("old")
    reader = (tmp_path / "old").open()
    for name in ("link", "new", "old"):
        check_output(tmp_path / name)
        write_output(tmp_path / name, f"new {name}")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "new link"
    assert (tmp_path / "old").read_text() == "new old" and reader.read() == "old", "the old file stays whole"
    write_output(Path("/dev/stdout"), "{}")
    print("table")
    assert capfd.readouterr().out == "{}\ntable\n"
    monkeypatch.setattr(os, "access", lambda path, mode: path == tmp_path / "file")  # the folder cannot be written
    check_output(tmp_path / "file")
    write_output(tmp_path / "file", "in place")
    assert (tmp_path / "link").read_text() == "in place"
    for name, words in (("other", f"may not write to {tmp_path}; name"), ("new", f"may not write to {tmp_path}/new")):
        with pytest.raises(UserError, match=words):
            check_output(tmp_path / name)


def test_a_user_without_a_home_folder_is_told_how_to_set_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for variable in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(UserError, match=f"no home folder for the cache; set the environment variable {CACHE_VARIABLE}"):
        cache_folder()
