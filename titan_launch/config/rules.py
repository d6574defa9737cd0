"""What pydantic cannot see: keys that are right alone and wrong together, names that must exist.

Every rule is a function that yields the problems it finds. A problem names in `also` the other keys it depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from titan_launch.config.checkpoint_rules import CHECKPOINT_RULES
from titan_launch.config.compile_rules import COMPILE_RULES
from titan_launch.config.data_rules import DATA_RULES
from titan_launch.config.fault_rules import FAULT_RULES
from titan_launch.config.float8_rules import FLOAT8_RULES
from titan_launch.config.job import JobConfig
from titan_launch.config.kernel_rules import KERNEL_RULES
from titan_launch.config.model_rules import MODEL_RULES
from titan_launch.config.optimizer_rules import OPTIMIZER_RULES
from titan_launch.config.parallelism_rules import PARALLELISM_RULES
from titan_launch.config.pipeline_rules import PIPELINE_RULES
from titan_launch.config.precision_rules import PRECISION_RULES
from titan_launch.errors import Problem

Rule = Callable[[JobConfig], Iterator[Problem]]
"""Yields what is wrong with a job."""


def kernels_are_profiled_on_cuda(config: JobConfig) -> Iterator[Problem]:
    """On a CPU there are no kernels to profile."""
    if config.job.device == "cpu" and config.comm.profile_freq:
        reason = 'profiles CUDA kernels, and job.device = "cpu" has none; leave it out, or set another device'
        yield Problem(("comm", "profile_freq"), reason, config.comm.profile_freq, also=(("job", "device"),))


RULES: tuple[Rule, ...] = (
    *MODEL_RULES,
    *DATA_RULES,
    *PRECISION_RULES,
    kernels_are_profiled_on_cuda,
    *FAULT_RULES,
    *CHECKPOINT_RULES,
    *COMPILE_RULES,
    *KERNEL_RULES,
    *FLOAT8_RULES,
    *OPTIMIZER_RULES,
    *PIPELINE_RULES,
    *PARALLELISM_RULES,
)
"""All of them."""
