"""Comparison of the planner with traces of random jobs: peak memory, collectives and their bytes.

    python benchmarks/planner_grid.py --num-jobs 120 --seed 0 [--workers 2] [--write docs/verification/planner.md]

A job is a small language model. Each seed draws:

- family, widths, depth, norm, tied embeddings, sliding window; experts and expert parallelism
- sequence length, microbatch, microbatches of a step, ranks: shards and replicas
- dtypes of storage, computation and reduction, and precision rules; kernels of a GPU or of a CPU
- gradient accumulation, unsharded parameters, reshard after forward, activation checkpointing
- loss: cross-entropy with z-loss, label smoothing and chunks; dpo with a reference in a folder or the base of adapters;
  distillation; a function of the user
- trained parameters: all, some (training.frozen, training.trainable), adapters (lora.targets); storage of frozen ones
- optimizer implementation, moving average of the weights (EMA)

The prediction is that of `plan`: the analytic engine, or for jobs that it does not support the trace of shallower
models. It is compared with a trace of the whole model, and the planned traffic with the collectives in that trace. The
script prints a table, and writes it between the markers of a Markdown file. A job is repeated by its seed:
--seed 17 --num-jobs 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import platform
import random
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from publishing import publish
from torch import Tensor

from titan_launch.config.architectures.families import FAMILIES
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import ConfigError
from titan_launch.plan.communication import traffic_of_step
from titan_launch.plan.experts import exchange_of_step
from titan_launch.plan.job import Choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.analytic.engine import analytic_engine, unknown_part
from titan_launch.plan.memory.analytic.ops import Kernels
from titan_launch.trace.engine import trace_engine
from titan_launch.trace.step import trace_step
from titan_launch.train.auto_mode import plan_precision
from titan_launch.train.model import build_job_model


@dataclass(frozen=True)
class Result:
    """The prediction for one job, and the trace of the whole model."""

    seed: int
    engine: str
    """`analytic`, or `trace` for the extrapolation from shallower models."""

    kernels: Kernels
    draws: tuple[str, ...]
    """Names of what the job has, for the counts below the table."""

    predicted_bytes: int
    traced_bytes: int
    same_peak_point: bool
    same_traffic: bool

    @property
    def error(self) -> float:
        """Error of the predicted peak, relative to the traced one."""
        return self.predicted_bytes / self.traced_bytes - 1

    @property
    def is_wrong(self) -> bool:
        """True if the peak differs by 1 % or more, or if collectives or their bytes differ."""
        return abs(self.error) >= 0.01 or not self.same_traffic


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
    family = pick.choice([*FAMILIES])
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
    _add_loss(pick, job)
    _add_trained(pick, job)
    job["ema"] = pick.choice([{}, {}, {}, {"decay": 0.99}])
    return job, shard * replicate, kernels


def _add_loss(pick: random.Random, job: dict[str, Any]) -> None:
    """Draw a loss. A job with a second model has no expert parallelism, and no options of the cross-entropy."""
    z_loss, smoothing = pick.choice([0.0, 0.0, 1e-4]), pick.choice([0.0, 0.0, 0.1])
    job["loss"] |= {"z_loss": z_loss, "label_smoothing": smoothing}
    name = pick.choice(["cross_entropy"] * 5 + ["dpo", "base", "distillation", "own"])
    if name == "cross_entropy":
        return
    job["model"]["args"] |= {"n_layers": pick.choice([3, 7, 8]), "vocab_size": 320}
    if name == "own":
        job["loss"] = {"name": "planner_grid:own_loss"}
        return
    job["parallelism"].pop("expert_parallel_degree", None)
    job.pop("planner", None)
    if name == "distillation":
        job["loss"] = {"name": name, "distillation": {"teacher": TEACHER, "dtype": pick.choice([None, "bfloat16"])}}
        return
    job["loss"] = {"name": "dpo", "dpo": {"reference": "base" if name == "base" else TEACHER}}
    job["data"] = {"kind": "preferences", "path": "pairs.jsonl", "template": "chatml"}


def _add_trained(pick: random.Random, job: dict[str, Any]) -> None:
    """Draw the trained parameters: all, some, or adapters. A reference that is the base of adapters needs adapters."""
    is_base = job["loss"].get("dpo") == {"reference": "base"}
    kind = "lora" if is_base else pick.choice(["all", "all", "frozen", "lora"])
    mlp = "layers.*.moe.experts" if "experts" in job["model"]["args"] else "layers.*.feed_forward.w*"
    if kind == "frozen":
        some = [
            {"frozen": ["tok_embeddings.*", "layers.0.**"]},
            {"frozen": ["layers.*.moe.experts.*" if mlp.endswith("experts") else "layers.*.feed_forward.**"]},
            {"trainable": ["output.*"]},
            {"trainable": ["layers.*.*_norm.*", "norm.*"]},
            {"trainable": ["layers.*.attention.**"]},
        ]
        job["training"] |= pick.choice(some)
    elif kind == "lora":
        attention = "layers.*.attention.w*"
        targets = pick.choice([[attention], [attention, mlp], [mlp], ["layers.0.attention.wo"]])
        job["lora"] = {"targets": targets, "rank": pick.choice([2, 8])}
        job["model"]["args"]["n_layers"] = pick.choice([2, 7, 8])
    if kind != "all":
        job["precision"]["frozen_storage_dtype"] = pick.choice([None, "bfloat16"])


TEACHER = "{teacher}"
"""Stands in a job for the folder of the second model, which has the arguments of the trained one."""


def own_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the squared errors of the targets' probabilities."""
    wanted = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="none").neg().exp()
    return (1 - wanted).square().where(targets.flatten() != -100, 0).sum()


