"""Checks for the first 40 minutes on a borrowed GPU, the most important first. A failure ends one step only.

scripts/gpu_first_look.sh --wheels .wheels
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.gpu.__main__ import add_options, deadline, fail, no_match
from benchmarks.gpu.requirements import device_problem, requirements_problem

_BUDGET_SECONDS = 2400


def main() -> int:
    """Run all steps, then the cases of the table. Return 1 if any of them failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        description="Run checks for the first 40 minutes on a GPU, the most important first."
    )
    add_options(parser, "outputs/gpu_first_look", _BUDGET_SECONDS)
    options = parser.parse_args()
    if problem := requirements_problem() or device_problem(options.smoke):
        return fail(problem, 2)
    from benchmarks.gpu.jobs import Setting
    from benchmarks.gpu.one_gpu import groups
    from benchmarks.gpu.processes import ended_by_signals
    from benchmarks.gpu.runs import device_of
    from benchmarks.gpu.steps import StepRunner, select_steps
    from benchmarks.gpu.suite import Suite, select

    has_values = not options.without_values
    runner = StepRunner(options.output, has_values, deadline(began, options))
    setting = Setting(options.smoke, runner.scratch, has_values)
    selected, (cases, _) = select_steps(groups(setting), options.only), select(options.smoke, options.only)
    if not any(selected) and not cases:
        names = [
            *(step.name for steps in groups(setting) for step in steps),
            *(c.name for c in select(options.smoke)[0]),
        ]
        return fail(no_match(options.only, names), 2)
    device = device_of(options.smoke)
    suite = Suite(cases, False, device, options.output, runner.logs, has_values, lambda _: runner.write())
    runner.appendix = lambda: f"## table\n\n{suite.text()}"
    setting.write_data()
    with runner, ended_by_signals():
        for steps in selected:
            runner.run(steps)
        suite.run(deadline(began, options))
    return 1 if runner.has_failed or suite.failed else 0


if __name__ == "__main__":
    sys.exit(main())
