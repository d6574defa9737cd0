"""Comparison of the analytic engine with traces of random jobs: peak memory, collectives and their bytes.

    python benchmarks/planner_grid.py --num-jobs 120 --seed 0 [--workers 2] [--write docs/verification/planner.md]

A job is a small decoder of a random family, with random widths, depth, norm, batch, ranks, precision rules, gradient
accumulation, activation checkpointing, optimizer, loss chunks, experts and expert parallelism. Both engines predict the
active memory of a rank. The planned traffic is compared with the collectives in the trace. The script prints a table,
and writes it between the markers of a Markdown file.
"""

from __future__ import annotations

import argparse
import logging
import platform
import random
import statistics
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from publishing import publish

from titan_launch.config.architectures.families import FAMILIES
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.models.build import build_model
from titan_launch.plan.communication import traffic_of_step
from titan_launch.plan.experts import exchange_of_step
from titan_launch.plan.job import Choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.analytic.engine import analytic_engine
from titan_launch.plan.memory.analytic.ops import Kernels
from titan_launch.trace.step import trace_step
from titan_launch.train.auto_mode import plan_precision


@dataclass(frozen=True)
class Result:
    """Predictions of the two engines for one job."""

    seed: int
    kernels: Kernels
    analytic_bytes: int
    traced_bytes: int
    same_peak_point: bool
    same_traffic: bool

    @property
    def error(self) -> float:
        """Error of the analytic peak, relative to the traced one."""
        return self.analytic_bytes / self.traced_bytes - 1


TRACED = {"cpu": ("gemma2", "gpt_oss", "deepseek_v3"), "cuda": ("deepseek_v3",)}
"""Families that the analytic engine does not cover, by kernels: those with latent attention, and on a CPU those with a
soft cap or sinks."""


def random_job(seed: int) -> tuple[dict[str, Any], int, Kernels]:
    """Return a random job, its number of ranks, and the device family of its kernels."""
    pick = random.Random(seed)
    heads = pick.choice([2, 4, 6])
    dim = heads * pick.choice([8, 16, 24])
    shard, replicate = pick.choice([1, 2, 3, 4, 6, 8, 16]), pick.choice([1, 1, 1, 2, 3])
    microbatches, batch = pick.choice([1, 2, 3, 4]), pick.choice([1, 2, 3])
    modes = ["immediate", "immediate", "deferred", "deferred"] + (["deferred_all_reduce"] * 2 if replicate > 1 else [])
    mode = pick.choice(modes)
    precision = _random_precision(pick, mode)
    kernels: Kernels = pick.choice(["cuda", "cpu"])
    family = pick.choice([name for name in FAMILIES if name not in TRACED[kernels]])
    job: dict[str, Any] = {
        "model": {
            "name": family,
            "args": {
                "dim": dim,
                "n_layers": pick.choice([1, 2, 3, 4, 6, 8]),
                "n_heads": heads,
                "n_kv_heads": pick.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
                "hidden_dim": pick.choice([48, 100, 161, 256]),
                "vocab_size": pick.choice([61, 320, 1000]),
                "tie_embeddings": pick.random() < 0.25,
                **({"norm": pick.choice(["rmsnorm", "layernorm", "batchnorm"])} if family == "llama3" else {}),
                **(
                    {"sliding_window": pick.choice([4, 20, 200])}
                    if "sliding_window" in FAMILIES[family]["debug"]
                    else {}
                ),
            },
        },
        "data": {"kind": "synthetic", "vocab_size": 61},
        "training": {
            "seq_len": pick.choice([8, 33, 64, 128]),
            "local_batch_size": batch,
            "global_batch_size": batch * microbatches * shard * replicate,
        },
        "loss": {"chunks": pick.choice([1, 1, 2, 5])},
        "precision": precision,
        "batchnorm": {"statistics": pick.choice(["local", "synchronized"])},
        "gradient_accumulation": {"mode": mode, "keep_params_unsharded": pick.random() < 0.3},
        "activation_checkpoint": _random_checkpointing(pick),
        "parallelism": {
            "data_parallel_replicate_degree": replicate,
            "data_parallel_shard_degree": shard,
            "fsdp_reshard_after_forward": pick.choice(["default", "default", "always", "never"]),
        },
        "optimizer": {"implementation": pick.choice(["fused", "foreach", "for-loop"])},
    }
    if job["model"]["args"].get("norm") != "batchnorm":
        job["batchnorm"] = {}
    if "experts" in FAMILIES[family]["debug"]:
        _add_experts(pick, job, shard)
    return job, shard * replicate, kernels


