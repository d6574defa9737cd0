"""Detection of a phantom GPU (`phantom_gpu`), which computes no values, and the marks of its output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_launch.core.errors import RunError

VARIABLE = "PHANTOM_DEVICE"
"""Environment variable that describes the device. Processes with a phantom GPU have it from their start."""

MARK = "phantom: "
"""Beginning of each line that a run without values prints or logs."""

TAG_PREFIX = "phantom/"
"""Beginning of the tags of its metrics."""

FILE = "WITHOUT_VALUES"
"""File that marks its run folder."""

VERSION_KEY = "phantom GPU"
"""Key of `Manifest.versions` that marks its checkpoints."""

TEXT = "This run had a phantom GPU, which computes no values. Its losses, weights and times mean nothing.\n"


def is_phantom() -> bool:
    """Return True if the GPUs of this process are phantoms."""
    return VARIABLE in os.environ


def is_marked(folder: Path) -> bool:
    """Return True if a run folder is of a run without values."""
    return os.path.lexists(folder / FILE)


def marked(text: str) -> str:
    """Return a text for the terminal or a log, whose lines are marked if they are of a run without values."""
    return MARK + text.replace("\n", f"\n{MARK}") if is_phantom() else text


def unmarked(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report with the tags of a run with values."""
    return {tag.removeprefix(TAG_PREFIX): value for tag, value in report.items()}


def check_operators(torch: ModuleType) -> None:
    """Raise RunError in a process with a phantom GPU whose operators were not replaced when torch was imported."""
    if is_phantom() and not hasattr(torch, "_phantom_gpu"):
        reason = "the first folder of PYTHONPATH, which python -m titan_launch.phantom_gpu sets, was not read"
        raise RunError(f"the phantom GPU is not complete in this process: {reason}")