def _add_experts(pick: random.Random, job: dict[str, Any], shard: int) -> None:
    """Add random experts to a job, and a random degree of expert parallelism that the shards allow."""
    num_experts = pick.choice([4, 6, 8, 16])
    job["model"]["args"]["experts"] = {
        "num_experts": num_experts,
        "top_k": pick.choice([1, 2, 4]),
        "hidden_dim": pick.choice([16, 40, 96]),
        "z_loss": pick.choice([0.0, 0.001]),
        "shared_hidden_dim": pick.choice([None, 32]),
        **({"num_groups": 1, "top_k_groups": 1} if num_experts % 8 else {}),  # groups of one expert are refused
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
    """Compare the prediction for one random job with its trace. Return None for a job that the launcher refuses."""
    job, ranks, kernels = random_job(seed)
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps({"model": {**job["model"], "flavor": "debug"}}))
        try:
            return _compare(seed, json.loads(json.dumps(job).replace(TEACHER, folder)), ranks, kernels)
        except ConfigError:
            return None


def _compare(seed: int, job: dict[str, Any], ranks: int, kernels: Kernels) -> Result:
    config = JobConfig.model_validate(job)
    layout = plan_layout(config.parallelism, config.training, ranks)
    built = build_job_model(config)
    plan = plan_precision(config, built)
    choice = Choice(config.gradient_accumulation, config.activation_checkpoint)
    of_units = traffic_of_step(plan, layout, choice.accumulation)
    of_experts = exchange_of_step(config, plan, layout, choice.activation_checkpoint)
    planned = [] if config.loss.name in ("dpo", "distillation") else [replace(of_units, expert=of_experts)]
    if unknown_part(config, kernels) is None:
        predicted = analytic_engine(config, layout, kernels)(choice)
        engine = "analytic"
    else:
        by_trace = trace_engine(config, layout, kernels)
        predicted, engine = by_trace(choice), "trace"
        planned.append(by_trace.traffic(choice))
    traced = trace_step(config, built, plan, layout, kernels)
    return Result(
        seed=seed,
        engine=engine,
        kernels=kernels,
        draws=_draws(config, ranks),
        predicted_bytes=predicted.peak_bytes,
        traced_bytes=traced.footprint.peak_bytes,
        same_peak_point=predicted.peak_point == traced.footprint.peak_point,
        same_traffic=all(traffic == traced.traffic for traffic in planned),
    )


def _draws(config: JobConfig, ranks: int) -> tuple[str, ...]:
    """Return the names of what a job has."""
    loss, training = config.loss, config.training
    name = "a function of the user" if not loss.is_of_package else loss.name
    if loss.dpo is not None:
        name += " against the base" if loss.dpo.reference == "base" else " against a folder"
    has = {
        f"{name}": True,
        "z-loss": loss.z_loss > 0,
        "label smoothing": loss.label_smoothing > 0,
        "chunks": loss.chunks > 1,
        "LoRA": bool(config.lora.targets),
        "frozen parameters": bool(training.frozen or training.trainable),
        "one shard": config.parallelism.data_parallel_shard_degree == 1,
        "EMA": config.ema.decay is not None,
        "expert parallelism": config.parallelism.expert_parallel_degree > 1,
    }
    return tuple(name for name, is_drawn in has.items() if is_drawn)


def summarize(results: Sequence[Result], refused: int) -> str:
    """Return a Markdown table over all jobs."""
    columns = ("engine", "kernels", "jobs", "largest error", "its seed", "mean error", "within 1 %")
    lines = [f"| {' | '.join(columns)} | same point of the peak | same collectives and bytes |", "|---" * 9 + "|"]
    for engine, kernels in itertools.product(("analytic", "trace"), ("cuda", "cpu")):
        chosen = [result for result in results if (result.engine, result.kernels) == (engine, kernels)]
        if not chosen:
            continue
        errors = [abs(result.error) for result in chosen]
        worst = chosen[errors.index(max(errors))]
        cells = [
            engine,
            kernels,
            len(chosen),
            f"{worst.error:+.3%}",
            worst.seed,
            f"{statistics.mean(errors):.3%}",
            sum(error < 0.01 for error in errors),
            sum(result.same_peak_point for result in chosen),
            sum(result.same_traffic for result in chosen),
        ]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    drawn = Counter(draw for result in results for draw in result.draws)
    lines += [
        "",
        f"{len(results)} jobs ({refused} more were refused by a rule of the launcher), {versions}. Jobs with: "
        f"{', '.join(f'{name} {count}' for name, count in drawn.most_common())}.",
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
        found = [_shown(result) for result in pool.map(compare, seeds)]
    results = [result for result in found if result is not None]
    wrong = [result for result in results if result.is_wrong]
    publish(summarize(results, refused=len(found) - len(results)), "planner_grid", arguments.write)
    print(*wrong, sep="\n")
    return int(bool(wrong))


def _shown(result: Result | None) -> Result | None:
    """Return a result, after it was shown as progress."""
    if result is not None:
        mark = "  <- differs" if result.is_wrong else ""
        draws = ", ".join(result.draws)
        print(f"{result.seed}: {result.error:+.3%}  {result.engine}, {result.kernels}, {draws}{mark}", file=sys.stderr)
    return result


def _be_quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
