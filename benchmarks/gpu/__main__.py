"""Run the cases one after the other, and write the table.

benchmarks/gpu.sh --write docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

_BUDGET_SECONDS = 540
"""For everything, tests included; the rest of ten minutes is for imports, and for ending what was not done."""

_REQUIRED = ("torch", "numpy", "pydantic", "tomli", "torchdata", "tensorboard", "pytest", "pytest_timeout")
_TORCH = (2, 11)


def main() -> int:
    """The command; its exit status."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="The launcher on one GPU, against a bare loop and its own plan.")
    parser.add_argument("--write", type=Path, help="Markdown file to put the table into, between its markers")
    parser.add_argument("--budget", type=float, default=_BUDGET_SECONDS, help="seconds for everything")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU: that everything runs")
    options = parser.parse_args()
    if problem := requirements_problem() or file_problem(options.write):
        print(f"error: {problem}", file=sys.stderr)
        return 2
    import torch  # not before it is known to be there

    from benchmarks.gpu.suite import run_suite

    if not options.smoke and not torch.cuda.is_available():
        print("error: benchmarks/gpu.sh measures on a CUDA device; without one, run it with --smoke", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that it ends as by an error
    failed = run_suite(options.smoke, options.write, deadline=began + options.budget)
    if failed:
        print(f"error: no result of {'; '.join(failed)}; the reasons are below the table", file=sys.stderr)
        return 1
    return 0


def requirements_problem() -> str:
    """Which packages this Python lacks, and what installs them; empty where it has all."""
    missing = [name for name in _REQUIRED if find_spec(name) is None]
    if "torch" not in missing and tuple(map(int, version("torch").split(".")[:2])) < _TORCH:
        missing.append(f"torch {_TORCH[0]}.{_TORCH[1]} or later")
    if not missing:
        return ""
    return (
        f"{sys.executable} lacks {', '.join(missing)}; run {sys.executable} -m pip install -e '.[test]' in {Path.cwd()}"
    )


def file_problem(path: Path | None) -> str:
    """Why the table cannot be put into the file; empty where it can."""
    return f"--write {path} is no file in {Path.cwd()}" if path is not None and not path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
