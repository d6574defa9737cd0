"""Atomic writes of files, reads that never block, and checks of paths."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Literal

from titan_launch.core.errors import UserError
from titan_launch.core.terminal import say_data

MIB = 1 << 20

CACHE_VARIABLE = "TITAN_LAUNCH_CACHE"
"""Environment variable that names the cache folder."""


def cache_folder() -> Path:
    """Return the cache folder: `$TITAN_LAUNCH_CACHE`, else `$XDG_CACHE_HOME/titan_launch`, else
    `~/.cache/titan_launch`. Raises UserError for a user without a home folder."""
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own)
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        remedy = f"set the environment variable {CACHE_VARIABLE} to a folder"
        raise UserError(f"error: this user has no home folder for the cache; {remedy}") from None
    return Path(base) / "titan_launch"


def replace_text(path: Path, text: str) -> None:
    """Write a text file atomically: readers see the old file or the new one, even if this process is killed."""
    temporary = path.with_name(f"{path.name}.tmp")
    remove(temporary)
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


class RecordFile:
    """A file to which whole records are appended. If a write fails, such as on a full disk, no part of the record
    stays."""

    def __init__(self, path: Path, mode: Literal["ab", "xb"]):
        """Open the file. `mode`: `ab` appends to a file that may exist, `xb` creates a file."""
        self._file = path.open(mode, buffering=0)

    def append(self, record: bytes) -> None:
        """Write a record without buffering: if the process is killed afterwards, the record is not lost. Raises OSError
        if the write fails."""
        end = os.fstat(self._file.fileno()).st_size
        rest = memoryview(record)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(end)
            self._file.seek(end)
            raise

    def replace_last(self, length: int, record: bytes) -> None:
        """Overwrite the last record, which has `length` bytes, by a record that is at least as long. If the process is
        killed, the file ends with the old or the new record, and perhaps NUL bytes. Raises OSError if a write fails; on
        a full disk, the old record stays."""
        self.append(bytes(len(record) - length))  # the disk has room for the record now
        with open(self._file.name, "r+b", buffering=0) as file:
            start = file.seek(-len(record), os.SEEK_END)
            try:
                file.write(record)  # a single write, so that a kill leaves a whole record
            except OSError:
                file.truncate(start + length)
                raise

    def close(self) -> None:
        self._file.close()


def file_state(path: Path) -> list[int]:
    """Return four numbers: the size of a file in bytes, its mtime and its ctime in nanoseconds, and its inode number.
    Raises OSError.

    If a path has the same state at two times, the file was not written to in between. The mtime alone does not show
    this, because programs can set the mtime, but not the ctime.
    """
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def sync(path: Path) -> None:
    """Write the content of a file, or the entries of a folder, to disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(pattern: Path) -> Path:
    """Replace `{}` in the last part of `pattern` by 1, 2, 3, ... and return the first path that does not exist."""
    names = (pattern.with_name(pattern.name.format(number)) for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def remove(path: Path) -> None:
    """Delete a file, a link, or a folder with its content. If `path` does not exist, do nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for other kinds of file, and for files of /proc with content.
    Such files may block: opening a FIFO waits for a writer, and reading /proc/kmsg waits for a message."""
    if "\0" in str(path):
        raise OSError(errno.EINVAL, "a path cannot have the character NUL", str(path))
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not _is_regular(file.fileno()):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def _is_regular(descriptor: int) -> bool:
    """Return True for a regular file with a correct size. (Files of /proc have content, but the size 0.)"""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return False
    try:
        is_empty = os.fstat(descriptor).st_size == 0 and not os.pread(descriptor, 1, 0)
    except OSError:  # reading would wait, or the file has no bytes at its start
        return False
    return is_empty or os.fstat(descriptor).st_size > 0  # reads the size again: a run may have just written to the file


def read_regular(path: Path, most_bytes: int | None = None) -> bytes:
    """Return the content of a regular file. Raises OSError if the file cannot be read, is not regular, or has more than
    `most_bytes` bytes."""
    with open_regular(path) as file:
        if most_bytes is None:
            return file.read()
        size = os.fstat(file.fileno()).st_size
        # `read` allocates memory for all bytes that it may read.
        content = b"" if size > most_bytes else file.read(min(most_bytes, max(size, 16 * MIB)) + 1)
    if max(size, len(content)) > most_bytes:
        reason = f"larger than {most_bytes / MIB:,.4g} MiB, the limit for this kind of file"
        raise OSError(errno.EFBIG, reason, str(path))
    return content


def chunks_of(path: Path) -> Iterator[bytes]:
    """Yield the content of a regular file in pieces of at most 16 MiB. Raises OSError."""
    with open_regular(path) as file:
        while chunk := file.read(16 * MIB):
            yield chunk


def file_inside(folder: Path, name: str) -> Path:
    """Return the path `folder / name`. Raises OSError for a link that leads out of the folder (see `leads_out`),
    because somebody else may have made the folder."""
    if leads_out(folder / name, folder):
        reason = "a link to a file outside of the folder, which is not followed; replace the link by a copy of the file"
        raise OSError(errno.EPERM, reason, str(folder / name))
    return folder / name


def is_name_inside(name: str) -> bool:
    """Return True if a name, such as `a/b`, is a relative path that stays in its folder: no part is empty, `.` or
    `..`."""
    return "\0" not in name and not {"", ".", ".."} & {*name.split("/")}


def leads_out(path: Path, folder: Path) -> bool:
    """Return True if a link leads out of a folder: the link is `path`, or a folder between `folder` and `path`.

    Return False for targets in a cache of Hugging Face, because the folders of such a cache consist of links:
    `models--OWNER--NAME/snapshots/REVISION/FILE` to `models--OWNER--NAME/blobs/DIGEST`.
    """
    home, target = (Path(os.path.realpath(path)) for path in (folder, path))
    blobs = target.parent
    is_cached = blobs.name == "blobs" and blobs.parent.name.startswith(("models--", "datasets--"))
    return not (target.is_relative_to(home) or is_cached)


def weights_folder_around(path: Path) -> Path | None:
    """Return the innermost folder with weights (`*.safetensors`) among `path` and the folders above it; None if no
    folder has weights.

    Nothing is written into such a folder, because other programs and runs read it.
    """
    whole = Path(os.path.realpath(os.path.expanduser(path)))
    return next((folder for folder in (whole, *whole.parents) if _has_weights(folder)), None)


def _has_weights(folder: Path) -> bool:
    try:
        return next(folder.glob("*.safetensors"), None) is not None
    except OSError:  # the name is too long, or a link leads to itself
        return False


def refuse_weights_folder(path: Path) -> None:
    """Raise UserError if `path` is a folder with weights, or is inside of such a folder."""
    found = weights_folder_around(path)
    if found is not None:
        raise UserError(
            f"error: {path} is in {found}, a folder with weights (*.safetensors); nothing is written into such a "
            "folder; choose another path"
        )


def check_output(path: Path) -> None:
    """Raise UserError if `path` cannot be written (see `check_place`), or is inside of a folder with weights. Commands
    call this function before they compute the content of the file."""
    refuse_weights_folder(path)
    check_place(path)


def check_place(path: Path) -> None:
    """Raise UserError if `path` is a folder, if its folder is missing, or if this user may not write the file."""
    if path.is_dir():
        raise UserError(f"error: {path} is a folder; name a file")
    if not path.parent.is_dir():
        raise UserError(f"error: {path}: there is no folder {path.parent}; create it, or name another file")
    place = path if path.exists() else path.parent
    if not os.access(place, os.W_OK):
        raise UserError(f"error: {path}: this user may not write to {place}; name another file")


def write_output(path: Path, text: str) -> None:
    """Write a file that `check_output` has accepted. The file is replaced atomically, except for a pipe, a device, a
    link, and a file whose folder this user may not write to. These are written in place. If the file is standard
    output, the text is printed, because a second writer would overwrite what the process prints."""
    stdout = Path("/dev/stdout")
    if path.exists() and stdout.exists() and path.samefile(stdout):
        say_data(text.rstrip())
    elif path.exists() and (path.is_symlink() or not path.is_file() or not os.access(path.parent, os.W_OK)):
        path.write_text(text, encoding="utf-8")
    else:
        replace_text(path, text)
