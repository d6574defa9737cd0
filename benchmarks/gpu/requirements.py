"""The packages that the benchmarks need. This module imports none of them."""

from __future__ import annotations

import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("torch", "numpy", "pydantic", "tomli", "torchdata", "tensorboard", "pytest", "pytest_timeout", "xdist")
_TORCH = (2, 11)


def requirements_problem() -> str:
    """Return an error that names the missing packages and the remedy; empty if there are none."""
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if "torch" not in missing and tuple(map(int, version("torch").split(".")[:2])) < _TORCH:
        missing.append(f"torch {_TORCH[0]}.{_TORCH[1]} or later")
    if not missing:
        return ""
    install = f"run {sys.executable} -m pip install -e '.[float8,test]' in {Path.cwd()}"
    wheels = "without network, pass --wheels DIR with a folder that scripts/gpu_wheels.sh has filled"
    return f"{sys.executable} lacks {', '.join(missing)}; {install}; {wheels}"


def device_problem(is_smoke: bool, ranks: int = 1) -> str:
    """Return an error if there are fewer CUDA devices than `ranks` and they are needed."""
    import torch  # not before `requirements_problem` has found it

    if is_smoke or torch.cuda.device_count() >= ranks:
        return ""
    if torch.cuda.is_available():
        return f"--ranks {ranks}: this host has {torch.cuda.device_count()} CUDA devices; set --ranks"
    return "no CUDA device is available; --smoke runs tiny shapes on a CPU"
