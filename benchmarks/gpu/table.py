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
from titan_launch.config.job import JobConfig
from titan_launch.plan.hardware import find_device
from titan_launch.train.flops import flops_of_job


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


def row(
    case: Case, outcome: Result | str, bare: Result | None, planned: float | None, has_values: bool = True
) -> dict[str, Any]:
    """Return the numbers of a case, or its failure. `bare`: the result of the bare loop that does the same work.
    Without values, the row has no times."""
    names = {
        "model": case.shape.name,
        "sequence x batch": f"{case.shape.seq_len} x {case.shape.batch}",
        "how": case.label,
    }
    if isinstance(outcome, str):
        return {**names, "failure": outcome}
    return {
        **names,
        **(_times(case, outcome, bare) if has_values else {}),
        "attention": outcome.attention,
        "peak_gib": outcome.peak_gib,
        "planned_gib": planned,
        "published": case.published and str(case.published),
    }


def _times(case: Case, result: Result, bare: Result | None) -> dict[str, Any]:
    tokens_per_second = case.tokens_per_step / result.step_s
    return {
        "step_s": result.step_s,
        "tokens_per_second": tokens_per_second,
        "mfu_percent": mfu_percent(case, tokens_per_second),
        "over_bare": result.step_s / bare.step_s if bare else None,
        "over_bare_attention": bare.attention if bare and bare.attention != result.attention else None,
    }


_COLUMNS = {
    "model": ("model", ""),
    "sequence x batch": ("sequence x batch", ""),
    "how": ("how", ""),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "MFU": ("mfu_percent", ".1f"),
    "step over the bare loop's": ("over_bare", ".3f"),
    "attention": ("attention", ""),
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
        if values.get("over_bare_attention"):  # the ratio compares two kernels
            kernels = f"{values['attention']} over {values['over_bare_attention']}"
            values = {**values, "over_bare": f"{values['over_bare']:.3f} ({kernels})"}
        cells = [_cell(values.get(key), style) for key, style in _COLUMNS.values()]
        yield f"| {' | '.join(cells)} |"


def _cell(value: str | float | None, style: str) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else format(value, style)


def mfu_percent(case: Case, tokens_per_second: float) -> float | None:
    """Return the model FLOPs per second in percent of the device's bfloat16 peak; None if the peak is not known."""
    known = find_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if known is None:
        return None
    model, training = {"flavor": case.shape.flavor, "args": case.shape.args}, {"seq_len": case.shape.seq_len}
    per_sample = flops_of_job(JobConfig.model_validate({"model": model, "training": training})).per_sample
    return 100 * per_sample / case.shape.seq_len * tokens_per_second / (known.peak_bf16_tflops * 1e12)
