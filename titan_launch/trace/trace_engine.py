"""The planner's reference engine, for any model. The engine runs a step on fake tensors to predict memory and traffic.
If possible, it traces two models with fewer blocks instead of the whole model, and extrapolates."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch._subclasses import fake_tensor

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.model import ModelConfig
from titan_launch.config.sections.parallelism import CompileConfig
from titan_launch.core.errors import ConfigError, UserError, config_error
from titan_launch.core.import_string import user_location, user_traceback
from titan_launch.core.torch_release import NEWEST_TESTED, is_tested_release, torch_release
from titan_launch.models.blocks import remove_blocks
from titan_launch.plan.communication import Traffic, on_line
from titan_launch.plan.hardware import Kernels
from titan_launch.plan.job import Choice, plan_job, with_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.depth import Shortcut, find_shortcut, without_blocks
from titan_launch.plan.memory.ledger import Footprint, extrapolate
from titan_launch.plan.pipeline import parts_on_rank, representative_ranks
from titan_launch.plan.types import Inventory, ModelPlan
from titan_launch.trace.step import TracedStep, trace_step
from titan_launch.train.model import build_job_model, inspect_model

_log = logging.getLogger(__name__)

_ON_THE_LINE = 1e-4
"""Memory counts as a linear function of depth (the number of blocks) if the extrapolated peak memory at a third depth
has at most this relative error."""


def trace_rank(config: JobConfig, plan: ModelPlan, layout: Layout, kernels: Kernels, rank: int) -> TracedStep:
    """Trace the step of one rank. `plan`: plan of the model with all stages.

    If one block repeats often, and the rank has one pipeline stage, trace the model at two smaller depths and
    extrapolate. Otherwise, or if memory is not a linear function of depth, trace all blocks. Raises ConfigError as
    `trace_step` does, and for a model that cannot be traced.
    """
    parts = parts_on_rank(plan, layout.pipeline_rank(rank))

    def trace_without(removed: Sequence[str]) -> TracedStep:
        built = build_job_model(config)
        remove_blocks(built.module, removed)
        return trace_step(config, built, without_blocks(plan, removed), layout, kernels, rank)

    # With several stages, each stage holds the activations of a different number of microbatches.
    shortcut = find_shortcut(parts[0]) if len(parts) == 1 else None
    if shortcut is not None:
        short = _trace_short(trace_without, shortcut, checks_line=not config.model.is_of_package)
        if short is not None:
            return short
    with failures_explained(config.model):
        return trace_without(())


def _trace_short(
    trace_without: Callable[[Sequence[str]], TracedStep], shortcut: Shortcut, checks_line: bool
) -> TracedStep | None:
    """Trace the model at two depths and extrapolate. `trace_without`: function that traces the model without some
    blocks, by their paths.

    Return None if the model does not run without some of its blocks. Also return None if memory or traffic is not a
    linear function of depth, for example because each block reads the outputs of all earlier blocks. `checks_line`:
    True to check the linear function with a trace at a third depth.
    """
    with whole_traced_on_error():
        shorter = trace_without(shortcut.removed_from_shorter)
        longer = trace_without(shortcut.removed_from_longer)
        whole = _extrapolated(shorter, longer, shortcut.factor)
        if whole is not None and checks_line:
            seen = trace_without(shortcut.removed_for_check)
            whole = whole if _are_alike(_extrapolated(shorter, longer, 2), seen) else None
        if whole is None:
            log_whole_trace("the memory or the traffic of the model does not grow linearly with its depth")
        return whole
    return None


def log_whole_trace(reason: str) -> None:
    """Log a warning that all blocks of a model are traced, with the reason."""
    _log.warning("all blocks are traced, which takes longer: %s", reason)


@contextmanager
def whole_traced_on_error() -> Iterator[None]:
    """Suppress errors in the `with` block, which traces a model without some of its blocks. Log a warning for all but
    ConfigErrors. A model may fail without these blocks, for example if it counts its blocks. An error that has another
    cause occurs again in the trace of all blocks, which raises it."""
    try:
        yield
    except ConfigError:  # the trace of all blocks most likely raises the same error
        pass
    except Exception as error:
        log_whole_trace(f"the model does not run without some of its blocks ({error})")


def _are_alike(a: TracedStep | None, b: TracedStep) -> bool:
    if a is None or a.traffic != b.traffic:
        return False
    return abs(a.footprint.peak_bytes / b.footprint.peak_bytes - 1) < _ON_THE_LINE


def _extrapolated(shorter: TracedStep, longer: TracedStep, factor: float) -> TracedStep | None:
    footprint = extrapolate(shorter.footprint, longer.footprint, factor)
    if footprint is None:
        return None
    return TracedStep(footprint, on_line(shorter.traffic, longer.traffic, factor))


_NEEDS_VALUES = (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException)
_UNSUPPORTED = (fake_tensor.UnsupportedOperatorException, fake_tensor.UnsupportedFakeTensorException)
_OPERATION_BY_ERROR_TEXT = {".numpy()": "tensor.numpy()", "Cannot access data pointer": "tensor.data_ptr()"}


@contextmanager
def failures_explained(config: ModelConfig) -> Iterator[None]:
    """Raise a ConfigError on `model.name` in place of an error of a trace.

    In any model, errors of operations that need values, or that fake tensors do not support, are replaced. In a user's
    own model, all other errors are replaced too, and the ConfigError contains the traceback. A ConfigError is never
    replaced.
    """
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        operation = _untraceable_operation(error)
        if operation is not None:
            location = user_location(error, or_own=True)
            problem = (
                "is not supported by PyTorch's fake tensors, with which a trace runs; register the operation's output "
                "shapes (torch.library.register_fake), or use another operation"
                if isinstance(error, _UNSUPPORTED)
                else "needs the values of a tensor, and a trace has only shapes; use an operation that "
                "needs no values, such as torch.where or masked_fill"
            )
            reason = f"cannot be traced: {operation}{f' at {location}' if location else ''} {problem}"
            raise config_error(("model", "name"), reason, config.name) from error
        if config.is_of_package:
            raise
        reason = "failed in a trace, on tensors that have shapes but no values:"
        raise config_error(("model", "name"), f"{reason}\n{user_traceback(error)}", config.name) from error


def _untraceable_operation(error: Exception) -> str | None:
    """Return the name of the operation that cannot run on fake tensors; None for an error of another kind."""
    if isinstance(error, (*_NEEDS_VALUES, *_UNSUPPORTED)):
        operation = getattr(error, "func", None) or next(iter(error.args), "an operation")
        return _READABLE.get(str(operation), str(operation))
    if isinstance(error, RuntimeError):
        return next((name for part, name in _OPERATION_BY_ERROR_TEXT.items() if part in str(error)), None)
    return None


_READABLE = {
    "aten._local_scalar_dense.default": "aten._local_scalar_dense (tensor.item(), a tensor as a number or condition)",
    "aten.nonzero.default": "aten.nonzero (torch.nonzero, or a mask as an index)",
}


class TraceEngine:
    """An engine that traces a job's step once for each `Choice` (a gradient accumulation and an activation
    checkpointing mode). Compiled models are traced without compilation."""

    def __init__(self, config: JobConfig, layout: Layout, kernels: Kernels):
        """`kernels`: the device family whose memory is predicted. For CUDA, `trace.cuda_kernels` replaces CPU
        operations. The process must have no process group. Raises UserError on an untested release of PyTorch."""
        check_release()
        self._config = config.model_copy(update={"compile": CompileConfig()})
        self._layout = layout
        self._kernels = kernels
        self._inventory: Inventory | None = None
        self._known: dict[Choice, TracedStep] = {}

    def __call__(self, choice: Choice) -> Footprint:
        """Return the active memory of the rank with the highest peak, in one step with the two modes of `choice`.

        Raises ConfigError as a run would, and for a model that cannot be traced.
        """
        return self._step(choice).footprint

    def traffic(self, choice: Choice) -> Traffic:
        """Return the traffic of one step, counted on the rank whose memory `__call__` returns.

        The traffic includes the collectives of FSDP2 units, and communication along the tensor, context, pipeline and
        expert axes. Raises ConfigError as `__call__` does.
        """
        return self._step(choice).traffic

    def seconds(self, choice: Choice) -> None:
        """Return None: a trace does not predict the times of operations."""

    def _step(self, choice: Choice) -> TracedStep:
        if choice not in self._known:
            config = with_choice(self._config, choice)
            if self._inventory is None:
                self._inventory = inspect_model(config, build_job_model(config))
            plan = plan_job(config, self._inventory)
            ranks = representative_ranks(plan, with_times=False)
            traced = (self._traced_on(config, plan, pipeline_rank) for pipeline_rank in ranks)
            self._known[choice] = max(traced, key=lambda step: step.footprint.peak_bytes)
        return self._known[choice]

    def _traced_on(self, config: JobConfig, plan: ModelPlan, pipeline_rank: int) -> TracedStep:
        rank = pipeline_rank * self._layout.ranks_per_stage
        traced = trace_rank(config, plan, self._layout, self._kernels, rank)
        if not plan.stages:
            return traced
        return replace(traced, footprint=replace(traced.footprint, pipeline_rank=pipeline_rank))


def check_release() -> None:
    """Raise UserError on an untested release of PyTorch, on which jobs cannot be traced."""
    if not is_tested_release():
        release, newest = (".".join(map(str, numbers)) for numbers in (torch_release(), NEWEST_TESTED))
        reason = f"torch {release} is newer than the newest release that was tested, {newest}, so jobs cannot be traced"
        raise UserError(f"{reason}; install torch {newest}")
