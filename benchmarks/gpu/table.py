"""The results as Markdown."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version

import torch

from benchmarks.gpu.cases import Case
from benchmarks.gpu.processes import REPO
from benchmarks.gpu.runs import STEPS, WARM_UP, Result
from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.llama3 import Llama3Args, flops_per_token
from titan_launch.plan.devices import find_device


def header(is_smoke: bool) -> str:
    """When, on what, with which versions, by which command."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    try:
        torchao = f", torchao {version('torchao')}"
    except PackageNotFoundError:
        torchao = ", without torchao"
    versions = f"torch {torch.__version__}{torchao}; commit {commit()}"
    command = f"`benchmarks/gpu.sh{' --smoke' if is_smoke else ''}`"
    steps = f"bfloat16, {STEPS - WARM_UP} steps after {WARM_UP} of warm-up"
    return f"{date.today().isoformat()}; {device}; {versions}; {command}. {steps}."


def commit() -> str:
    """Of the sources; "unknown" without git, or outside of a repository."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


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
