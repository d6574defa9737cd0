"""The clock of all tools: after each step of an AdamW, rank 0 appends the time to a file.

If tools take turns (`benchmarks.speed.turns`), every rank then waits for the next turn of its tool.

Python imports this module in every process that has the folder on its PYTHONPATH, so the tools need no change. When
PyTorch's optimizers are imported, the module registers a hook on their `step`. Times are those of the monotonic clock,
which all processes of a machine share.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_HOOKED = "torch.optim.optimizer"


class _Finder:
    """An import hook that finds PyTorch's optimizer module as usual, and adds the clock after its import."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != _HOOKED:
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None, name
        execute = spec.loader.exec_module

        def execute_and_hook(module: ModuleType) -> None:
            execute(module)
            module.register_optimizer_step_post_hook(_stamp)

        spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


def _stamp(optimizer: Any, *_: Any) -> None:
    if type(optimizer).__name__ != "AdamW":
        return  # a wrapper (Accelerate's, TorchTitan's) that is also an optimizer, and calls AdamW's step
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        with open(os.environ["SPEED_STAMPS"], "a") as stamps:
            stamps.write(f"{time.monotonic()}\n")
    if "SPEED_TURNS" in os.environ:
        _wait_for_turn(os.environ["SPEED_TURNS"], rank)


def _wait_for_turn(folder: str, rank: str) -> None:
    """Write this process's id to the FIFO `done`, and wait for a byte from the FIFO `go`."""
    with open(f"{folder}/done-{rank}", "wb", buffering=0) as done:
        done.write(b"%d\n" % os.getpid())
    with open(f"{folder}/go-{rank}", "rb", buffering=0) as go:
        go.read(1)


if "SPEED_STAMPS" in os.environ:
    sys.meta_path.insert(0, _Finder)
