"""The cache folder of a host: data that one process prepares and all processes of the host then read.

Each entry is a folder with a list of its files. The list has the digest of each file, and its state (size, times and
inode) when the content last matched the digest. If the state has changed since then, the content is compared again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from titan_launch.core.errors import UserError
from titan_launch.core.files import (
    CACHE_VARIABLE,
    cache_folder,
    file_state,
    is_name_inside,
    refuse_weights_folder,
    remove,
    replace_text,
    sync,
)
from titan_launch.core.fingerprint import content_digest
from titan_launch.core.json_files import read_json

_log = logging.getLogger(__name__)

_VERSION = 1
"""Version of the layout of entries. An entry of a different version is built again."""

_FILES = "files.json"
"""Name of the file that lists the files of an entry: `{name: [digest, state]}`."""


def built_once(kind: str, identity: Any, build: Callable[[Path], object], task: str = "") -> Path:
    """Return the folder of the cache entry `identity`. If the folder does not exist, create it by `build(folder)`.

    `kind`: name of the subfolder for entries of this kind. `identity`: a value that JSON can represent. Several
    processes may call this function at once: one builds, and the others wait. The folder gets its final name when it is
    complete and on disk. If an earlier call was interrupted, `build` gets the folder with the files that the earlier
    call wrote. A folder is built again if its files no longer have the content that `build` wrote. `task`: the work of
    `build` in words, such as "preparing tokens". If the folder does not exist, `task` and the folder are logged. An
    empty `task` logs nothing.

    Raises UserError if the cache cannot be written, or if `build` raises OSError. Passes on other errors of `build`.
    """
    digest = hashlib.blake2b(json.dumps([_VERSION, identity]).encode(), digest_size=12).hexdigest()
    folder = cache_folder() / kind / digest
    if _is_folder(folder) and _has_known_state(folder):
        return folder
    refuse_weights_folder(folder.parent)  # only the parent is checked, because the entry itself may hold weights
    if task and not folder.is_dir():
        _log.info("%s, into %s", task, folder)
    try:
        _make_folders(folder.parent)
        with os.fdopen(os.open(folder.with_suffix(".lock"), _LOCK_FLAGS, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases the lock when this process ends
            if not _is_folder(folder):
                remove(folder)
            if folder.is_dir() and not (_has_known_state(folder) or _has_known_content(folder)):
                _log.warning("the cached folder %s is damaged and will be built again", folder)
                remove(folder)
            if not folder.is_dir():
                partial = folder.with_suffix(".partial")
                if not _is_folder(partial):
                    remove(partial)
                    partial.mkdir()
                build(partial)
                _seal(partial)
                partial.rename(folder)
                sync(folder.parent)
    except OSError as error:
        if _is_folder(folder) and _has_known_content(folder):
            return folder  # the cache is read-only for this process, but has the entry
        named = [Path(name) for name in (error.filename, error.filename2) if isinstance(name, str)]
        if named and not any(_is_along(path, folder) for path in named):  # a source of `build`
            raise UserError(f"error: {named[0]}: {error.strerror}; correct the path or its permissions") from None
        reason = f"{error.filename or folder.parent}: {error.strerror or error}"
        remedy = f"set the environment variable {CACHE_VARIABLE} to a writable folder on a disk with enough space"
        raise UserError(f"the cache of prepared data cannot be written ({reason}); {remedy}") from None
    return folder


_LOCK_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Flags to open a lock file: links are not followed, and a FIFO without a reader is an error."""


def _is_along(path: Path, folder: Path) -> bool:
    """Return True for a path inside of the cache folder, and for a folder that has `folder` inside."""
    path, folder, cache = path.absolute(), folder.absolute(), cache_folder().absolute()
    return path.is_relative_to(cache) or folder.is_relative_to(path)


def _is_folder(path: Path) -> bool:
    """Return True for a folder, and False for a link to a folder."""
    return path.is_dir() and not path.is_symlink()


def _make_folders(folder: Path) -> None:
    """Make a folder and its missing parents. Only the user of this process may read the new folders."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)


def _seal(folder: Path) -> None:
    """Write the files and subfolders of an entry to disk (fsync), and then the list of the files."""
    lists = (folder / _FILES, folder / f"{_FILES}.tmp")  # an interrupted call of `replace_text` leaves the second file
    paths = sorted(path for path in folder.rglob("*") if path not in lists)
    for path in paths:
        sync(path)
    files = {str(path.relative_to(folder)): path for path in paths if not path.is_dir()}
    listed = {name: [content_digest([path]), file_state(path)] for name, path in files.items()}
    replace_text(folder / _FILES, json.dumps(listed))


def _read_list(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return {name: (digest, state)} from an entry's list. An invalid list raises OSError, ValueError or TypeError."""
    content = read_json(folder / _FILES)
    if not isinstance(content, dict) or not all(map(is_name_inside, content)):
        raise ValueError
    return {name: (str(digest), list(state)) for name, (digest, state) in content.items()}


def _has_known_state(folder: Path) -> bool:
    """Return True if all files of an entry still have the states in its list. The contents are not read."""
    try:
        return all(file_state(folder / name) == state for name, (_, state) in _read_list(folder).items())
    except (OSError, ValueError, TypeError):
        return False


def _has_known_content(folder: Path) -> bool:
    """Read all files of an entry, and return True if they still have the digests in its list. In that case, write the
    present states of the files (`file_state`) into the list."""
    try:
        files = _read_list(folder)
        states = {name: file_state(folder / name) for name in files}
        reason = "the times or inodes of its files have changed since the last check"
        _log.info("comparing the cached folder %s with its digests, because %s", folder, reason)
        if any(content_digest([folder / name]) != digest for name, (digest, _) in files.items()):
            return False
    except (OSError, ValueError, TypeError):
        return False
    with suppress(OSError):  # the cache may be read-only for this process
        replace_text(folder / _FILES, json.dumps({name: [files[name][0], states[name]] for name in files}))
    return True
