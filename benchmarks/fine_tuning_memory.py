"""Planned memory of fine-tuning: all parameters, the last blocks or adapters, of Llamas of three sizes on 1 and 8 GPUs.

    python benchmarks/fine_tuning_memory.py [--write docs/how_to/fit_into_memory.md] [--models 1B 8B 70B]

Every number is one that the command `plan` prints. Each row is recorded once, which takes seconds, and replayed for
each number of GPUs.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from publishing import markdown_table, publish

from titan_launch.cli import parse_arguments
from titan_launch.commands.plan import print_plan
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import format_key
from titan_launch.plan.hardware import GIB

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


def predict(model: str, ranks: int, sections: dict[str, Any]) -> tuple[int, int]:
    """Return the active bytes and the host bytes that `plan` prints for the rank with the highest peak."""
    job: dict[str, dict[str, Any]] = {
        "model": {"name": "llama3", "flavor": model},
        "training": {"seq_len": SEQ_LEN, "local_batch_size": 1, "global_batch_size": SAMPLES},
        "loss": {"chunks": 8},
        "activation_checkpoint": {"mode": "full"},
        "planner": {"device": "h100-80gb"},
    }
    for name, values in sections.items():
        job[name] = {**job.get(name, {}), **values}
    printed, options = io.StringIO(), parse_arguments(["plan", "--config", "job.toml", "--rows", "own", "--json"])
    with redirect_stdout(printed), redirect_stderr(io.StringIO()):
        print_plan(JobConfig.model_validate(job), ranks, format_key, options)
    (row,) = json.loads(printed.getvalue())["rows"]
    return row["active_bytes"], row["host_bytes"]


def table(models: Sequence[str], trained: Sequence[str]) -> str:
    """Return a Markdown table with a row for each way to fine-tune and each model. `trained`: the names of the ways."""
    columns = [f"{ranks} GPU{'s' * (ranks > 1)}{what}" for ranks in RANKS for what in ("", ", host")]
    lines = [["model", "trained", *columns]]
    for model in models:
        for name in trained:
            sections = ways(model)[name]
            sizes = [size for ranks in RANKS for size in predict(model, ranks, sections)]
            lines.append([model, name, *(f"{size / GIB:.1f}" if size else "" for size in sizes)])
            print(" | ".join(lines[-1]), file=sys.stderr, flush=True)
    return markdown_table(lines, texts=2)


def main(arguments: list[str]) -> int:
    """Predict all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    names = list(ways("1B"))
    parser.add_argument("--trained", nargs="+", choices=names, default=names, help="rows (default: all)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table between its markers in this file")
    options = parser.parse_args(arguments)
    publish(table(options.models, options.trained), "fine-tuning memory", options.write)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
