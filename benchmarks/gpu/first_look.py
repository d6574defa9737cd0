"""Checks for the first ten minutes on a borrowed GPU, the most important first. A failure ends one step only.

scripts/gpu_first_look.sh --wheels .wheels
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.gpu.__main__ import add_options, fail
from benchmarks.gpu.requirements import device_problem, requirements_problem

_BUDGET_SECONDS = 570


def main() -> int:
    """Run all steps, then the cases of the table. Return 1 if any of them failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description="Run checks for the first ten minutes on a GPU, the most important first."
    )
    add_options(parser, "outputs/gpu_first_look", _BUDGET_SECONDS)
    options = parser.parse_args()
    if problem := requirements_problem() or device_problem(options.smoke):
        return fail(problem, 2)
    from benchmarks.gpu.processes import ended_by_signals
    from benchmarks.gpu.steps import FirstLook, all_steps

    with FirstLook(options.output, options.smoke, began + options.budget) as look, ended_by_signals():
        for group in all_steps(options.smoke, look.scratch):
            look.run(group)
        look.measure()
    return 1 if look.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
