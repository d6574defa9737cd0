"""Results of the cases as Markdown and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.cases import Case
from benchmarks.gpu.runs import Result
from benchmarks.publishing import commit
from titan_launch.config.architectures import resolve_args
from titan_launch.config.architectures.decoder import DecoderArgs, flops_per_token
from titan_launch.plan.hardware import find_device


def header(is_smoke: bool) -> str:
    """Return date, device, versions, commit and command."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    versions = f"torch {torch.__version__}, {installed('torchao')}; commit {commit()}"
    return f"{date.today().isoformat()}; {device}; {versions}; `benchmarks/gpu.sh{' --smoke' if is_smoke else ''}`."


def installed(package: str) -> str:
    """Return a package's name and version."""
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"


def row(case: Case, outcome: Result | str, bare: Result | None, planned: float | None) -> dict[str, Any]:
    """Return the numbers of a case, or its failure. `bare`: the result of the bare loop that does the same work."""
    names = {
        "model": case.shape.name,
        "sequence x batch": f"{case.shape.seq_len} x {case.shape.batch}",
        "how": case.label,
    }
    if isinstance(outcome, str):
        return {**names, "failure": outcome}
    tokens_per_second = case.tokens_per_step / outcome.step_s
    return {
        **names,
        "step_s": outcome.step_s,
        "tokens_per_second": tokens_per_second,
        "mfu_percent": mfu_percent(case, tokens_per_second),
        "over_bare": outcome.step_s / bare.step_s if bare else None,
        "peak_gib": outcome.peak_gib,
        "planned_gib": planned,
        "published": case.published and str(case.published),
    }


_COLUMNS = {
    "model": ("model", ""),
    "sequence x batch": ("sequence x batch", ""),
    "how": ("how", ""),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "MFU": ("mfu_percent", ".1f"),
    "step over the bare loop's": ("over_bare", ".3f"),
    "peak GiB": ("peak_gib", ".2f"),
    "planned GiB": ("planned_gib", ".2f"),
    "published": ("published", ""),
}
"""Title of each column, its key, and the format of its numbers."""


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table. An unknown number is an empty cell. A failure is in the tokens/s column."""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield "|---" * len(_COLUMNS) + "|"
    for values in rows:
        if "failure" in values:
            values = {**values, "tokens_per_second": f"failed: {values['failure']}".replace("|", "\\|")}
        cells = [_cell(values.get(key), style) for key, style in _COLUMNS.values()]
        yield f"| {' | '.join(cells)} |"


def _cell(value: str | float | None, style: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, style)


def mfu_percent(case: Case, tokens_per_second: float) -> float | None:
    """Return the model FLOPs per second in percent of the device's bfloat16 peak; None if the peak is not known."""
    known = find_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    args = resolve_args("llama3", case.shape.flavor, dict(case.shape.args))
    assert isinstance(args, DecoderArgs)
    if known is None:
        return None
    return 100 * flops_per_token(args, case.shape.seq_len) * tokens_per_second / (known.peak_bf16_tflops * 1e12)
