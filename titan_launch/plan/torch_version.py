"""What the installed torch can do, found without importing it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_TORCH_KNOWN = "2.13"
"""What is planned for where no torch is installed."""


def torch_version() -> tuple[int, ...]:
    """Major and minor: `(2, 13)`."""
    try:
        installed = version("torch")
    except PackageNotFoundError:
        installed = _TORCH_KNOWN
    return tuple(int(part) for part in installed.split(".")[:2])


CAN_SHARE_UNITS = torch_version() >= (2, 13)
"""Whether one `fully_shard` call casts the inputs and outputs of every module it is given. Before torch 2.13 it cast
the inputs of the first that runs and the outputs of the last, and lost count when one of them did not run."""
