"""Run the cases one after the other, and write the table.

benchmarks/gpu.sh --write docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from benchmarks.gpu.cases import Case, all_cases, smoke_cases
from benchmarks.publishing import publish
from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.llama3 import Llama3Args, flops_per_token
from titan_launch.plan.devices import find_device

REPO = Path(__file__).parents[2]
STEPS, WARM_UP = 12, 4
_TESTS_SECONDS = 90
"""What is kept for the tests marked gpu."""


@dataclass(frozen=True)
class Result:
    """What one training took."""

    step_s: float
    peak_gib: float | None
    predicted_gib: float | None = None


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description="The launcher on one GPU, against a bare loop and its own plan.")
    parser.add_argument("--write", type=Path, help="Markdown file to put the table into, between its markers")
    parser.add_argument("--budget", type=float, default=570, help="seconds after which nothing new is begun")
    parser.add_argument("--smoke", action="store_true", help="a tiny shape on the CPU: that everything runs")
    options = parser.parse_args()
    if not options.smoke and not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.sh measures on one CUDA device, and there is none here; --smoke goes without")
    began = time.monotonic()

    def left() -> float:
        return float(options.budget) - (time.monotonic() - began)

    cases, device = (smoke_cases(), "cpu") if options.smoke else (all_cases(), "cuda")
    rows, missing = measure(list(cases), device, left)
    tests = "" if options.smoke else run_tests(left())
    publish("\n".join([header(options.smoke), "", *table(rows), *missing, tests]).rstrip(), "gpu", options.write)


def measure(
    cases: Sequence[Case], device: str, left: Callable[[], float]
) -> tuple[list[tuple[Case, Result]], list[str]]:
    """The cases that there was time for, and a sentence about each that has no row."""
    rows, missing = [], []
    for index, case in enumerate(cases):
        if left() < _TESTS_SECONDS:
            missing.append(f"\nNo time was left for {len(cases) - index} more.")
            break
        result = run(case, device, max(left(), _TESTS_SECONDS))
        name = f"{case.shape.name}, {case.shape.seq_len}: {case.label}"
        print(f"{name}: {result}", file=sys.stderr, flush=True)
        if isinstance(result, Result):
            rows.append((case, result))
        else:
            missing.append(f"\n{name}: {result}")
    return rows, missing


def run(case: Case, device: str, limit: float) -> Result | str:
    """One training, in a process of its own. Text: what it said last where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = bare_command(case, device) if case.is_bare else launcher_command(case, device, Path(folder))
        try:
            done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=limit)
        except subprocess.TimeoutExpired:
            return f"was not done after {limit:.0f} s"
        if done.returncode:
            return f"failed: {(done.stderr.strip().splitlines() or ['without a word'])[-1][:300]}"
        if case.is_bare:
            return Result(**json.loads(done.stdout.splitlines()[-1]))
        return read_reports(Path(folder, "gpu", "metrics.jsonl"))


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


def read_reports(path: Path) -> Result:
    """From the launcher's own reports: the first, over the warm-up, does not count."""
    _, *reports = [json.loads(line) for line in path.read_text().splitlines()]
    seconds = sum(report["time/step_s"] for report in reports) / len(reports)
    peak = max((r["memory/max_active_gib"] for r in reports if "memory/max_active_gib" in r), default=None)
    return Result(seconds, peak, reports[-1].get("memory/predicted_active_gib"))


def header(is_smoke: bool) -> str:
    """When, on what, with which versions, by which command."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    try:
        torchao = f", torchao {version('torchao')}"
    except PackageNotFoundError:
        torchao = ", without torchao"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=REPO, capture_output=True, text=True
    ).stdout.strip()
    versions = f"torch {torch.__version__}{torchao}; commit {commit or 'unknown'}"
    command = f"`benchmarks/gpu.sh{' --smoke' if is_smoke else ''}`"
    steps = f"bfloat16, {STEPS - WARM_UP} steps after {WARM_UP} of warm-up"
    return f"{date.today().isoformat()}; {device}; {versions}; {command}. {steps}."


def table(rows: Sequence[tuple[Case, Result]]) -> Iterator[str]:
    """Markdown, one line per case."""
    yield "| model | sequence x batch | how | tokens/s | MFU | over the bare loop | peak GiB | planned GiB |"
    yield "|---|---|---|---|---|---|---|---|"
    bare = {
        (case.shape.name, case.shape.seq_len, case.is_compiled): result.step_s for case, result in rows if case.is_bare
    }
    for case, result in rows:
        reference = bare.get((case.shape.name, case.shape.seq_len, case.is_compiled))
        is_like = reference and not case.is_bare and not case.options and case.microbatches == 1
        tokens = case.shape.seq_len * case.shape.batch * case.microbatches / result.step_s
        cells = [
            case.shape.name,
            f"{case.shape.seq_len} x {case.shape.batch}",
            case.label,
            f"{tokens:,.0f}",
            mfu(case, tokens),
            f"{result.step_s / reference:.3f}" if is_like and reference else "",
            f"{result.peak_gib:.2f}" if result.peak_gib else "",
            f"{result.predicted_gib:.2f}" if result.predicted_gib else "",
        ]
        yield f"| {' | '.join(cells)} |"


def mfu(case: Case, tokens_per_second: float) -> str:
    """In percent of the device's peak for bfloat16; empty where that is not known."""
    known = find_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    args = resolve_args("llama3", case.shape.flavor, dict(case.shape.args))
    if known is None or not isinstance(args, Llama3Args):
        return ""
    flops = flops_per_token(args, case.shape.seq_len) * tokens_per_second
    return f"{100 * flops / (known.peak_bf16_tflops * 1e12):.1f} %"


def run_tests(limit: float) -> str:
    """The tests that need a GPU, as far as time allows; their last line."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-x"]
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=max(limit, 10))
    except subprocess.TimeoutExpired:
        return "\nTests marked gpu: not done in the time that was left; run `pytest -m gpu`."
    return f"\nTests marked gpu: {(done.stdout.strip().splitlines() or ['no output'])[-1]}"


if __name__ == "__main__":
    main()
