"""Files and folders that a kill leaves whole: the old ones, or the new ones."""

from __future__ import annotations

import errno
import itertools
import os
import stat
from pathlib import Path


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: whoever reads it finds the old text or the new one, whenever the writer is killed."""
    temporary = path.with_name(f"{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def free_name(pattern: Path) -> Path:
    """The first of a row of numbered names that nothing has; `{}` in the last part stands for the number."""
    names = (pattern.with_name(pattern.name.format(number)) for number in itertools.count(1))
    return next(name for name in names if not name.exists())


def read_regular(path: Path) -> bytes:
    """Return a file's content. Raises OSError for what is no regular file: reading a FIFO would wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)
