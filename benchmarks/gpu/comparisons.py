"""Comparisons of runs by their reports, for the last column of a table."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_launch.core.phantom import unmarked


class CheckError(Exception):
    """A step ran to its end, but its result is not the expected one."""


@dataclass(frozen=True)
class Tolerance:
    """The largest relative differences of two runs that count as equal."""

    loss: float
    gradient_norm: float


EXACT = Tolerance(0, 0)
ROUNDING = Tolerance(0.002, 0.02)
"""Runs that compute the same in another order: bf16 rounds with a relative error of up to 0.4 %."""
FP32_ROUNDING = Tolerance(0.0002, 0.002)
"""The same in fp32. Most of it is for models with experts, where rounding can send a token to another expert."""

_TAGS = {"losses": ("train/loss", "loss"), "gradient norms": ("train/grad_norm", "gradient_norm")}


def reports(run_folder: Path) -> list[dict[str, Any]]:
    """Return the reports of a run. Raise CheckError if there are none."""
    try:
        found = [unmarked(json.loads(line)) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise CheckError(f"no reports: {error}") from None
    if not found:
        raise CheckError(f"no reports in {run_folder}")
    return found


def agreement(one: Path, other: Path, tolerance: Tolerance) -> str:
    """Return the largest differences between the reports of two runs. Raise CheckError if one exceeds the tolerance."""
    first, second = reports(one), reports(other)
    steps = [[report["step"] for report in found] for found in (first, second)]
    if steps[0] != steps[1]:
        raise CheckError(f"the reports are of steps {steps[0]} and of steps {steps[1]}")
    texts: list[str] = []
    is_equal = True
    for name, (tag, limit) in _TAGS.items():
        differences = [_relative_difference(a.get(tag), b.get(tag)) for a, b in zip(first, second, strict=True)]
        largest = max(differences, key=lambda number: math.inf if math.isnan(number) else number)
        texts.append(f"{name} differ by up to {largest:.2g}")
        is_equal = is_equal and largest <= getattr(tolerance, limit)
    text = f"relative: {', '.join(texts)}; steps {steps[0][0]} to {steps[0][-1]}"
    if not is_equal:
        raise CheckError(f"{text}; allowed: {tolerance.loss:g} and {tolerance.gradient_norm:g}")
    return text


def _relative_difference(one: float | None, other: float | None) -> float:
    """Return infinity if one of the numbers is unknown, and NaN if one is."""
    if one is None or other is None:
        return math.inf
    return abs(one - other) / max(abs(one), abs(other), 1e-30)


def measured_memory(run_folder: Path) -> str:
    """Return the predicted peak of active memory beside the measured one."""
    found = reports(run_folder)
    predicted, measured = (
        max((report.get(tag) or 0.0 for report in found), default=0.0)
        for tag in ("memory/predicted_active_gib", "memory/max_active_gib")
    )
    if not measured:
        return "no measured memory"
    if not predicted:
        return f"active memory: not predicted, measured {measured:.2f} GiB"
    ratio = predicted / measured
    return f"active memory: predicted {predicted:.2f} GiB, measured {measured:.2f} GiB; ratio {ratio:.3f}"


def tokens_per_second(run_folder: Path) -> str:
    """Return the speed of the last report."""
    report: dict[str, Any] = reports(run_folder)[-1]
    return f"{report.get('throughput/tokens_per_second', math.nan):,.0f} tokens/s"


def recompilations(outputs: Sequence[str]) -> int:
    """Return the number of recompilations that `TORCH_LOGS=recompiles` has logged."""
    return sum(output.count("Recompiling function") for output in outputs)
