"""Detection of the phantom GPU, a simulated GPU without kernels (see `phantom_gpu`), and the marks of its output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from titan_launch.core.errors import RunError

VARIABLE = "PHANTOM_DEVICE"
"""Environment variable that describes the phantom GPU. The variable must be set before the process starts."""

MARK = "phantom: "
"""Beginning of each line that a run on a phantom GPU prints or logs."""

TAG_PREFIX = "phantom/"
"""Beginning of the metric tags of a run on a phantom GPU."""

FILE = "WITHOUT_VALUES"
"""File that marks the folder of a run on a phantom GPU."""

VERSION_KEY = "phantom GPU"
"""Key of `Manifest.versions` that marks the checkpoints of a run on a phantom GPU."""

TEXT = "This run had a phantom GPU, which computes no values. Its losses, weights and times mean nothing.\n"


def is_phantom() -> bool:
    """Return True if this process runs on phantom GPUs."""
    return VARIABLE in os.environ


def is_marked(folder: Path) -> bool:
    """Return True if a run folder belongs to a run on a phantom GPU."""
    return os.path.lexists(folder / FILE)


def marked(text: str) -> str:
    """Return a text for the terminal or a log. In a run on a phantom GPU, each line begins with MARK."""
    return MARK + text.replace("\n", f"\n{MARK}") if is_phantom() else text


def unmarked(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return a report without TAG_PREFIX in its tags."""
    return {tag.removeprefix(TAG_PREFIX): value for tag, value in report.items()}


def check_operators(torch: ModuleType) -> None:
    """Raise RunError if this process has a phantom GPU, but the import of torch did not replace torch's operators."""
    if is_phantom() and not hasattr(torch, "_phantom_gpu"):
        reason = (
            "Python did not import the start-up hook; keep the PYTHONPATH that python -m titan_launch.phantom_gpu "
            "sets, and start python without -E, -I or -S"
        )
        raise RunError(f"the phantom GPU is not complete in this process: {reason}")
