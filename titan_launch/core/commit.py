"""The commit of a git checkout."""

from __future__ import annotations

import subprocess
from pathlib import Path


def commit_of(folder: Path, digits: int = 40) -> str | None:
    """Return the commit of the git checkout around `folder`: the first `digits` digits of its hash, and `-dirty` if
    tracked files have changed. Return None if there is no checkout, or if git is missing or fails."""
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", f"--abbrev={digits}", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
