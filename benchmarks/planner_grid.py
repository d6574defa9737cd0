"""Comparison of the planner with traces of random jobs, or with their runs: peak memory, collectives and their bytes.

    python benchmarks/planner_grid.py --num-jobs 120 --seed 0 [--workers 2] [--write docs/verification/planner.md]
    python benchmarks/planner_grid.py --measure --num-jobs 100 --workers 1

A job is a small language model, ResNet or ViT. Each seed draws:

- layout: shards and replicas, tensor, context and pipeline parallelism (each schedule), expert parallelism; optimizer
  sharded over replicas
- family, widths, depth, norm, tied embeddings, sliding window, latent attention, experts
- sequence length, packed documents, microbatch, microbatches of a step
- dtypes of storage, computation and reduction, and precision rules; kernels of a GPU or of a CPU
- gradient accumulation, unsharded parameters, reshard after forward, activation checkpointing
- activation offloading, CPU offload
- loss: cross-entropy with z-loss, label smoothing and chunks; dpo and kto with a reference in a folder or the base of
  adapters; distillation; a function of the user
- trained parameters: all, some (training.frozen, training.trainable), adapters (lora.targets); storage of frozen ones
- optimizer, its implementation and the dtype of its state, moving average of the weights (EMA)

The prediction is that of `plan`: the replay of a recorded microbatch. It is compared with a trace of all blocks in a
whole step, and its traffic with the collectives in that trace. With `--measure`, the jobs of up to four ranks run on
this machine's CPUs, and the planned peak is compared with the smallest one that up to six runs report. The script
prints a table, and writes it between the markers of a Markdown file. A job is repeated by its seed:
--seed 17 --num-jobs 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import torch
import torch.nn.functional as F
from publishing import publish
from torch import Tensor

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.rules import first_problem
from titan_launch.config.sections.data import separates_documents
from titan_launch.config.sections.parallelism import SPLIT_BACKWARD_SCHEDULES, ParallelismConfig
from titan_launch.core.errors import ConfigError
from titan_launch.core.files import CACHE_VARIABLE
from titan_launch.core.patches import environment
from titan_launch.models.decoder.families import FAMILIES
from titan_launch.plan.hardware import GIB, Kernels
from titan_launch.plan.job import configured_choice, with_unsharded_parameters
from titan_launch.plan.layout import Layout, plan_layout
from titan_launch.plan.pipeline import representative_ranks
from titan_launch.trace.recorder import recorded_engine
from titan_launch.trace.step import TracedStep, trace_step
from titan_launch.train.model import build_job_model, plan_precision

LIMIT = 0.003
"""Error of a peak, relative to the traced one, from which a prediction is wrong."""

MEASURED_LIMIT = 0.01
"""The same, relative to the measured one."""

MOST_RUNS = 6
"""Largest number of runs of a job. The first run within the limit is the last."""

MOST_RANKS = 4
"""Ranks of the jobs that run on this machine."""

SCHEDULES = get_args(ParallelismConfig.model_fields["pipeline_parallel_schedule"].annotation)


@dataclass(frozen=True)
class Result:
    """The prediction for one job, and the trace of the whole model."""

    seed: int
    axes: str
    """Axes of model parallelism: `none`, or such as `tensor`."""

    kernels: Kernels
    draws: tuple[str, ...]
    """Names of what the job has, for the counts below the table."""

    predicted_bytes: int
    found_bytes: int
    """Peak of the trace, or of the run."""

    same_peak_point: bool = True
    same_traffic: bool = True
    limit: float = LIMIT

    @property
    def error(self) -> float:
        """Error of the predicted peak, relative to the one that was found."""
        return self.predicted_bytes / self.found_bytes - 1

    @property
    def is_wrong(self) -> bool:
        """True if the peak differs by the limit or more, or if its point, collectives or their bytes differ."""
        return abs(self.error) >= self.limit or not self.same_peak_point or not self.same_traffic


def random_job(seed: int, folder: Path) -> tuple[JobConfig, int, Kernels]:
    """Return the job of `random_sections`, its number of ranks, and the device family of its kernels."""
    sections, ranks, kernels = random_sections(seed, folder)
    return JobConfig.model_validate(sections), ranks, kernels


def random_sections(seed: int, folder: Path) -> tuple[dict[str, Any], int, Kernels]:
    """Return the sections of a random job that the rules of the launcher accept, its number of ranks, and the device
    family of its kernels. The files that the job names are written into the folder."""
    pick = random.Random(seed)
    axes = pick.choice([(), (), (), ("tensor",), ("context",), ("pipeline",), ("pipeline",), ("tensor", "pipeline")])
    is_of_images = axes == () and pick.random() < 0.25
    (folder / "text.txt").write_text("some text of a document\n" * 400)
    (folder / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 400)
    (folder / "rated.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n' * 400)
    while True:
        kernels: Kernels = "cuda" if "context" in axes else pick.choice(["cuda", "cpu"])
        job, ranks = _image_job(pick) if is_of_images else _token_job(pick, axes)
        job["job"] = {"device": "cpu" if kernels == "cpu" else "auto"}
        (folder / "config.json").write_text(json.dumps({"model": {**job["model"], "flavor": "debug"}}))
        sections = json.loads(json.dumps(job).replace(FOLDER, str(folder)))
        if _is_accepted(sections):
            return sections, ranks, kernels


def _is_accepted(sections: dict[str, Any]) -> bool:
    config = JobConfig.model_validate(sections)
    return first_problem(config) is None


def _token_job(pick: random.Random, axes: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Draw a language model and its number of ranks."""
    heads = pick.choice([2, 4, 6])
    dim = heads * pick.choice([8, 16, 24])
    family = pick.choice([*FAMILIES])
    args: dict[str, Any] = {
        "dim": dim,
        "n_layers": pick.choice([1, 2, 3, 4, 6, 8]),
        "n_heads": heads,
        "n_kv_heads": pick.choice([n for n in (1, 2, 3, heads) if heads % n == 0]),
        "hidden_dim": pick.choice([48, 100, 161, 256]),
        "vocab_size": pick.choice([61, 320, 1000]),
        "tie_embeddings": pick.random() < 0.25,
        **({"norm": pick.choice(["rmsnorm", "layernorm", "batchnorm"])} if family == "llama3" else {}),
        **({"sliding_window": pick.choice([4, 20, 200])} if "sliding_window" in FAMILIES[family]["debug"] else {}),
    }
    job, ranks = _job(pick, {"name": family, "args": args}, axes)
    job["training"]["seq_len"] = pick.choice([8, 33, 64, 128])
    job["data"] = {"kind": "synthetic", "vocab_size": 61}
    if args["vocab_size"] >= 320 and pick.random() < 0.25:
        job["data"] = {"kind": "text", "path": f"{FOLDER}/text.txt", "packing": "documents"}
    job["loss"] = {"chunks": pick.choice([1, 1, 2, 5])}
    if args.get("norm") == "batchnorm":
        job["batchnorm"] = {"statistics": pick.choice(["local", "synchronized"])}
    if "experts" in FAMILIES[family]["debug"]:
        _add_experts(pick, job)
    _add_loss(pick, job)
    _add_trained(pick, job)
    return job, ranks


