"""The cache folder of a host: data that one process prepares and all processes of the host then read."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_launch.core.errors import UserError
from titan_launch.core.files import refuse_weights_folder, remove

_log = logging.getLogger(__name__)

VARIABLE = "TITAN_LAUNCH_CACHE"
"""Environment variable that names the cache folder."""


def cache_folder() -> Path:
    """Return the cache folder: `$TITAN_LAUNCH_CACHE`, `$XDG_CACHE_HOME/titan_launch`, or `~/.cache/titan_launch`."""
    if own := os.environ.get(VARIABLE):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "titan_launch"


def built_once(
    kind: str,
    identity: Any,
    build: Callable[[Path], object],
    task: str = "",
    is_damaged: Callable[[Path], bool] = lambda folder: False,
) -> Path:
    """Return the folder of the cache for `identity`, which JSON can represent. If it does not exist, `build` fills it.

    Several processes may call this at once: one builds, and the others wait. The folder appears when it is complete.
    After an interruption, `build` gets the files that it had written. A folder for which `is_damaged` returns True is
    built again. If the folder has to be built, a log line names `task` and the folder.

    Raises UserError if the cache cannot be written, and the errors of `build`.
    """
    digest = hashlib.blake2b(json.dumps(identity).encode(), digest_size=12).hexdigest()
    folder = cache_folder() / kind / digest
    if folder.is_dir() and not is_damaged(folder):
        return folder
    refuse_weights_folder(folder)
    if task:
        _log.info("%s, into %s", task, folder)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(folder.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when this process ends
            if folder.is_dir() and is_damaged(folder):
                _log.warning("the cached folder %s is damaged and will be built again", folder)
                remove(folder)
            if not folder.is_dir():
                partial = folder.with_suffix(".partial")
                partial.mkdir(exist_ok=True)
                build(partial)
                partial.rename(folder)
    except OSError as error:
        reason = f"{error.filename or folder.parent}: {error.strerror}"
        remedy = f"set the environment variable {VARIABLE} to a folder on a disk with enough space"
        raise UserError(f"the cache of prepared data cannot be written ({reason}); {remedy}") from None
    return folder
