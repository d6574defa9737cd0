"""Explanations of the errors that end a run or a trace.

Each function `explain...` explains certain kinds of errors. The function returns a new error, which names a key or says
what to do, to raise in place of the original error. For an error of another kind, the function returns None. Errors of
a training step are explained here, at the end of a run or trace. So the code of the step does not catch errors.
"""

from __future__ import annotations

import errno
import os
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, RunError, Stopped, UserError
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.metrics.tags import OTHER
from titan_launch.models.blocks import has_forward
from titan_launch.models.parallel_plans import explain_shapes
from titan_launch.parallel.pipeline import parts
from titan_launch.plan.advice import Advice
from titan_launch.plan.hardware import GIB, format_memory
from titan_launch.plan.types import ModelPlan
from titan_launch.precision.diagnosis import explain_dtypes
from titan_launch.train.forward import explain_forward
from titan_launch.train.health.watchdog import Watchdog
from titan_launch.train.kernel_choice import explain_refusal
from titan_launch.train.run import Run
from titan_launch.train.run_folder.resume import how_to_resume
from titan_launch.train.trace_subprocess import TraceProcess

_CPU_ALLOCATION = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


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
    """In a block that traces a model, replace an error that `explain_model` explains by its ConfigError. Other errors
    are raised unchanged."""
    try:
        yield
    except Exception as error:
        found = explain_model(error, config, model, plan)
        if found is None:
            raise
        raise found from error


def explain_full_disk(error: BaseException, config: JobConfig) -> RunError | None:
    """Return the RunError if a full disk prevented a write; None for a different error. The RunError names the file or
    folder of the original error or, if that error names none, the run folder. (A report or checkpoint that does not fit
    on the disk is only logged as a warning, and training continues.)"""
    if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    reason = f"{error.filename or config.job.run_folder} cannot be written to: {os.strerror(error.errno)}"
    advice = how_to_resume(config) if config.checkpoint.enable else "begin again (checkpoint.enable is false)"
    return RunError(f"{reason}; free disk space, and {advice}")


def explain_out_of_memory(error: BaseException, run: Run) -> RunError | None:
    """Return the RunError for an out-of-memory error, with a report; None for a different error. If the job
    records allocations, also write a snapshot of GPU memory."""
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        run.observers.profiler.write_snapshot_of_failure()
    return RunError(_out_of_memory_report(run, error))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of PyTorch's allocator for a GPU or for the host."""
    return isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATION.search(str(error)) is not None


def _out_of_memory_report(run: Run, error: BaseException) -> str:
    """Return the report: the failed allocation with phase and module, the memory in use, the planned peak by category,
    and up to three changes as TOML. The planner runs in another process. If the planner fails, its error replaces the
    plan and the changes."""
    where = f"{_failed_allocation(error)} {_place_of_allocation(run, error)}".rstrip()
    lines = [f"out of memory on rank {run.ranks.rank} in step {run.progress.step + 1}: {where}", _memory_in_use(run)]
    try:
        with ExitStack() as stack:
            plan = TraceProcess(run.config, run.job.layout.world_size, run.job.hardware, stack, advises=True).result()
    except (ConfigError, UserError, RunError, OSError) as failure:
        reason = str(failure).splitlines()[-1]
        return "\n".join([*lines, f"no planned peak, because the planner failed: {reason}"])
    row = next(row for row in plan["rows"] if row["is_chosen"])
    largest = sorted(row["active_bytes_by_category"].items(), key=lambda held: -held[1])[:4]
    categories = ", ".join(f"{name} {format_memory(size)}" for name, size in largest)
    lines.append(f"planned peak: {format_memory(row['active_bytes'])} ({row['peak']['text']}): {categories}")
    if plan["advice"]:
        lines.append("the cheapest changes, with their planned saving:")
        lines += [f"  {line}" for advice in plan["advice"] for line in Advice(**advice).text()]
    else:
        lines.append("no key of the job saves memory: use more ranks to shard over, or devices with more memory")
    return "\n".join(lines)


def _failed_allocation(error: BaseException) -> str:
    if found := _CPU_ALLOCATION.search(str(error)):
        return f"an allocation of {format_memory(int(found[1]))} failed"
    if found := re.search(r"Tried to allocate ([\d.]+) ([KMG]iB)", str(error)):
        units = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}
        return f"an allocation of {format_memory(float(found[1]) * units[found[2]])} failed"
    return "an allocation failed"


def _place_of_allocation(run: Run, error: BaseException) -> str:
    """Return a clause with the phase of the step and the innermost module in the traceback. If the traceback has no
    module, as in backward and in collectives, the clause names the FSDP2 unit that was used last."""
    phase = run.observers.meter.timeline.part
    paths = {id(module): path for path, module in run.model.named_modules()}
    innermost = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and has_forward(module):
            innermost = paths.get(id(module), innermost)
    where = innermost or (run.observers.meter.timeline.last_unit if phase in ("backward", "communication") else "")
    return f"in {'the step' if phase == OTHER else phase}" + (f" of {where}" if where else "")


def _memory_in_use(run: Run) -> str:
    """Return a line with the memory of parameters, optimizer state and gradients; on a GPU, also with the allocator's
    numbers."""
    parameters = list(run.model.parameters())
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    held = {
        "parameters": sum(map(_num_bytes, parameters)),
        "optimizer": sum(map(_num_bytes, states)),
        "gradients": sum(_num_bytes(tensor.grad) for tensor in parameters),
    }
    text = ", ".join(f"{name} {format_memory(size)}" for name, size in held.items() if size)
    if run.ranks.device.type != "cuda":
        return f"memory in use: {text}"
    stats = torch.cuda.memory_stats(run.ranks.device)
    active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    free, total = torch.cuda.mem_get_info(run.ranks.device)
    return (
        f"memory in use: {text}; peak of tensors {format_memory(active)}, reserved by the allocator "
        f"{format_memory(reserved)} of {format_memory(total)}, free on the device {format_memory(free)}"
    )


def _num_bytes(tensor: object) -> int:
    return local_tensor(tensor).nbytes if isinstance(tensor, torch.Tensor) else 0