def _image_job(pick: random.Random) -> tuple[dict[str, Any], int]:
    """Draw a ResNet or a ViT, and its number of ranks."""
    name = pick.choice(["resnet", "vit"])
    job, ranks = _job(pick, {"name": name, "flavor": "debug"}, ())
    job["data"] = {"kind": "images"}
    job["precision"]["rules"] = []
    if name == "resnet":
        job["batchnorm"] = {"statistics": pick.choice(["local", "synchronized"])}
    return job, ranks


def _job(pick: random.Random, model: dict[str, Any], axes: Sequence[str]) -> tuple[dict[str, Any], int]:
    """Draw what does not depend on the kind of the model."""
    shard, replicate = pick.choice([1, 2, 3, 4, 6, 8, 16]), pick.choice([1, 1, 1, 2, 3])
    microbatches, batch = pick.choice([1, 2, 3, 4]), pick.choice([1, 2, 3])
    modes = ["immediate", "immediate", "deferred", "deferred"] + (["deferred_all_reduce"] * 2 if replicate > 1 else [])
    mode, is_unsharded = pick.choice(modes), pick.random() < 0.3
    parallelism = {
        "data_parallel_replicate_degree": replicate,
        "data_parallel_shard_degree": shard,
        "shard_optimizer_over_replicas": replicate > 1 and pick.random() < 0.3,
        "fsdp_reshard_after_forward": pick.choice(["default", "default", "always", "never"]),
        **{f"{axis}_parallel_degree": 2 for axis in axes},
    }
    if "tensor" in axes:
        parallelism |= {"sequence_parallel": pick.random() < 0.7, "loss_parallel": pick.random() < 0.7}
    if "context" in axes:
        parallelism["context_parallel_rotate_method"] = pick.choice(["allgather", "alltoall"])
    if "pipeline" in axes:
        microbatches, schedule = pick.choice([2, 4, 6, 10]), pick.choice(SCHEDULES)
        parallelism["pipeline_parallel_schedule"] = schedule
        if schedule in SPLIT_BACKWARD_SCHEDULES:
            mode, is_unsharded = "deferred", True
    checkpointing = _random_checkpointing(pick)
    job: dict[str, Any] = {
        "model": model,
        "training": {
            "local_batch_size": batch,
            "global_batch_size": batch * microbatches * shard * replicate,
            "enable_cpu_offload": pick.random() < 0.15,
        },
        "precision": _random_precision(pick, mode),
        "gradient_accumulation": {"mode": mode, "keep_params_unsharded": is_unsharded},
        "activation_checkpoint": checkpointing | {"offload": pick.random() < 0.15},
        "parallelism": parallelism,
        "optimizer": _random_optimizer(pick),
        "ema": pick.choice([{}, {}, {}, {"decay": 0.99}]),
    }
    return job, shard * replicate * 2 ** len(axes)


