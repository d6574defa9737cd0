"""LoRA under FSDP2, by the units of the adapters: planned collectives, those counted in a trace, and times.

    python benchmarks/adapter_units.py [--write docs/verification/benchmarks.md] [--layers 32]
    torchrun --nproc-per-node 2 benchmarks/adapter_units.py [--write docs/verification/benchmarks.md] [--layers 32]

Without torchrun, the model is a narrow Llama on 8 ranks, with adapters on all 7 linear layers of each block.
Collectives depend on the number of blocks, not on their width. With torchrun, steps of such models, a narrow and a wide
one, are measured in turns, in another order each round. CPU time is what other processes disturb least.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from titan_launch.config.job import JobConfig
from titan_launch.core.torch_release import MIXES_DTYPES_IN_UNIT
from titan_launch.distributed.mesh import build_mesh
from titan_launch.models.init import initialize
from titan_launch.plan.communication import Collectives, collectives_of_step
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import plan_layout
from titan_launch.trace.trace_engine import TraceEngine
from titan_launch.train.model import build_job_model, plan_precision, shard_model

RANKS = 8
_VOCABULARY = 64
_WIDTHS = (64, 256)
_TIMES = ("CPU time, median (ms)", "elapsed time, median (ms)", "elapsed time, minimum (ms)")
_ROWS: tuple[tuple[str, dict[str, Any]], ...] = (
    *((("in place", {"placement": "in_place"}),) if MIXES_DTYPES_IN_UNIT else ()),
    ("one unit for the model", {"placement": "own_unit"}),
    ("one unit per block", {"rules": [{"type": "LoRA", "param_dtype": "bfloat16", "unit_per": "block"}]}),
    ("one unit per adapter", {"rules": [{"type": "LoRA", "param_dtype": "bfloat16", "unit_per": "module"}]}),
)


def job(layers: int, precision: dict[str, Any], width: int = _WIDTHS[0], seq_len: int = 16) -> JobConfig:
    """Return a job with adapters. `precision`: keys of its section."""
    args = {"dim": width, "n_layers": layers, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": width * 3 // 2}
    return JobConfig.model_validate(
        {
            "job": {"device": "cpu"},
            "model": {"args": {**args, "vocab_size": _VOCABULARY}},
            "data": {"kind": "synthetic", "vocab_size": _VOCABULARY},
            "training": {"seq_len": seq_len, "local_batch_size": 1},
            "lora": {"targets": ["layers.*.attention.w*", "layers.*.feed_forward.w*"], "rank": 8},
            "precision": {"frozen_storage_dtype": "bfloat16", **precision},
        }
    )


def counts(layers: int) -> Iterator[tuple[str, Collectives, Collectives]]:
    """Yield a name, the planned collectives of all units, and the counted ones."""
    for name, precision in _ROWS:
        config = job(layers, precision)
        layout = plan_layout(config.parallelism, config.training, RANKS)
        units = plan_precision(config, build_job_model(config)).units
        traced = TraceEngine(config, layout, "cpu").traffic(configured_choice(config)).collectives
        yield name, collectives_of_step(units, layout, config.gradient_accumulation), traced


def table(layers: int) -> tuple[str, list[list[str]]]:
    """Return a title, and the counts as the rows of a table."""
    title = f"A Llama with {layers} blocks and {7 * layers} adapters on {RANKS} ranks, one microbatch:"
    return title, [["adapters", "planned", "counted"], *([*map(str, row)] for row in counts(layers))]


def sharded(config: JobConfig) -> nn.Module:
    """Return a job's model on this rank, with the initial values of seed 0."""
    built = build_job_model(config)
    layout = plan_layout(config.parallelism, config.training, dist.get_world_size())
    model = shard_model(config, built, plan_precision(config, built), build_mesh(layout, "cpu")).to_empty(device="cpu")
    initialize(model, built.initializer, 0, torch.device("cpu"))
    return model


def step(model: nn.Module, tokens: Tensor) -> None:
    """Run forward and backward."""
    F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten()).backward()
    model.zero_grad()


def times(layers: int, width: int, seq_len: int, rounds: int) -> Iterator[list[str]]:
    """Yield a row of the table of times for each way."""
    models = {name: sharded(job(layers, precision, width, seq_len)) for name, precision in _ROWS[:-1]}
    tokens = torch.randint(_VOCABULARY, (1, seq_len + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    for model in models.values():
        step(model, tokens)
    wall: dict[str, list[float]] = {name: [] for name in models}
    cpu: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for turn in range(rounds):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            dist.barrier()
            began, began_cpu = time.perf_counter(), time.process_time()
            step(models[name], tokens)
            wall[name].append(1000 * (time.perf_counter() - began))
            cpu[name].append(1000 * (time.process_time() - began_cpu))
    for name in names:
        figures = (median(cpu[name]), median(wall[name]), min(wall[name]))
        yield [str(width), name, *(f"{figure:.1f}" for figure in figures)]


def measure(layers: int, rounds: int) -> tuple[str, list[list[str]]]:
    """Return a title, and the times as the rows of a table."""
    torch.set_num_threads(1)
    ranks = dist.get_world_size()
    title = f"{layers} blocks on {ranks} ranks (gloo), forward and backward of one microbatch, {rounds} rounds:"
    rows = [["width", "adapters", *_TIMES]]
    for width in _WIDTHS:
        rows += times(layers, width, seq_len=128, rounds=rounds)
    return title, rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers of this benchmark")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    from publishing import markdown_table, publish  # a test imports this file as part of a package

    if "RANK" not in os.environ:
        title, rows = table(arguments.layers)
        publish(f"{title}\n\n{markdown_table(rows)}", "adapter-units", arguments.write)
    else:
        dist.init_process_group("gloo")
        title, rows = measure(arguments.layers, arguments.rounds)
        if dist.get_rank() == 0:
            publish(f"{title}\n\n{markdown_table(rows)}", "adapter-times", arguments.write)
        dist.barrier()
        os._exit(0)  # gloo's threads can abort an interpreter that shuts down
