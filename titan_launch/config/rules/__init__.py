"""Rules that pydantic cannot check: contradictions between keys, and names that must exist.

A rule is a function that yields a `Problem` for each error that it finds. `Problem.also` names the other keys on which
the problem depends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from titan_launch.config.job import JobConfig
from titan_launch.config.rules.checkpoint import CHECKPOINT_RULES, HEALTH_RULES
from titan_launch.config.rules.compile import COMPILE_RULES, KERNEL_RULES
from titan_launch.config.rules.data import DATA_RULES
from titan_launch.config.rules.images import IMAGE_RULES
from titan_launch.config.rules.loss import LOSS_RULES
from titan_launch.config.rules.model import MODEL_RULES, frozen_parameters_are_clear
from titan_launch.config.rules.optimizer import OPTIMIZER_RULES, ema_settings_have_an_effect
from titan_launch.config.rules.parallelism import PARALLELISM_RULES, PIPELINE_RULES
from titan_launch.config.rules.precision import FLOAT8_RULES, PRECISION_RULES
from titan_launch.core.errors import Problem, format_key

Rule = Callable[[JobConfig], Iterator[Problem]]
"""A function that yields the problems of a job."""


def kernels_are_profiled_on_cuda(config: JobConfig) -> Iterator[Problem]:
    """Report a problem if `comm.profile_freq` is set on a CPU, which has no CUDA kernels to profile."""
    if config.job.device == "cpu" and config.comm.profile_freq:
        reason = 'profiles CUDA kernels, but job.device is "cpu"; remove this key, or set job.device = "cuda"'
        yield Problem(("comm", "profile_freq"), reason, config.comm.profile_freq, also=(("job", "device"),))


def profiles_can_be_made(config: JobConfig) -> Iterator[Problem]:
    """Report a problem for a profile of steps after the run, and for a memory profile on a CPU."""
    profiling, training, start = config.profiling, config.training, config.profiling.start_step
    if start is not None and training.steps is not None and start + profiling.num_steps - 1 > training.steps:
        length = f"the run has {training.steps} ({format_key(training.length_key)})"
        reason = f"begins a profile of {profiling.num_steps} steps, but {length}; set less"
        yield Problem(("profiling", "start_step"), reason, start, also=(training.length_key,))
    if profiling.memory and config.job.device == "cpu":
        reason = 'records allocations of a GPU, but job.device is "cpu"; remove this key, or set job.device = "cuda"'
        yield Problem(("profiling", "memory"), reason, True, also=(("job", "device"),))


RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *DATA_RULES,
    *LOSS_RULES,
    *IMAGE_RULES,
    *PRECISION_RULES,
    kernels_are_profiled_on_cuda,
    profiles_can_be_made,
    *HEALTH_RULES,
    *CHECKPOINT_RULES,
    *COMPILE_RULES,
    *KERNEL_RULES,
    *FLOAT8_RULES,
    *OPTIMIZER_RULES,
    *PIPELINE_RULES,
    *PARALLELISM_RULES,
)
"""All rules, in the order in which they run."""

STEP_RULES: tuple[Rule, ...] = (profiles_can_be_made, frozen_parameters_are_clear, ema_settings_have_an_effect)
"""The rules that read `training.steps`. A run with `training.epochs` checks them again when it knows the steps."""