def _random_optimizer(pick: random.Random) -> dict[str, Any]:
    dtype = pick.choice([None, None, None, "bfloat16", "int8"])
    if dtype is not None:
        return {"state_dtype": dtype}
    name = pick.choice(["AdamW", "AdamW", "Muon", "SGD"])
    return {"name": name} | (
        {} if name == "Muon" else {"implementation": pick.choice(["fused", "foreach", "for-loop"])}
    )


def _add_loss(pick: random.Random, job: dict[str, Any]) -> None:
    """Draw a loss. A job with a second model has no expert parallelism, and no options of the cross-entropy."""
    z_loss, smoothing = pick.choice([0.0, 0.0, 1e-4]), pick.choice([0.0, 0.0, 0.1])
    job["loss"] |= {"z_loss": z_loss, "label_smoothing": smoothing}
    name = pick.choice(["cross_entropy"] * 5 + ["dpo", "base", "kto", "distillation", "own"])
    if name == "cross_entropy":
        return
    job["model"]["args"] |= {"n_layers": pick.choice([3, 7, 8]), "vocab_size": 320}
    if name == "own":
        job["loss"] = {"name": "planner_grid:own_loss"}
        return
    job["parallelism"].pop("expert_parallel_degree", None)
    job.pop("planner", None)
    if name == "distillation":
        job["loss"] = {"name": name, "distillation": {"teacher": FOLDER, "dtype": pick.choice([None, "bfloat16"])}}
        return
    if name == "kto":
        job["loss"] = {"name": name, name: {"reference": pick.choice(["base", FOLDER])}}
        job["data"] = {"kind": "unpaired_preferences", "path": f"{FOLDER}/rated.jsonl", "template": "chatml"}
        job["gradient_accumulation"]["keep_params_unsharded"] = False
        return
    job["loss"] = {"name": "dpo", "dpo": {"reference": "base" if name == "base" else FOLDER}}
    job["data"] = {"kind": "preferences", "path": f"{FOLDER}/pairs.jsonl", "template": "chatml"}


def _add_trained(pick: random.Random, job: dict[str, Any]) -> None:
    """Draw the trained parameters: all, some, or adapters. A reference that is the base of adapters needs adapters."""
    is_base = {"reference": "base"} in job["loss"].values()
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


FOLDER = "{folder}"
"""Stands in a job for the folder with its files. The folder is also that of the second model, which has the arguments
of the trained one."""


def own_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the squared errors of the targets' probabilities."""
    wanted = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=-100, reduction="none").neg().exp()
    return (1 - wanted).square().where(targets.flatten() != -100, 0).sum()


