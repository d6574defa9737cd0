"""Comparison of predicted memory with the figures that TorchTitan has published for Llama 3 8B.

    python benchmarks/published_memory.py [--write docs/verification/planner.md]

Published figures are the allocator's reserved memory, which exceeds the predicted active memory. The jobs have the
settings that the reports name (`benchmarks/*.md` of TorchTitan). The exit status is 1 if a prediction is not below a
published figure, or not within 25 % of it.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from publishing import markdown_table, publish

from titan_launch.config.job import JobConfig
from titan_launch.plan.hardware import GIB, hardware_of
from titan_launch.plan.job import Choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.report.modes import estimate_reserved
from titan_launch.trace.recorder import recorded_engine


@dataclass(frozen=True)
class Report:
    """One published run."""

    name: str
    ranks: int
    training: dict[str, Any]
    checkpointing: str
    reserved_gib: float
    remark: str = ""
    loss_chunks: int = 1

    @property
    def is_compiled(self) -> bool:
        """True if the run was compiled."""
        return bool(self.remark)

    @property
    def is_float8(self) -> bool:
        """True if the run multiplied in fp8."""
        return "fp8" in self.name or "H200" in self.name


_EAGER, _LONG = {"seq_len": 8192, "local_batch_size": 2}, {"seq_len": 32_768, "local_batch_size": 1}
_AS_EAGER_CHUNKS = "predicted as eager bf16, 8 loss chunks"
REPORTS = (
    Report("8 x H100 (96 GB), 2 x 8,192 tokens", 8, _EAGER, "selective", 82.4),
    Report("128 x H100, the same", 128, _EAGER, "selective", 67.0),
    Report("8 x H100, the same, compiled", 8, _EAGER, "selective", 77.0, "predicted as eager"),
    Report("128 x H100, the same, compiled", 128, _EAGER, "selective", 62.0, "predicted as eager"),
    Report("8 x H100, the same, compiled, fp8", 8, _EAGER, "selective", 76.8, "predicted as eager bf16"),
    Report("128 x H100, the same, compiled, fp8", 128, _EAGER, "selective", 61.8, "predicted as eager bf16"),
    Report("8 x H100, 32,768 tokens, compiled, fp8", 8, _LONG, "full", 83.9, "predicted as eager bf16"),
    Report("32 x H200, compiled with its loss, fp8", 32, _EAGER, "selective", 47.96, _AS_EAGER_CHUNKS, 8),
    Report("64 x H200, the same", 64, _EAGER, "selective", 46.97, _AS_EAGER_CHUNKS, 8),
)


def job_of(report: Report, as_published: bool = False) -> JobConfig:
    """Return the job of a report, `as_published` compiled and in fp8 where the report says so, which a plan does not
    predict."""
    return JobConfig.model_validate(
        {
            "model": {"name": "llama3", "flavor": "8B"},
            "training": report.training,
            "loss": {"chunks": report.loss_chunks},
            "activation_checkpoint": {"mode": report.checkpointing},
            "optimizer": {"implementation": "fused"},
            "compile": {"enable": as_published and report.is_compiled},
            "float8": {"enable": as_published and report.is_float8},
        }
    )


def predict(report: Report) -> tuple[float, float]:
    """Return the predicted active memory and the estimated reserved memory of a report's job, in GiB."""
    config = job_of(report)
    layout = plan_layout(config.parallelism, config.training, report.ranks)
    choice = Choice(config.gradient_accumulation, config.activation_checkpoint)
    footprint = recorded_engine(config, layout, "cuda")(choice)
    reserved = estimate_reserved(footprint, hardware_of(config, ranks_on_machine=8, kernels="cuda"))
    return footprint.peak_bytes / GIB, reserved / GIB


def main() -> int:
    """Compare all reports."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    options = parser.parse_args()
    columns = [
        "run",
        "activation checkpointing",
        "predicted active",
        "estimated reserved",
        "published",
        "active / published",
        "",
    ]
    rows, is_right = [columns], True
    for report in REPORTS:
        active, reserved = predict(report)
        ratio = active / report.reserved_gib
        is_right &= 0.75 <= ratio < 1
        figures = [f"{active:.1f}", f"{reserved:.1f}", f"{report.reserved_gib:.1f}", f"{ratio:.2f}"]
        rows.append([report.name, report.checkpointing, *figures, report.remark])
    publish(markdown_table(rows), "published_memory", options.write)
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
