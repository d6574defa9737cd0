"""The error of a run that is out of memory: what was allocated where, the plan, and the cheapest changes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError, RunError
from titan_launch.models.blocks import has_forward
from titan_launch.plan.advice import Advice, advise
from titan_launch.plan.hardware import GIB, format_memory
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import Layout
from titan_launch.plan.memory.analytic.engine import analytic_engine, unknown_part
from titan_launch.plan.memory.ledger import Category, Footprint
from titan_launch.plan.report.comparison import estimate_reserved

if TYPE_CHECKING:
    from titan_launch.train.run import Run

_CPU_ALLOCATION = re.compile(r"can't allocate memory: you tried to allocate (\d+) bytes")
_CUDA_ALLOCATION = re.compile(r"Tried to allocate ([\d.]+) ([KMG]iB)")
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": GIB}


@contextmanager
def out_of_memory_explained(run: Run) -> Iterator[None]:
    """Replace an error of an allocator in the block by a RunError with a report. The planner runs only then."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise RunError(report(run, error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for the error of PyTorch's allocator of a GPU or of the host."""
    return isinstance(error, torch.OutOfMemoryError) or _CPU_ALLOCATION.search(str(error)) is not None


def report(run: Run, error: BaseException) -> str:
    """Return the report: the failed allocation with phase and module, memory by category against the plan, and up to
    three changes as TOML."""
    lines = [f"out of memory on rank {run.ranks.rank} in step {run.progress.step + 1}: {_allocation(error)}"]
    lines[0] += f" {_where(run, error)}".rstrip()
    lines += _held(run)
    footprint = _footprint(run.config, run)
    if footprint is None:
        lines.append("the analytic planner does not cover this job: titan-launch plan --max-batch shows what fits")
        return "\n".join(lines)
    lines += _planned(footprint)
    lines += _advice(run, footprint)
    return "\n".join(lines)


def _allocation(error: BaseException) -> str:
    text = str(error)
    if found := _CPU_ALLOCATION.search(text):
        return f"an allocation of {format_memory(int(found[1]))} failed"
    if found := _CUDA_ALLOCATION.search(text):
        return f"an allocation of {format_memory(float(found[1]) * _UNITS[found[2]])} failed"
    return "an allocation failed"


def _where(run: Run, error: BaseException) -> str:
    """Return the phase and the innermost module in the traceback; in backward, the FSDP2 unit that was used last."""
    phase = run.meter.timeline.failed_part
    paths = {id(module): path for path, module in run.model.named_modules()}
    innermost, trace = "", error.__traceback__
    while trace is not None:
        module = trace.tb_frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and has_forward(module):
            innermost = paths.get(id(module), innermost)
        trace = trace.tb_next
    where = innermost or (run.meter.timeline.last_unit if phase in ("backward", "communication") else "")
    return f"in {phase or 'the step'}" + (f" of {where}" if where else "")


def _held(run: Run) -> list[str]:
    """Return the memory that is known to be held now."""
    parameters = list(run.model.parameters())
    states = [value for state in run.optimizer.state.values() for value in state.values()]
    held = {
        "parameters": sum(map(_num_bytes, parameters)),
        "optimizer": sum(map(_num_bytes, states)),
        "gradients": sum(_num_bytes(tensor.grad) for tensor in parameters),
    }
    text = ", ".join(f"{name} {format_memory(size)}" for name, size in held.items() if size)
    if run.ranks.device.type != "cuda":
        return [f"held for good: {text}"]
    stats = torch.cuda.memory_stats(run.ranks.device)
    active, reserved = stats["active_bytes.all.peak"], stats["reserved_bytes.all.peak"]
    free, total = torch.cuda.mem_get_info(run.ranks.device)
    return [
        f"held for good: {text}; peak of tensors {format_memory(active)}, reserved by the allocator "
        f"{format_memory(reserved)} of {format_memory(total)}, free on the device {format_memory(free)}"
    ]


def _num_bytes(tensor: object) -> int:
    from titan_launch.distributed.dtensor import local_tensor

    return local_tensor(tensor).nbytes if isinstance(tensor, torch.Tensor) else 0


def _footprint(config: JobConfig, run: Run, layout: Layout | None = None) -> Footprint | None:
    if unknown_part(config, run.hardware.kernels) is not None:
        return None
    engine = analytic_engine(config, layout or run.layout, run.hardware.kernels)
    return engine(configured_choice(config)).with_workspace(run.hardware.workspace_bytes)


def _planned(footprint: Footprint) -> list[str]:
    peak = max(footprint.peaks.values(), key=lambda peak: peak.total)
    largest = sorted(Category, key=lambda category: -peak.by_category[category])[:4]
    parts = ", ".join(f"{category.label} {format_memory(peak.by_category[category])}" for category in largest)
    return [f"planned peak: {format_memory(footprint.peak_bytes)} ({footprint.peak_point}): {parts}"]


def _advice(run: Run, footprint: Footprint) -> list[str]:
    """Return up to three changes with their predicted saving. If the plan thought that the job fits, the changed job
    must be planned to need a fifth less."""
    hardware, needed = run.hardware, estimate_reserved(footprint, run.hardware)
    limit = 0.8 * needed
    if hardware.memory_gib is not None:
        limit = min(limit, (hardware.memory_gib - hardware.margin_gib) * GIB)

    def predict(config: JobConfig, layout: Layout) -> float:
        changed = _footprint(config, run, layout)
        return float("inf") if changed is None else estimate_reserved(changed, hardware)

    try:
        advice = advise(run.config, run.layout, limit, predict)
    except ConfigError:
        advice = []
    if not advice:
        return ["no key of the job saves memory: use more ranks to shard over, or devices with more memory"]
    return ["the cheapest changes, with their planned saving:", *(line for item in advice for line in _lines(item))]


def _lines(advice: Advice) -> Iterator[str]:
    *before, last = advice.lines
    yield from (f"  {line}" for line in before)
    fits = "" if advice.fits else ", which is not enough"
    yield f"  {last}  # saves {format_memory(advice.saved_bytes)}{fits}; costs {advice.cost}"