def _add_experts(pick: random.Random, job: dict[str, Any]) -> None:
    """Add random experts to a job, and a random degree of expert parallelism that the shards allow."""
    shard = job["parallelism"]["data_parallel_shard_degree"]
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
    """Compare the prediction for one random job with its trace. Return None for a job whose start would refuse it."""
    with TemporaryDirectory() as folder, environment(**{CACHE_VARIABLE: f"{folder}/cache"}):
        config, ranks, kernels = random_job(seed, Path(folder))
        try:
            layout = plan_layout(config.parallelism, config.training, ranks)
            config = with_unsharded_parameters(config, layout)
            engine, choice = recorded_engine(config, layout, kernels), configured_choice(config)
            predicted, traffic = engine(choice), engine.traffic(choice)
            traced = trace_all_blocks(config, layout, kernels)
        except ConfigError:
            return None
    return Result(
        seed=seed,
        axes=_axes(layout),
        kernels=kernels,
        draws=_draws(config),
        predicted_bytes=predicted.peak_bytes,
        found_bytes=traced.footprint.peak_bytes,
        same_peak_point=predicted.peak_point == traced.footprint.peak_point,
        same_traffic=traffic == traced.traffic,
    )


def _axes(layout: Layout) -> str:
    return " and ".join(axis for axis in ("tensor", "context", "pipeline") if getattr(layout, axis) > 1) or "none"


def measure(seed: int) -> Result | None:
    """Compare the prediction for one random job with the memory of its third step on CPU ranks. Return None for a job
    that does not run here: on more ranks, with ring attention, or with a second model, whose weights it does not have;
    and with expert parallelism, where the data decide how many rows a rank computes."""
    with TemporaryDirectory() as name, environment(**{CACHE_VARIABLE: f"{name}/cache"}):
        folder = Path(name)
        sections, ranks, _ = random_sections(seed, folder)
        second = name in json.dumps(sections.get("loss", {}))
        is_divided = sections["parallelism"].keys() & {"context_parallel_degree", "expert_parallel_degree"}
        if ranks > MOST_RANKS or second or is_divided:
            return None
        sections["job"] = {"device": "cpu", "dump_folder": str(folder / "outputs")}
        sections["training"]["steps"] = 3
        if "dpo" in sections.get("loss", {}):
            sections["training"]["seq_len"] = 128  # a pair has 70 tokens
        sections.get("activation_checkpoint", {}).pop("offload", None)  # it needs a GPU
        sections |= {"checkpoint": {"save_last": False}, "metrics": {"log_freq": 1}}
        with_flash = {**sections, "kernels": {"attention": "flash"}}  # a plan does not know this package's own kernel
        sections = with_flash if _is_accepted(with_flash) else sections
        config = JobConfig.model_validate(sections)
        try:
            layout = plan_layout(config.parallelism, config.training, ranks)
            config = with_unsharded_parameters(config, layout)
            predicted = recorded_engine(config, layout, "cpu")(configured_choice(config))
        except ConfigError:
            return None
        job = folder / "job.toml"
        job.write_text("\n".join(f"{key} = {toml_value(value)}" for key, value in _without_none(sections).items()))
        torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
        command = [sys.executable, "-m", *(torchrun if ranks > 1 else []), "titan_launch", "--config", str(job)]
        peaks: list[int] = []
        while len(peaks) < MOST_RUNS and not any(
            abs(predicted.peak_bytes - peak) <= MEASURED_LIMIT * peak for peak in peaks
        ):
            peaks.append(_measured_peak(command, folder / "outputs", seed))
    return Result(seed, _axes(layout), "cpu", _draws(config), predicted.peak_bytes, min(peaks), limit=MEASURED_LIMIT)


_PEAK = "memory/max_active_gib"


def _measured_peak(command: list[str], outputs: Path, seed: int) -> int:
    """Run a job, and return the peak memory that it reports. If gloo's thread happens to free a buffer late, a run
    measures a little more."""
    with environment(PYTHONPATH=os.pathsep.join(sys.path)):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"seed {seed}: {done.stderr[:4000]}")
    (report,) = outputs.glob("**/metrics.jsonl")
    (peak,) = (row[_PEAK] for row in map(json.loads, report.read_text().splitlines()) if _PEAK in row)
    shutil.rmtree(outputs)
    return round(peak * GIB)


