"""What the installed torch can do, found without importing it."""

from __future__ import annotations

from importlib.metadata import version

TORCH_VERSION = tuple(int(part) for part in version("torch").split(".")[:2])
"""Major and minor: `(2, 13)`."""

CAN_SHARE_UNITS = TORCH_VERSION >= (2, 13)
"""Whether one `fully_shard` call casts the inputs and outputs of every module it is given. Before torch 2.13 it cast
the inputs of the first that runs and the outputs of the last, and lost count when one of them did not run."""
