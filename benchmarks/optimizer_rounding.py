"""Effect of bfloat16 storage on small updates, with nearest rounding, stochastic rounding or fp32 master weights.

    python benchmarks/optimizer_rounding.py --write docs/verification/numerics.md

A Llama of a million parameters learns the source of Python's standard library. Every variant starts from the same
parameters and sees the same samples. The variants differ only in the dtypes of stored tensors: all computation is in
fp32. The learning rate falls to a hundredth of its peak. The script prints a table, and writes it between the markers
of a Markdown file.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from publishing import markdown_table, publish
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_launch.config.job import JobConfig
from titan_launch.config.optimizers import GroupSettings, GroupSizes, ShardSize
from titan_launch.core.process import exit_process
from titan_launch.distributed.process_group import Ranks, process_group
from titan_launch.distributed.random_state import seed_everything
from titan_launch.plan.memory.ledger import state_bytes
from titan_launch.train.build import build_run
from titan_launch.train.loop import train_one_step, validation_scalars
from titan_launch.train.run import Run

LAST_STEPS = 20
"""Number of steps at the end over which the training loss is averaged."""

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp32": ("float32", {}),
    "fp32, moments in bf16, nearest": ("float32", {"state_dtype": "bfloat16"}),
    "fp32, moments in bf16, stochastic": ("float32", {"state_dtype": "bfloat16", "rounding": "stochastic"}),
    "bf16, nearest": ("bfloat16", {}),
    "bf16, moments in fp32, nearest": ("bfloat16", {"state_dtype": "float32"}),
    "bf16, stochastic": ("bfloat16", {"rounding": "stochastic"}),
    "bf16, fp32 masters and moments": ("bfloat16", {"master_weights": True, "state_dtype": "float32"}),
}
"""Storage dtype of the parameters and keys of `[optimizer]`, by name of the variant."""


def job_of(storage: str, optimizer: dict[str, Any], seed: int, steps: int, lr: float, folder: str) -> JobConfig:
    """Return the job of a variant."""
    size = {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 384, "vocab_size": 257}
    text = {"kind": "text", "path": "python-stdlib"}
    return JobConfig.model_validate(
        {
            "job": {"name": "rounding", "dump_folder": folder},
            "model": {"args": size},
            "data": {**text, "split": "train"},
            "training": {"seq_len": 64, "local_batch_size": 8, "global_batch_size": 8, "steps": steps, "seed": seed},
            "precision": {"storage_dtype": storage, "param_dtype": "float32"},
            "optimizer": {"lr": lr, "beta2": 0.999, **optimizer},
            "lr_scheduler": {"kind": "cosine", "warmup_steps": steps // 20, "min_lr_factor": 0.01},
            "validation": {"freq": steps, "max_samples": 64, "data": {**text, "split": "validation"}},
            "metrics": {"enable_tensorboard": False},
            "debug": {"audit_precision": False},
            "checkpoint": {"save_last": False},
        }
    )


def full_parameters(run: Run) -> list[Tensor]:
    """Return unsharded copies of all parameters."""
    parameters = run.model.parameters()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in parameters]


def bytes_per_parameter(run: Run) -> float:
    """Return the bytes of parameters, gradients and optimizer state, divided by the number of parameters."""
    parameters = list(run.model.parameters())
    sizes = [ShardSize(tuple(p.shape), p.numel(), str(p.dtype).removeprefix("torch.")) for p in parameters]
    state = state_bytes(run.config.optimizer, [GroupSizes(GroupSettings("AdamW", 1.0, 0.1), sizes)])
    return (state + sum(2 * p.numel() * p.element_size() for p in parameters)) / sum(p.numel() for p in parameters)


def study(ranks: Ranks, seeds: int, steps: int, lr: float) -> dict[str, dict[str, list[float]]]:
    """Train every variant with every seed. Return, by variant and name of the figure, one value per seed."""
    figures: dict[str, dict[str, list[float]]] = {}
    for seed in range(seeds):
        for name, (storage, optimizer) in VARIANTS.items():
            seed_everything(seed, deterministic=False)
            with ExitStack() as stack:
                folder = stack.enter_context(tempfile.TemporaryDirectory())
                run = build_run(job_of(storage, optimizer, seed, steps, lr, folder), ranks, stack)
                losses = [train_one_step(run).loss_sum.item() for _ in range(steps - 1)]
                before = full_parameters(run)
                losses.append(train_one_step(run).loss_sum.item())
                changed = sum(int((a != b).sum()) for a, b in zip(before, full_parameters(run), strict=True))
                found = {
                    "bytes": bytes_per_parameter(run),
                    "training": statistics.mean(losses[-LAST_STEPS:]),
                    "validation": validation_scalars(run)["validation/loss"],
                    "changed": changed / sum(p.numel() for p in before),
                }
            for key, value in found.items():
                figures.setdefault(name, {}).setdefault(key, []).append(value)
    return figures


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    """Return a Markdown table with one row for each variant. Ranges are over the seeds."""
    reference = next(iter(figures.values()))
    rows = [
        [
            "storage",
            "bytes per parameter",
            "training loss",
            "minus fp32",
            "validation loss",
            "minus fp32",
            "changed in last step",
        ]
    ]
    for name, found in figures.items():
        row = [name, f"{found['bytes'][0]:.0f}"]
        for key in ("training", "validation"):
            apart = [value - other for value, other in zip(found[key], reference[key], strict=True)]
            row += [f"{statistics.mean(found[key]):.4f}", f"{min(apart):+.4f} to {max(apart):+.4f}"]
        rows.append([*row, f"{statistics.mean(found['changed']):.1%} of parameters"])
    return markdown_table(rows, texts=1)


def main() -> None:
    """Run the study on one rank, and write its table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    options = parser.parse_args()
    with process_group("auto", timeout_seconds=600) as ranks:
        figures = study(ranks, options.seeds, options.steps, options.lr)
        device = (
            torch.cuda.get_device_name(ranks.device) if ranks.device.type == "cuda" else f"{os.cpu_count()} CPU cores"
        )
        header = (
            f"{options.seeds} seeds, {options.steps} steps, learning rate {options.lr:g}, on {device}, "
            f"torch {torch.__version__}, Python {platform.python_version()}:"
        )
        publish(f"{header}\n\n{table(figures)}", "optimizer_rounding", options.write)


if __name__ == "__main__":
    main()
    exit_process(0)