def _without_none(value: Any) -> Any:
    """Return nested tables without the keys that have no value, which TOML cannot write."""
    if isinstance(value, dict):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def trace_all_blocks(config: JobConfig, layout: Layout, kernels: Kernels) -> TracedStep:
    """Trace the step of the rank with the highest peak, without extrapolation from shallower models."""
    plan = plan_precision(config, build_job_model(config))
    ranks = [pipeline_rank * layout.ranks_per_stage for pipeline_rank in representative_ranks(plan, with_times=False)]
    traced = [trace_step(config, build_job_model(config), plan, layout, kernels, rank) for rank in ranks]
    return max(traced, key=lambda step: step.footprint.peak_bytes)


def _draws(config: JobConfig) -> tuple[str, ...]:
    """Return the names of what a job has."""
    loss, training, parallelism = config.loss, config.training, config.parallelism
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
        "one shard": parallelism.data_parallel_shard_degree == 1,
        "EMA": config.ema.decay is not None,
        "experts": "experts" in config.model.args,
        "expert parallelism": parallelism.expert_parallel_degree > 1,
        "optimizer sharded over replicas": parallelism.shard_optimizer_over_replicas,
        "packed documents": separates_documents(config.data),
        "activation offloading": config.activation_checkpoint.offload,
        "CPU offload": training.enable_cpu_offload,
        f"optimizer state in {config.optimizer.state_dtype}": config.optimizer.state_dtype is not None,
        config.model.name: config.model.name in ("deepseek_v3", "resnet", "vit"),
        f"schedule {parallelism.pipeline_parallel_schedule}": parallelism.pipeline_parallel_degree > 1,
    }
    return tuple(name for name, is_drawn in has.items() if is_drawn)


def summarize(results: Sequence[Result], left_out: int, is_measured: bool) -> str:
    """Return a Markdown table over all jobs."""
    limit = MEASURED_LIMIT if is_measured else LIMIT
    columns = ["model parallelism", "kernels", "jobs", "largest error", "its seed", "mean error"]
    columns.append(f"within {100 * limit:g} %")
    if not is_measured:
        columns += ["same point of the peak", "same collectives and bytes"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for axes, kernels in itertools.product(dict.fromkeys(result.axes for result in results), ("cuda", "cpu")):
        chosen = [result for result in results if (result.axes, result.kernels) == (axes, kernels)]
        if not chosen:
            continue
        errors = [abs(result.error) for result in chosen]
        worst = chosen[errors.index(max(errors))]
        cells = [
            axes,
            kernels,
            len(chosen),
            f"{worst.error:+.3%}",
            worst.seed,
            f"{statistics.mean(errors):.3%}",
            sum(error < limit for error in errors),
            sum(result.same_peak_point for result in chosen),
            sum(result.same_traffic for result in chosen),
        ]
        lines.append(f"| {' | '.join(map(str, cells[: len(columns)]))} |")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    drawn = Counter(draw for result in results for draw in result.draws)
    reason = "cannot run here" if is_measured else "would be refused at their start"
    lines += [
        "",
        f"{len(results)} jobs ({left_out} more {reason}), {versions}. Jobs with: "
        f"{', '.join(f'{name} {count}' for name, count in drawn.most_common())}.",
    ]
    return "\n".join(lines)


def main() -> int:
    """Run the grid. Return 1 if a prediction is wrong (`Result.is_wrong`)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-jobs", type=int, default=120)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job; each next job adds 1 (default: 0)")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="run the jobs on CPU ranks, instead of tracing them")
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.num_jobs)
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn"), initializer=_be_quiet) as pool:
        found = [_shown(result) for result in pool.map(measure if arguments.measure else compare, seeds)]
    results = [result for result in found if result is not None]
    wrong = [result for result in results if result.is_wrong]
    name = "planner_measured" if arguments.measure else "planner_grid"
    publish(summarize(results, len(found) - len(results), arguments.measure), name, arguments.write)
    print(*wrong, sep="\n")
    return int(bool(wrong))


def _shown(result: Result | None) -> Result | None:
    """Return a result, after it was shown as progress."""
    if result is not None:
        mark = "  <- differs" if result.is_wrong else ""
        draws = ", ".join(result.draws)
        print(f"{result.seed}: {result.error:+.3%}  {result.axes}, {result.kernels}, {draws}{mark}", file=sys.stderr)
    return result


def _be_quiet() -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


if __name__ == "__main__":
    sys.exit(main())
