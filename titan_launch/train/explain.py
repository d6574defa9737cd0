"""Explanations of the errors that end a run or a trace.

Each function `explain...` explains certain kinds of errors. The function returns a new error, which names a key or says
what to do, to raise in place of the original error. For an error of another kind, the function returns None. All errors
are explained here, at the end of a run or trace. So the code that calls a model does not catch errors.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, RunError, Stopped, UserError
from titan_launch.models.parallel_plans import explain_shapes
from titan_launch.parallel.pipeline import parts
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.diagnosis import explain_dtypes
from titan_launch.train.forward import explain_forward
from titan_launch.train.health.out_of_memory import explain_out_of_memory
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.kernel_choice import explain_refusal
from titan_launch.train.run import Run
from titan_launch.train.run_folder.resume import how_to_resume


def explain(error: BaseException, config: JobConfig, watchdog: Watchdog, run: Run | None) -> Exception | None:
    """Return the error to raise in place of an error that ends a run. Return None for an unknown error, and for an
    error that itself says what to do. `run`: None if the run was not built.

    Call this function while the run is open, because it reads the memory in use and the progress of the other ranks.
    """
    if isinstance(error, (UserError, RunError, Stopped)):
        return None
    found: Exception | None = None
    if run is not None and watchdog.runs_model:  # errors of other code may have the same text as errors of a model
        found = None if run.observers.audit is None else run.observers.audit.explain(error)
        found = found or explain_model(error, run.config, run.model, run.job.plan, run.refusals)
    if run is not None:
        found = found or explain_out_of_memory(error, run)
    return found or watchdog.explain(error) or explain_full_disk(error, config)


def explain_model(
    error: BaseException, config: JobConfig, model: nn.Module, plan: ModelPlan, refusals: Sequence[str] = ()
) -> ConfigError | None:
    """Return the error to raise in place of an error in the forward or backward of a wrapped model; None for an unknown
    error. `refusals`: PyTorch's reasons for refusing calls of attention, from its warnings."""
    found = explain_forward(error)
    for module, part in reversed([*parts(model, plan)]):
        found = found or explain_dtypes(error, module, part, config.precision)
    found = found or explain_shapes(error, config)
    return found or explain_refusal(error, config.kernels, refusals)


@contextmanager
def explained_in_trace(config: JobConfig, model: nn.Module, plan: ModelPlan) -> Iterator[None]:
    """If `explain_model` explains an error of the block, which traces a model, raise the explanation in place of the
    error."""
    try:
        yield
    except Exception as error:
        found = explain_model(error, config, model, plan)
        if found is None:
            raise
        raise found from error


def explain_full_disk(error: BaseException, config: JobConfig) -> RunError | None:
    """Return the RunError if a full disk prevented a write to the run folder; None for a different error. (A report or
    checkpoint that does not fit on the disk is only logged as a warning, and training continues.)"""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    reason = f"{config.job.run_folder} cannot be written to: {os.strerror(error.errno)}"
    advice = how_to_resume(config) if config.checkpoint.enable else "begin again (checkpoint.enable is false)"
    return RunError(f"{reason}; free disk space, and {advice}")