def _add_experts(pick: random.Random, job: dict[str, Any], shard: int) -> None:
    """Add random experts to a job, and a random degree of expert parallelism that the shards allow."""
    num_experts = pick.choice([4, 6, 8, 16])
    job["model"]["args"]["experts"] = {
        "num_experts": num_experts,
        "top_k": pick.choice([1, 2, 4]),
        "hidden_dim": pick.choice([16, 40, 96]),
        "z_loss": pick.choice([0.0, 0.001]),
        "shared_hidden_dim": pick.choice([None, 32]),
    }
    for rule in job["precision"]["rules"]:
        if rule["match"] == "layers.*.feed_forward.w2":
            rule["match"] = pick.choice(["layers.*.moe.experts", "layers.*.moe.router"])
    degree = pick.choice([n for n in (1, 2, 3, 4, 8) if shard % n == 0 and num_experts % n == 0])
    job["parallelism"]["expert_parallel_degree"] = degree
    if degree > 1:
        job["planner"] = {"expert_load": pick.choice([1.0, 1.0, 1.5, float(degree)])}


def _random_precision(pick: random.Random, mode: str) -> dict[str, Any]:
    compute = pick.choice(["bfloat16", "bfloat16", "float32"])
    rules = [
        [],
        [],
        [
            {
                "match": ["layers.*.*_norm", "norm"],
                "param_dtype": "float32",
                "unit_per": pick.choice(["model", "block", "module"]),
            }
        ],
        [{"match": "output", "param_dtype": "float32"}],
        [{"match": "layers.*.attention", "param_dtype": "float32"}],
        [{"match": "layers.0", "param_dtype": "float32"}],
        [{"match": "tok_embeddings", "param_dtype": "float32"}],
        [{"match": "layers.*.feed_forward.w2", "param_dtype": "float32", "storage_dtype": "float32"}],
    ]
    reduce = "float32" if mode != "immediate" else pick.choice(["float32", "float32", "bfloat16"])
    storage = "float32" if reduce == "float32" and pick.random() < 0.8 else pick.choice(["float32", "bfloat16"])
    return {"storage_dtype": storage, "param_dtype": compute, "reduce_dtype": reduce, "rules": pick.choice(rules)}


def _random_checkpointing(pick: random.Random) -> dict[str, Any]:
    mode = pick.choice(["none", "full", "selective"])
    return {"mode": mode} | ({"selective_ac_option": pick.choice(["op", "op", 1])} if mode == "selective" else {})


def compare(seed: int) -> Result | None:
    """Run both engines on one random job. Return None for a job that the launcher refuses."""
    job, ranks, kernels = random_job(seed)
    config = JobConfig.model_validate(job)
    layout = plan_layout(config.parallelism, config.training, ranks)
    built = build_model(config.model, config.training.seq_len)
    try:
        plan = plan_precision(config, built)
    except ConfigError:
        return None
    choice = Choice(config.gradient_accumulation, config.activation_checkpoint)
    analytic = analytic_engine(config, layout, kernels)(choice)
    traced = trace_step(config, built, plan, layout, kernels)
    of_units = traffic_of_step(plan, layout, choice.accumulation)
    of_experts = exchange_of_step(config, plan, layout, choice.activation_checkpoint)
    return Result(
        seed=seed,
        kernels=kernels,
        analytic_bytes=analytic.peak_bytes,
        traced_bytes=traced.footprint.peak_bytes,
        same_peak_point=analytic.peak_point == traced.footprint.peak_point,
        same_traffic=traced.traffic == replace(of_units, expert=of_experts),
    )


def summarize(results: Sequence[Result], refused: int) -> str:
    """Return a Markdown table over all jobs."""
    columns = ("kernels", "jobs", "largest error", "mean error", "within 1 %", "same point of the peak")
    lines = [f"| {' | '.join(columns)} | same collectives and bytes |", "|---|---|---|---|---|---|---|"]
    for kernels in ("cuda", "cpu"):
        chosen = [result for result in results if result.kernels == kernels]
        errors = [abs(result.error) for result in chosen]
        cells = [
            kernels,
            len(chosen),
            f"{max(errors):.3%}",
            f"{statistics.mean(errors):.3%}",
            sum(error < 0.01 for error in errors),
            sum(result.same_peak_point for result in chosen),
            sum(result.same_traffic for result in chosen),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    lines += [
        "",
        f"{len(results)} jobs ({refused} more were refused: tied embeddings in two units), {versions}.",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the grid. Return 1 if a peak differs by 1 % or more, or if collectives or their bytes differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-jobs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job; each next job adds 1 (default: 0)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.num_jobs)
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn"), initializer=_be_quiet) as pool:
        found = list(pool.map(compare, seeds, chunksize=4))
    results = [result for result in found if result is not None]
    wrong = [result for result in results if abs(result.error) >= 0.01 or not result.same_traffic]
    table = summarize(results, refused=len(found) - len(results))
    publish(table, "planner_grid", arguments.write)
    print(*wrong, sep="\n")
    return int(bool(wrong))


def _be_quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
