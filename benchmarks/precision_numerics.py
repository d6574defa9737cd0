"""Effect of precision rules on losses, gradients, collectives and step time of small jobs.

    torchrun --nproc-per-node 2 benchmarks/precision_numerics.py --write docs/verification/numerics.md

Every variant of a job starts from the same parameters and sees the same samples. The variants take turns, one step
each, so other load on the machine affects all of them. Times are ratios within a round. The script prints a table for
each job, and writes the tables between the markers of a Markdown file.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from publishing import markdown_table, publish
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.config.job import JobConfig
from titan_launch.core.process import exit_process
from titan_launch.distributed.process_group import Ranks, process_group
from titan_launch.distributed.random_state import seed_everything
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.plan.communication import Collectives, collectives_of_microbatch
from titan_launch.train.build import build_run
from titan_launch.train.loop import pool_statistics, train_one_step, validation_scalars
from titan_launch.train.run import Run

LAST_STEPS = 10
"""Number of steps at the end over which the training loss is averaged."""

Variants = dict[str, dict[str, Any]]
"""`[precision]` by name. The first variant is the reference for gradients, the second for time and collectives."""


def norm_variants(norm: str) -> Variants:
    """Return the variants for a norm without running statistics."""
    return {
        "fp32": {"param_dtype": "float32"},
        "bf16, no rules": {},
        "bf16, norms in fp32": {"rules": [{"type": norm, "param_dtype": "float32"}]},
        "bf16, fp32 norm weights, inputs not cast": {"rules": [{"type": norm}]},
    }


def batchnorm_variants() -> Variants:
    """Return the variants for BatchNorm. The last one stores running statistics in bf16, which is not recommended."""
    wrong = {"type": "BatchNorm", "param_dtype": "bfloat16", "buffer_dtype": "bfloat16"}
    return {
        "fp32": {"param_dtype": "float32"},
        "bf16, no rules (fp32 statistics by default)": {},
        "bf16, BatchNorm in fp32": {"rules": [{"type": "BatchNorm", "param_dtype": "float32"}]},
        "bf16, BatchNorm forced into bf16": {"rules": [wrong]},
    }


JOBS: dict[str, tuple[dict[str, Any], Variants]] = {
    "RMSNorm": ({"norm": "rmsnorm"}, norm_variants("RMSNorm")),
    "LayerNorm": ({"norm": "layernorm"}, norm_variants("LayerNorm")),
    "BatchNorm": ({"norm": "batchnorm", "batchnorm_momentum": 0.01}, batchnorm_variants()),
}


def job_of(args: dict[str, Any], precision: dict[str, Any], seed: int, steps: int, folder: str) -> JobConfig:
    """Return a job: a Llama of a million parameters learns the source of Python's standard library."""
    size = {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 384, "vocab_size": 257}
    text = {"kind": "text", "path": "python-stdlib"}
    return JobConfig.model_validate(
        {
            "job": {"name": "numerics", "dump_folder": folder},
            "model": {"args": {**size, **args}},
            "data": {**text, "split": "train"},
            "training": {"seq_len": 128, "local_batch_size": 4, "global_batch_size": 16, "steps": steps, "seed": seed},
            "precision": precision,
            "optimizer": {"lr": 3e-3},
            "lr_scheduler": {"kind": "cosine", "warmup_steps": steps // 10},
            "validation": {"freq": steps, "max_samples": 64, "data": {**text, "split": "validation"}},
            "metrics": {"enable_tensorboard": False},
            "debug": {"audit_precision": False},
            "checkpoint": {"save_last": False},
        }
    )


@dataclass
class Figures:
    """Measurements of one variant: one value per seed, and for times one value per step."""

    collectives: Collectives = field(default_factory=Collectives)
    training_loss: list[float] = field(default_factory=list)
    validation_loss: list[float] = field(default_factory=list)
    gradient_error: list[float] = field(default_factory=list)
    norm_gradient_error: list[float] = field(default_factory=list)
    relative_time: list[float] = field(default_factory=list)


def study(args: dict[str, Any], variants: Variants, ranks: Ranks, seeds: int, steps: int) -> dict[str, Figures]:
    """Train every variant with every seed."""
    figures = {name: Figures() for name in variants}
    for seed in range(seeds):
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            runs = {}
            for number, (name, precision) in enumerate(variants.items()):
                seed_everything(seed + ranks.rank, deterministic=False)
                job = job_of(args, precision, seed, steps, str(Path(folder, str(number))))
                runs[name] = build_run(job, ranks, stack)
            compare_gradients(runs, figures)
            train(runs, figures, steps)
    return figures


def compare_gradients(runs: dict[str, Run], figures: dict[str, Figures]) -> None:
    """Add the relative error of each variant's gradient to its figures, over all parameters and over the norms'."""
    tokens = torch.randint(0, 257, (8, 129), generator=torch.Generator().manual_seed(0))
    gradients = {name: gradient(run, tokens) for name, run in runs.items()}
    reference = next(iter(gradients.values()))
    norms = [name for name in reference if "norm" in name]
    for name, found in gradients.items():
        figures[name].gradient_error.append(relative_error(found, reference, list(reference)))
        figures[name].norm_gradient_error.append(relative_error(found, reference, norms))


def gradient(run: Run, tokens: Tensor) -> dict[str, Tensor]:
    """Return the unsharded gradient of one microbatch of random tokens. The state of the run does not change."""
    statistics = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    tokens = tokens.to(run.ranks.device)
    (CrossEntropy().sums(run.model(tokens[:, :-1]), tokens[:, 1:])[0] / tokens[:, 1:].numel()).backward()
    found = {name: full_tensor(p.grad) for name, p in run.model.named_parameters() if p.grad is not None}
    run.model.zero_grad()
    for name, buffer in run.model.named_buffers():
        buffer.copy_(statistics[name])
    return found


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor in fp64."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double()


def relative_error(found: dict[str, Tensor], reference: dict[str, Tensor], names: Sequence[str]) -> float:
    """Return |found - reference| / |reference| over all the named gradients."""
    error = sum(float((found[name] - reference[name]).square().sum()) for name in names)
    return (error / sum(float(reference[name].square().sum()) for name in names)) ** 0.5


def train(runs: dict[str, Run], figures: dict[str, Figures], steps: int) -> None:
    """Train all variants, one step of each in turn, and add their losses and times to the figures."""
    losses: dict[str, list[float]] = {name: [] for name in runs}
    base = list(runs)[1]
    for _ in range(steps):
        seconds = {}
        for name, run in runs.items():
            start = time.perf_counter()
            result = train_one_step(run)
            loss = result.loss_sum.clone()
            torch.distributed.all_reduce(loss)
            losses[name].append(loss.item())  # waits for the device
            seconds[name] = time.perf_counter() - start
        for name in runs:
            figures[name].relative_time.append(seconds[name] / seconds[base])
    for name, run in runs.items():
        figures[name].training_loss.append(statistics.mean(losses[name][-LAST_STEPS:]))
        pool_statistics(run, "validation", temporarily=False)
        figures[name].validation_loss.append(validation_scalars(run)["validation/loss"])
        sharded = replace(run.job.layout, shard=max(2, run.job.layout.shard))
        figures[name].collectives = collectives_of_microbatch(run.job.plan.units, sharded)


def table(job: str, figures: dict[str, Figures]) -> str:
    """Return a Markdown table with one row for each variant. Ranges are over seeds, and those of times over steps."""
    reference, base, *_ = figures.values()
    columns = [job, "training loss", "minus fp32", "validation loss", "minus fp32", "gradient error"]
    rows = [[*columns, "error of the norms", "collectives", "step time"]]
    for name, found in figures.items():
        cells = [
            name,
            f"{statistics.mean(found.training_loss):.4f}",
            differences(found.training_loss, reference.training_loss),
            f"{statistics.mean(found.validation_loss):.4f}",
            differences(found.validation_loss, reference.validation_loss),
            extent(found.gradient_error, ".1e"),
            extent(found.norm_gradient_error, ".1e"),
            f"{found.collectives.total} ({found.collectives.total - base.collectives.total:+d})",
            quartiles(found.relative_time),
        ]
        rows.append(cells)
    return markdown_table(rows)


def differences(values: Sequence[float], reference: Sequence[float]) -> str:
    """Return the range of the differences from the reference with the same seed."""
    return extent([value - other for value, other in zip(values, reference, strict=True)], "+.4f")


def extent(values: Sequence[float], form: str) -> str:
    """Return the smallest and the largest value."""
    return f"{min(values):{form}} to {max(values):{form}}"


def quartiles(values: Sequence[float]) -> str:
    """Return the median, with the quartiles in parentheses."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def main() -> None:
    """Run the study on the ranks that torchrun has started, and write its tables on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--jobs", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    options = parser.parse_args()
    with process_group("auto", timeout_seconds=600) as ranks:
        tables = []
        for job in options.jobs:
            args, variants = JOBS[job]
            tables.append(table(job, study(args, variants, ranks, options.seeds, options.steps)))
        if ranks.is_rank_0:
            publish(
                "\n\n".join([header(ranks, options.seeds, options.steps), *tables]), "precision_numerics", options.write
            )


def header(ranks: Ranks, seeds: int, steps: int) -> str:
    """Return a line with the settings, the device and the versions."""
    device = torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
    return (
        f"{seeds} seeds, {steps} steps each, {ranks.world_size} ranks on {device}, torch {torch.__version__}, "
        f"Python {platform.python_version()}:"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    exit_process(0)
