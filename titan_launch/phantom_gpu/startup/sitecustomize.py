"""Hook for processes with a phantom GPU. Python imports this module at startup if this folder is on the path. If the
variable PHANTOM_DEVICE is set, the module replaces PyTorch's operators as soon as torch is imported. The process need
not have titan_launch on its path. The module also runs the environment's own `sitecustomize`, which it hides."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))


def _run(spec: ModuleSpec | None) -> ModuleType:
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class _AfterTorch(PathFinder):
    """An import finder for torch only. It replaces torch's operators as soon as torch is imported."""

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                file = os.path.join(os.path.dirname(_HERE), "operators.py")
                operators = _run(importlib.util.spec_from_file_location("phantom_gpu_operators", file))
                vars(module)["_phantom_gpu"] = operators.replace_operators()  # must live as long as torch

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec


if "PHANTOM_DEVICE" in os.environ:
    sys.meta_path.insert(0, _AfterTorch)

_hidden = PathFinder.find_spec(__name__, [folder for folder in sys.path if os.path.abspath(folder) != _HERE])
if _hidden is not None:  # the environment has a module of this name too
    _run(_hidden)
