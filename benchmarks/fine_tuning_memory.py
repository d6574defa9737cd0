"""Planned memory of fine-tuning: all parameters, the last blocks or adapters, of Llamas of three sizes on 1 and 8 GPUs.

    python benchmarks/fine_tuning_memory.py [--write docs/how_to/fit_into_memory.md] [--models 1B 8B 70B]

Every number is a prediction of `plan` for CUDA's kernels. The analytic engine predicts jobs without adapters, in
milliseconds. Jobs with adapters are traced, which takes seconds each.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from publishing import publish

from titan_launch.config.job import JobConfig
from titan_launch.models.build import build_model
from titan_launch.plan.hardware import GIB, hardware_of
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.analytic.engine import analytic_engine, unknown_part
from titan_launch.plan.memory.ledger import Footprint
from titan_launch.trace.engine import trace_engine
from titan_launch.train.auto_mode import inspect_model

SEQ_LEN, SAMPLES = 4096, 16
RANKS = (1, 8)
BLOCKS = {"1B": 16, "8B": 32, "70B": 80}
BF16_BASE: dict[str, Any] = {"precision": {"frozen_storage_dtype": "bfloat16"}}
ADAPTERS: dict[str, Any] = {**BF16_BASE, "lora": {"targets": ["layers.*.attention.w*", "layers.*.feed_forward.w*"]}}


def ways(model: str) -> dict[str, dict[str, Any]]:
    """Return the ways to fine-tune: sections of the job by name."""
    last = BLOCKS[model] - BLOCKS[model] // 4
    blocks = [f"layers.{index}.**" for index in range(last, BLOCKS[model])]
    return {
        "all parameters": {},
        "all parameters, 8-bit optimizer state": {"optimizer": {"state_dtype": "int8"}},
        "last quarter of the blocks": {**BF16_BASE, "training": {"trainable": [*blocks, "norm.*"]}},
        "LoRA, rank 16": ADAPTERS,
        "LoRA, rank 16, activation offloading": {**ADAPTERS, "activation_checkpoint": {"offload": True}},
    }


def predict(model: str, ranks: int, sections: dict[str, Any]) -> Footprint:
    """Return the footprint of the rank with the highest peak."""
    job: dict[str, dict[str, Any]] = {
        "model": {"name": "llama3", "flavor": model},
        "training": {"seq_len": SEQ_LEN, "local_batch_size": 1, "global_batch_size": SAMPLES},
        "loss": {"chunks": 8},
        "activation_checkpoint": {"mode": "full"},
        "planner": {"device": "h100-80gb"},
    }
    for name, values in sections.items():
        job[name] = {**job.get(name, {}), **values}
    config = JobConfig.model_validate(job)
    layout = plan_layout(config.parallelism, config.training, ranks)
    kernels = hardware_of(config, ranks_on_machine=8).kernels
    inspect_model(config, build_model(config.model, SEQ_LEN))  # raises ConfigError for globs that match nothing
    engine = trace_engine if unknown_part(config, kernels) else analytic_engine
    return engine(config, layout, kernels)(configured_choice(config))


def table(models: Sequence[str]) -> str:
    """Return a Markdown table with a row for each way to fine-tune and each model."""
    columns = [f"{ranks} GPU{'s' * (ranks > 1)}{what}" for ranks in RANKS for what in ("", ", host")]
    lines = [["model", "trained", *columns], ["---", "---", *["---:"] * len(columns)]]
    for model in models:
        for name, sections in ways(model).items():
            footprints = [predict(model, ranks, sections) for ranks in RANKS]
            sizes = [size for footprint in footprints for size in (footprint.peak_bytes, footprint.host_bytes)]
            lines.append([model, name, *(f"{size / GIB:.1f}" if size else "" for size in sizes)])
            print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str]) -> int:
    """Predict all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table between its markers in this file")
    options = parser.parse_args(arguments)
    publish(table(options.models), "fine-tuning memory", options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
