"""Command that runs the cases one after the other, and writes the table.

benchmarks/gpu.sh --write docs/verification/gpu.md
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from benchmarks.gpu.requirements import device_problem, requirements_problem
from benchmarks.publishing import put_between_markers

_BUDGET_SECONDS = 540
"""Default budget. It leaves a minute of ten for imports and for processes that exceed their time limit."""


def main() -> int:
    """Run the command and return its exit status."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description="Compare the launcher on one GPU with a bare loop and with its own plan."
    )
    add_options(parser, "outputs/gpu", _BUDGET_SECONDS)
    parser.add_argument("--write", type=Path, help="Markdown file; the table is put between its markers")
    parser.add_argument("--only", action="append", metavar="GLOB", help="run the cases whose name matches; repeatable")
    options = parser.parse_args()
    if problem := requirements_problem() or file_problem(options.write) or device_problem(options.smoke):
        return fail(problem, 2)
    from benchmarks.gpu import gpu_tests
    from benchmarks.gpu.processes import ended_by_signals
    from benchmarks.gpu.runs import device_of
    from benchmarks.gpu.suite import Suite, select

    cases, with_tests = select(options.smoke, options.only or ())
    if not cases and not with_tests:
        names = "\n".join([*(case.name for case in select(options.smoke)[0]), gpu_tests.NAME])
        return fail(f"--only {' '.join(options.only)} matches no case; the names are:\n{names}", 2)

    def publish(text: str) -> None:
        if options.write is not None:
            put_between_markers(text, "gpu", options.write)

    output = options.output
    suite = Suite(cases, with_tests, device_of(options.smoke), output, output / "logs", publish)
    try:
        with ended_by_signals():
            suite.run(began + options.budget)
    finally:
        print(f"{suite.text()}\n\noutput: {output.resolve()}", flush=True)
    if suite.failed:
        failed = "; ".join(suite.failed)
        return fail(f"no result of {failed}; see the table for the reasons, and {output}/logs for the logs", 1)
    return 0


def add_options(parser: argparse.ArgumentParser, output: str, budget: float) -> None:
    """Add the options that all commands of this package have."""
    parser.add_argument("--output", type=Path, default=Path(output), help=f"folder for all files (default: {output})")
    parser.add_argument(
        "--budget", type=float, default=budget, help=f"time limit of the whole run in seconds (default: {budget})"
    )
    parser.add_argument("--smoke", action="store_true", help="run tiny shapes on a CPU, to test the benchmark itself")
    parser.add_argument("--wheels", help="folder of wheels to install from; the shell script handles this option")


def fail(problem: str, status: int) -> int:
    """Print an error and return the exit status."""
    print(f"error: {problem}", file=sys.stderr)
    return status


def file_problem(path: Path | None) -> str:
    """Return an error if the table cannot be put into a file."""
    return f"--write {path} is not a file in {Path.cwd()}" if path is not None and not path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
