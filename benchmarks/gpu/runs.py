"""One training: its command, and what it says of itself."""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gpu.cases import Case
from benchmarks.gpu.processes import run_process

STEPS, WARM_UP = 16, 8
"""The launcher reports after its first step and after every 8th, so that the steps that count are one window of its
meter, between two reports that wait for the device. The bare loop waits at the same two places."""


@dataclass(frozen=True)
class Result:
    """What one training took."""

    step_s: float
    peak_gib: float | None
    predicted_gib: float | None = None


def run(case: Case, device: str, limit: float) -> Result | str:
    """One training, in a process of its own, with `limit` seconds. Text: why it has no result."""
    with tempfile.TemporaryDirectory() as folder:
        command = bare_command(case, device) if case.is_bare else launcher_command(case, device, Path(folder))
        done = run_process(command, limit)
        if done is None:
            return f"was not done after {limit:.0f} s"
        if done.status:
            return f"failed: {(done.errors.strip().splitlines() or ['without a word'])[-1][:300]}"
        try:
            return read_bare(done.output) if case.is_bare else read_reports(Path(folder, "gpu", "metrics.jsonl"))
        except (OSError, ValueError, LookupError, TypeError) as error:
            return f"ended well, but what it wrote cannot be used: {type(error).__name__}: {error}"


def bare_command(case: Case, device: str) -> list[str]:
    """The loop by hand."""
    shape = case.shape
    job = {"flavor": shape.flavor, "args": dict(shape.args), "seq_len": shape.seq_len, "batch": shape.batch}
    job |= {"is_compiled": case.is_compiled, "steps": STEPS, "warm_up": WARM_UP, "device": device}
    return [sys.executable, "-m", "benchmarks.gpu.bare", json.dumps(job)]


def launcher_command(case: Case, device: str, folder: Path) -> list[str]:
    """The launcher as a user starts it."""
    shape = case.shape
    values = {
        "job.dump_folder": str(folder),
        "job.device": device,
        "model.flavor": shape.flavor,
        **{f"model.args.{name}": value for name, value in shape.args.items()},
        "training.steps": STEPS,
        "training.seq_len": shape.seq_len,
        "training.local_batch_size": shape.batch,
        "training.global_batch_size": shape.batch * case.microbatches,
        "metrics.log_freq": WARM_UP,
        "compile.enable": case.is_compiled,
        **case.options,
    }
    words = [f"--{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]
    return [sys.executable, "-m", "titan_launch", "--config", "benchmarks/gpu/base.toml", *words]


def read_bare(output: str) -> Result:
    """From the last line of the bare loop. Raises ValueError, LookupError or TypeError where it is none of its own."""
    values = json.loads(output.splitlines()[-1])
    return Result(float(values["step_s"]), values["peak_gib"])


def read_reports(path: Path) -> Result:
    """From the launcher's last report, which is of the steps that count.

    Raises OSError, ValueError, LookupError or TypeError where the reports are not what they should be.
    """
    reports = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [report["step"] for report in reports]
    if steps[-2:] != [WARM_UP, STEPS]:
        raise ValueError(f"its reports are of steps {steps}, and the last two should be of {WARM_UP} and {STEPS}")
    last = reports[-1]
    return Result(
        float(last["time/step_s"]), last.get("memory/max_active_gib"), last.get("memory/predicted_active_gib")
    )
