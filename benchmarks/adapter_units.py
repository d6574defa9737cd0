"""Collectives of LoRA under FSDP2 in one microbatch, by the units of the adapters: planned, and counted in a trace.

    python -m benchmarks.adapter_units [--write docs/how_to/lora.md] [--layers 32]

The model is a narrow Llama on 8 ranks, with adapters on all 7 linear layers of each block. Collectives depend on the
number of blocks, not on their width.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_launch.config.job import JobConfig
from titan_launch.plan.communication import Collectives, collectives_of_step
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.types import Unit
from titan_launch.trace.engine import trace_engine
from titan_launch.train.auto_mode import plan_precision
from titan_launch.train.model import build_job_model

RANKS = 8
_ROWS: tuple[tuple[str, dict[str, Any] | None], ...] = (
    ("one unit for the model (default)", None),
    ("one unit per block", {"unit_per": "block"}),
    ("one unit per adapter", {"unit_per": "module"}),
)


def job(layers: int, rule: dict[str, Any] | None) -> JobConfig:
    """Return a job with adapters. `rule`: keys of a precision rule for them."""
    args = {"dim": 64, "n_layers": layers, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 96, "vocab_size": 64}
    return JobConfig.model_validate(
        {
            "job": {"device": "cpu"},
            "model": {"args": args},
            "data": {"kind": "synthetic", "vocab_size": 64},
            "training": {"seq_len": 16, "local_batch_size": 1, "global_batch_size": RANKS},
            "lora": {"targets": ["layers.*.attention.w*", "layers.*.feed_forward.w*"], "rank": 8},
            "precision": {"rules": [] if rule is None else [{"type": "LoRA", **rule}]},
        }
    )


def counts(layers: int) -> Iterator[tuple[str, Collectives, Collectives, Collectives]]:
    """Yield a name, the planned collectives of all units, those of the frozen units, and the counted ones of all."""
    for name, rule in _ROWS:
        config = job(layers, rule)
        layout = plan_layout(config.parallelism, config.training, RANKS)
        units = plan_precision(config, build_job_model(config)).units
        traced = trace_engine(config, layout, "cpu").traffic(configured_choice(config)).collectives

        def planned(of: list[Unit], config: JobConfig = config, layout: Any = layout) -> Collectives:
            return collectives_of_step(of, layout, config.gradient_accumulation)

        yield name, planned(list(units)), planned([unit for unit in units if not unit.is_trained]), traced


def table(layers: int) -> str:
    """Return the counts as a table."""
    lines = [
        f"A Llama with {layers} blocks and {7 * layers} adapters on {RANKS} ranks, one microbatch:",
        "",
        "| units of the adapters | planned | counted | of the adapters: all-gathers | reduce-scatters |",
        "|---|---|---|---|---|",
    ]
    for name, planned, frozen, traced in counts(layers):
        gathers, scatters = planned.all_gathers - frozen.all_gathers, planned.reduce_scatters - frozen.reduce_scatters
        lines.append(f"| {name} | {planned} | {traced} | {gathers} | {scatters} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers of this benchmark")
    parser.add_argument("--layers", type=int, default=32)
    arguments = parser.parse_args()
    from publishing import publish  # a test imports this file as part of a package

    publish(table(arguments.layers), "adapter-units", arguments.write)
