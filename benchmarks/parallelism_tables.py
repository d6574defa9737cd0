"""Planned memory, traffic and step time of the large Llamas on H100, by layout and number of GPUs.

    python benchmarks/parallelism_tables.py [--write docs/verification/planner.md] [--models 8B 70B 405B]
        [--ranks 8 64 512] [--layouts FSDP ...]

Every row is a prediction of `plan`. Each layout is planned with two accumulation modes: the one with the least memory,
and the one with the least traffic. The table has the faster of those that fit. Each model is recorded once for each
degree of tensor and pipeline parallelism, which takes seconds; all other predictions replay these recordings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from publishing import markdown_table, publish

from titan_launch.config.job import JobConfig
from titan_launch.plan.hardware import GIB, hardware_of
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.memory.recordings import Recordings
from titan_launch.plan.report.modes import ComparedJob, PlanRow, compare
from titan_launch.trace.recorder import TorchRecorder

SAMPLES = 512
_CHECKPOINTING = {"8B": "selective", "70B": "full", "405B": "full"}
_STAGES = {"70B": 4, "405B": 8}
_ACCUMULATION = (
    {"mode": "immediate"},
    {"mode": "deferred", "keep_params_unsharded": True},
)
_COLUMNS = (
    *("model", "GPUs", "layout", "accumulation", "active GiB", "reserved GiB", "verdict"),
    *("GiB sent within a node", "GiB across nodes", "pipeline bubble s", "step s"),
)


@dataclass(frozen=True)
class Named:
    """A layout: its name, and the keys of `[parallelism]`."""

    name: str
    keys: dict[str, int]


def layouts(model: str, ranks: int) -> Iterator[Named]:
    """Yield the layouts to compare for a model and a number of ranks."""
    yield Named("FSDP", {})
    if ranks > 8:
        replicas = 2 if ranks == 64 else 8
        yield Named(f"HSDP, {replicas} replicas", {"data_parallel_replicate_degree": replicas})
    yield Named("TP 8" if ranks == 8 else f"FSDP {ranks // 8} x TP 8", {"tensor_parallel_degree": 8})
    stages = _STAGES.get(model, 0)
    if stages and ranks >= 8 * stages:
        keys = {"tensor_parallel_degree": 8, "pipeline_parallel_degree": stages}
        shard = ranks // (8 * stages)
        yield Named(f"{f'FSDP {shard} x ' if shard > 1 else ''}TP 8 x PP {stages}", keys)


def predict(model: str, ranks: int, layout: Named) -> PlanRow:
    """Return the row of the faster accumulation mode that fits, or of the mode with the least memory if none fits."""
    rows = [_predict(model, ranks, layout, accumulation) for accumulation in _ACCUMULATION]
    fitting = [row for row in rows if row.verdict == "fits"]
    return min(fitting, key=_shortest) if fitting else min(rows, key=lambda row: row.reserved_bytes)


def _predict(model: str, ranks: int, layout: Named, accumulation: dict[str, Any]) -> PlanRow:
    config = JobConfig.model_validate(
        {
            "model": {"name": "llama3", "flavor": model},
            "training": {"seq_len": 8192, "local_batch_size": 1, "global_batch_size": SAMPLES},
            "loss": {"chunks": 8},
            "parallelism": layout.keys,
            "gradient_accumulation": accumulation,
            "activation_checkpoint": {"mode": _CHECKPOINTING[model]},
            "optimizer": {"implementation": "fused"},
            "planner": {"device": "h100-80gb"},
        }
    )
    divided = plan_layout(config.parallelism, config.training, ranks)
    return _row(config, divided)


def _row(config: JobConfig, layout: Layout) -> PlanRow:
    hardware = hardware_of(config, ranks_on_machine=8)
    recordings = Recordings(config, layout, hardware.kernels, TorchRecorder)
    subject = ComparedJob.replayed(config, layout, hardware, recordings)
    return compare(config, layout, subject, hardware, only_own=True).rows[0]


def _shortest(row: PlanRow) -> tuple[float, float]:
    assert row.time.interval is not None
    return row.time.interval


def table(models: Sequence[str], ranks: Sequence[int], names: Sequence[str] | None = None) -> str:
    """Return a Markdown table of all layouts, or of those with these names.

    The fastest layout for each model and number of ranks is bold.
    """
    lines: list[Sequence[str]] = [_COLUMNS]
    for model in models:
        for number in ranks:
            rows = {
                layout.name: predict(model, number, layout)
                for layout in layouts(model, number)
                if names is None or layout.name in names
            }
            fitting = {name: row for name, row in rows.items() if row.verdict == "fits"}
            best = min(fitting, key=lambda name: _shortest(fitting[name]), default=None)
            lines += [_cells(model, number, name, row, name == best) for name, row in rows.items()]
    checkpointed = ", ".join(f"{mode} for {model}" for model, mode in _CHECKPOINTING.items() if model in models)
    tokens = SAMPLES * 8192 // 2**20
    notes = (
        f"{SAMPLES} sequences of 8,192 tokens per step ({tokens} Mi tokens), one per microbatch; fp32 parameters and "
        f"AdamW, bf16 compute, fp32 reduction; activation checkpointing: {checkpointed}; 8 loss chunks; pipelines by "
        "1F1B. Memory is that of the rank that needs most. Bold: the layout that fits with the lowest lower bound of "
        "the step time; of equal ones, that with the lowest upper bound."
    )
    return f"{markdown_table(lines)}\n\n{notes}"


def _cells(model: str, ranks: int, name: str, row: PlanRow, is_best: bool) -> list[str]:
    interval, bubble = row.time.interval, row.time.bubble
    assert interval is not None
    return [
        model,
        str(ranks),
        f"**{name}**" if is_best else name,
        row.choice.accumulation.label,
        f"{row.footprint.peak_bytes / GIB:.1f}",
        f"~{row.reserved_bytes / GIB:.1f}",
        str(row.verdict),
        f"~{row.link_traffic.within / GIB:.1f}",
        f"~{row.link_traffic.across / GIB:.1f}",
        f"~{bubble:.2g}" if bubble else "",
        f"~{_plain(interval[0])} .. {_plain(interval[1])}",
    ]


def _plain(seconds: float) -> str:
    """Return seconds with three significant digits, without an exponent."""
    return f"{float(f'{seconds:.3g}'):g}"


def main() -> int:
    """Predict all layouts, or the selected ones."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    parser.add_argument("--models", nargs="+", default=list(_CHECKPOINTING), choices=list(_CHECKPOINTING))
    parser.add_argument("--layouts", nargs="+", help="names of layouts, such as FSDP (default: all)")
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 512], choices=[8, 64, 512])
    options = parser.parse_args()
    publish(table(options.models, options.ranks, options.layouts), "parallelism_tables", options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main())
