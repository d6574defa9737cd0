"""Run of one case: its command, its result, and the memory that the planner predicts for it."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.cases import Case, Shape
from benchmarks.gpu.processes import log_name, run_process
from titan_launch.config.loading.load import load_job
from titan_launch.core.phantom import unmarked
from titan_launch.plan.hardware import GIB, hardware_of
from titan_launch.plan.job import configured_choice, with_unsharded_parameters
from titan_launch.plan.layout import plan_layout
from titan_launch.trace.recorder import recorded_engine
from titan_launch.train.kernel_choice import BACKENDS

Device = Literal["cpu", "cuda"]

BASE = "benchmarks/gpu/base.toml"


@dataclass(frozen=True)
class Result:
    """Measurements of one training."""

    step_s: float
    peak_gib: float | None
    """Peak of the allocator's active memory in the measured steps; None on a CPU."""

    attention: str | None = None
    """Backend of attention; None on a CPU. The launcher refuses an old cuDNN, which the bare loop takes."""


def device_of(is_smoke: bool) -> Device:
    """Return the device that all processes train on."""
    return "cpu" if is_smoke else "cuda"


def run(case: Case, device: Device, limit: float, logs: Path) -> Result | str:
    """Train in a process of its own for at most `limit` seconds. Return the reason if there is no result."""
    with tempfile.TemporaryDirectory() as folder:
        command = bare_command(case, device) if case.is_bare else launcher_command(job_of(case, device, folder))
        ended = run_process(command, limit, logs / log_name(case.name))
        if ended.failure:
            return ended.failure
        try:
            if case.is_bare:
                return read_bare(ended.output)
            return read_reports(case, Path(folder, "gpu", "metrics.jsonl"), ended.output)
        except (OSError, ValueError, LookupError, TypeError) as error:
            return f"exit status 0, but unusable results: {type(error).__name__}: {error}"


def bare_command(case: Case, device: Device) -> list[str]:
    """Return the command of the bare loop."""
    shape = case.shape
    job = {"flavor": shape.flavor, "args": dict(shape.args), "seq_len": shape.seq_len, "batch": shape.batch}
    job |= {"is_compiled": case.is_compiled, "steps": 2 * shape.steps, "warm_up": shape.steps, "device": device}
    return [sys.executable, "-m", "benchmarks.gpu.bare", json.dumps(job)]


def job_of(case: Case, device: Device, folder: str) -> dict[str, Any]:
    """Return the keys of a case's job file.

    The launcher reports after its first step and after every `metrics.log_freq` steps. The measured steps are
    therefore the last window of its meter. The window lies between two reports, which wait for the device.
    """
    shape = case.shape
    return {
        **shape_of_job(shape, device, folder),
        "training.steps": 2 * shape.steps,
        "training.global_batch_size": shape.batch * case.microbatches,
        "metrics.log_freq": shape.steps,
        "compile.enable": case.is_compiled,
        "checkpoint.save_last": False,
        **case.options,
    }


def shape_of_job(shape: Shape, device: Device, folder: str) -> dict[str, Any]:
    """Return the keys of a job file that depend on the shape."""
    return {
        "job.dump_folder": folder,
        "job.device": device,
        "model.flavor": shape.flavor,
        **{f"model.args.{name}": value for name, value in shape.args.items()},
        "training.seq_len": shape.seq_len,
        "training.local_batch_size": shape.batch,
    }


def overrides(job: Mapping[str, Any]) -> list[str]:
    """Return the keys of a job file as options of the command line."""
    return [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in job.items()]


def launcher_command(job: Mapping[str, Any]) -> list[str]:
    """Return the command that trains a job with the launcher."""
    return [sys.executable, "-m", "titan_launch", "--config", BASE, *overrides(job)]


def planned_gib(case: Case, device: Device) -> float:
    """Return the planner's prediction of peak active memory on this device. It is that of an eager step without
    float8."""
    config = load_job(BASE, overrides(job_of(case, device, "outputs"))).config
    layout = plan_layout(config.parallelism, config.training, world_size=1)
    config = with_unsharded_parameters(config, layout)
    name = torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else None
    workspace = hardware_of(config, 1, device, name).workspace_bytes
    footprint = recorded_engine(config, layout, device)(configured_choice(config))
    return footprint.with_workspace(workspace).peak_bytes / GIB


def read_bare(output: str) -> Result:
    """Parse the bare loop's line of JSON. Raise ValueError, LookupError or TypeError if there is none."""
    line = [line for line in output.splitlines() if line.startswith("{")][-1]
    values = json.loads(line)
    return Result(float(values["step_s"]), values["peak_gib"], values["attention"])


def read_reports(case: Case, path: Path, output: str) -> Result:
    """Parse the launcher's last report, which covers the measured steps, and the line of its output that names the
    backend of attention.

    Raise OSError, ValueError, LookupError or TypeError if the reports are not those of the case.
    """
    reports = [unmarked(json.loads(line)) for line in path.read_text().splitlines()]
    steps, expected = [report["step"] for report in reports], [case.shape.steps, 2 * case.shape.steps]
    if steps[-2:] != expected:
        raise ValueError(f"the reports are of steps {steps}; the last two must be of steps {expected}")
    attention = re.search(rf"attention \(\w+\): ({'|'.join(BACKENDS)})\b", output)
    peak = reports[-1].get("memory/max_active_gib")
    return Result(float(reports[-1]["time/step_s"]), peak, attention and attention[1])
