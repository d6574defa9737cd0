"""What is asked of a writer of checkpoints, and what it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from titan_launch.checkpoint.manifest import Manifest
from titan_launch.checkpoint.retention import Retention


@dataclass(frozen=True)
class WriteRequest:
    """What is to be written where; the same on all ranks."""

    folder: Path
    """Of all checkpoints of the run, on a file system that all ranks share."""

    manifest: Manifest
    """Without files: these are found while writing."""

    retention: Retention


@dataclass(frozen=True)
class Written:
    """A checkpoint that is complete."""

    step: int
    bytes: int
    seconds: float
    deleted: tuple[int, ...]
    """Steps of older checkpoints that are gone now."""

    warning: str = ""
    """Clauses that name what went wrong after the checkpoint was complete; empty where nothing did."""
