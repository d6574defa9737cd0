"""Command that runs the cases one after the other, and writes the table.

benchmarks/gpu.sh --write docs/verification/gpu.md
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Sequence
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
    options = parser.parse_args()
    if problem := requirements_problem() or file_problem(options.write) or device_problem(options.smoke):
        return fail(problem, 2)
    from benchmarks.gpu import gpu_tests
    from benchmarks.gpu.processes import ended_by_signals
    from benchmarks.gpu.runs import device_of
    from benchmarks.gpu.suite import Suite, select

    cases, with_tests = select(options.smoke, options.only)
    if not cases and not with_tests:
        names = [*(case.name for case in select(options.smoke)[0]), gpu_tests.NAME]
        return fail(no_match(options.only, names), 2)

    def publish(text: str) -> None:
        if options.write is not None:
            put_between_markers(text, "gpu", options.write)

    output = options.output
    has_values = not options.without_values
    suite = Suite(cases, with_tests, device_of(options.smoke), output, output / "logs", has_values, publish)
    try:
        with ended_by_signals():
            suite.run(deadline(began, options))
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
    text = "run the steps and cases whose name matches; repeatable"
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help=text)
    text = "for a device that computes nothing: compare no losses, leave out times, and multiply time limits by 10"
    parser.add_argument("--without-values", action="store_true", help=text)
    parser.add_argument("--smoke", action="store_true", help="run tiny shapes on a CPU, to test the benchmark itself")
    parser.add_argument("--wheels", help="folder of wheels to install from; the shell script handles this option")


def deadline(began: float, options: argparse.Namespace) -> float:
    """Return the time (of `time.monotonic`) at which a command that began at `began` must end."""
    from benchmarks.gpu.processes import slowness

    return began + float(options.budget) * slowness(not options.without_values)


def fail(problem: str, status: int) -> int:
    """Print an error and return the exit status."""
    print(f"error: {problem}", file=sys.stderr)
    return status


def no_match(only: Sequence[str], names: Iterable[str]) -> str:
    """Return the error for globs that match no name."""
    listed = "\n".join(names)
    return f"--only {' '.join(only)} matches nothing; the names are:\n{listed}"


def file_problem(path: Path | None) -> str:
    """Return an error if the table cannot be put into a file."""
    return f"--write {path} is not a file in {Path.cwd()}" if path is not None and not path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
