"""Checks for 40 minutes on a borrowed host with eight GPUs. A failure ends one step only.

scripts/gpu_eight.sh --wheels .wheels
"""

from __future__ import annotations

import argparse
import sys
import time

from benchmarks.gpu.__main__ import add_options, deadline, fail, no_match
from benchmarks.gpu.requirements import device_problem, requirements_problem

_BUDGET_SECONDS = 2400
_SMOKE_RANKS = 2


def main() -> int:
    """Run all steps. Return 1 if any of them failed."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description="Run checks for 40 minutes on eight GPUs, the most important first.")
    add_options(parser, "outputs/gpu_eight", _BUDGET_SECONDS)
    text = "number of ranks and of GPUs, an even number (default: 8; with --smoke: 2)"
    parser.add_argument("--ranks", type=int, help=text)
    options = parser.parse_args()
    ranks = options.ranks or (_SMOKE_RANKS if options.smoke else 8)
    if ranks < 2 or ranks % 2:
        return fail(f"--ranks {ranks}: must be an even number, 2 or more", 2)
    if problem := requirements_problem() or device_problem(options.smoke, ranks):
        return fail(problem, 2)
    from benchmarks.gpu.eight_gpus import groups
    from benchmarks.gpu.jobs import Setting
    from benchmarks.gpu.processes import ended_by_signals
    from benchmarks.gpu.steps import StepRunner, select_steps

    has_values = not options.without_values
    runner = StepRunner(options.output, has_values, deadline(began, options))
    setting = Setting(options.smoke, runner.scratch, has_values, ranks)
    selected = select_steps(groups(setting), options.only)
    if not any(selected):
        return fail(no_match(options.only, [step.name for steps in groups(setting) for step in steps]), 2)
    with runner, ended_by_signals():
        for steps in selected:
            runner.run(steps)
    return 1 if runner.has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
