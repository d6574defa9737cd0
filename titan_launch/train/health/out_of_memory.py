"""The error of a run that is out of memory: the failed allocation, the memory in use, the plan, and the cheapest
changes."""

from __future__ import annotations

import re
import traceback
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

from titan_launch.core.errors import ConfigError, RunError, UserError
from titan_launch.distributed.dtensor import local_tensor
from titan_launch.metrics.timeline import OTHER
from titan_launch.models.blocks import has_forward
from titan_launch.plan.advice import Advice
from titan_launch.plan.hardware import GIB, format_memory
from titan_launch.train.trace_subprocess import TraceProcess

if TYPE_CHECKING:
    from titan_launch.train.run import Run

_CPU_ALLOCATION = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")


def explain_out_of_memory(error: BaseException, run: Run) -> RunError | None:
    """Return the RunError for an out-of-memory error, with the text of `report`; None for a different error. If the job
    records allocations, also write a snapshot of GPU memory."""
    if not isinstance(error, RuntimeError) or not is_out_of_memory(error):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        run.observers.profiler.write_snapshot_of_failure()
    return RunError(report(run, error))


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of PyTorch's allocator for a GPU or for the host."""
    return isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATION.search(str(error)) is not None


def report(run: Run, error: BaseException) -> str:
    """Return the report: the failed allocation with phase and module, the memory in use, the planned peak by category,
    and up to three changes as TOML. The planner runs in another process. If the planner fails, its error replaces the
    plan and the changes."""
    where = f"{_allocation(error)} {_where(run, error)}".rstrip()
    lines = [f"out of memory on rank {run.ranks.rank} in step {run.progress.step + 1}: {where}", _held(run)]
    try:
        with ExitStack() as stack:
            plan = TraceProcess(run.config, run.job.layout.world_size, run.job.hardware, stack, advises=True).result()
    except (ConfigError, UserError, RunError, OSError) as failure:
        reason = str(failure).splitlines()[-1]
        return "\n".join([*lines, f"the job could not be planned: {reason}"])
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


def _allocation(error: BaseException) -> str:
    if found := _CPU_ALLOCATION.search(str(error)):
        return f"an allocation of {format_memory(int(found[1]))} failed"
    if found := re.search(r"Tried to allocate ([\d.]+) ([KMG]iB)", str(error)):
        units = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}
        return f"an allocation of {format_memory(float(found[1]) * units[found[2]])} failed"
    return "an allocation failed"


def _where(run: Run, error: BaseException) -> str:
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


def _held(run: Run) -> str:
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
