"""Peak memory and time of a loss in chunks, for a vocabulary of 128,256 tokens.

    python benchmarks/chunked_loss.py --write docs/verification/planner.md

The first table is measured on one CPU rank: steps of a small Llama, in CPU time, which other processes disturb least.
The second table is predicted, for Llama 3 8B on GPUs.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from publishing import publish

from titan_launch.config.job import JobConfig
from titan_launch.distributed.process_group import Ranks
from titan_launch.plan.hardware import GIB, Kernels
from titan_launch.plan.job import configured_choice, with_unsharded_parameters
from titan_launch.plan.layout import plan_layout
from titan_launch.trace.recorder import recorded_engine
from titan_launch.train.build import build_run
from titan_launch.train.loop import due_now, report, train_one_step
from titan_launch.train.measure import MEASURED

VOCABULARY, CHUNKS = 128_256, (1, 4, 8, 16, 32)
BATCH, SEQ_LEN, STEPS = 2, 512, 7


def job_of(chunks: int, folder: str) -> JobConfig:
    """Return the job of a measurement."""
    job: dict[str, Any] = {
        "job": {"dump_folder": folder, "name": f"chunks_{chunks}", "device": "cpu"},
        "model": {
            "args": {
                "dim": 256,
                "n_layers": 1,
                "n_heads": 4,
                "n_kv_heads": 4,
                "hidden_dim": 512,
                "vocab_size": VOCABULARY,
            }
        },
        "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 64},
        "training": {"seq_len": SEQ_LEN, "local_batch_size": BATCH, "steps": STEPS},
        "loss": {"chunks": chunks},
        "precision": {"param_dtype": "float32"},
        "optimizer": {"name": "SGD"},
        "metrics": {"log_freq": 1, "enable_tensorboard": False},
        "debug": {"audit_precision": False},
        "checkpoint": {"save_last": False},
    }
    return JobConfig.model_validate(job)


def measure(config: JobConfig) -> tuple[float, float, float]:
    """Return measured peak memory in MiB, CPU seconds per step, and the loss of the last step."""
    times: list[float] = []
    seen: dict[str, float] = {}
    with ExitStack() as stack:
        run = build_run(config, Ranks(0, 1, torch.device("cpu")), stack)
        for _ in range(STEPS):
            began = time.process_time()
            train_one_step(run)
            times.append(time.process_time() - began)
            seen |= report(run, due_now(run))
    return seen[MEASURED] * GIB / 2**20, median(times[3:]), seen["train/loss"]


def predict(config: JobConfig, ranks: int, kernels: Kernels) -> float:
    """Return the predicted peak memory in GiB. The process must have no process group."""
    layout = plan_layout(config.parallelism, config.training, ranks)
    config = with_unsharded_parameters(config, layout)
    footprint = recorded_engine(config, layout, kernels)(configured_choice(config))
    return footprint.peak_bytes / GIB


def llama_8b(chunks: int, batch: int) -> JobConfig:
    """Return a job of Llama 3 8B."""
    return JobConfig.model_validate(
        {
            "model": {"flavor": "8B"},
            "training": {"seq_len": 8192, "local_batch_size": batch},
            "loss": {"chunks": chunks},
            "activation_checkpoint": {"mode": "full"},
        }
    )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = (1, 2, 4)
    of_8b = {(chunks, batch): predict(llama_8b(chunks, batch), 64, "cuda") for batch in batches for chunks in CHUNKS}
    lines = [
        "| `loss.chunks` | predicted peak MiB | measured peak MiB | CPU s per step | time | loss |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        jobs = {chunks: job_of(chunks, folder) for chunks in CHUNKS}
        predicted = {chunks: predict(job, 1, "cpu") * GIB / 2**20 for chunks, job in jobs.items()}
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rows = {chunks: measure(job) for chunks, job in jobs.items()}
    for chunks, (measured, seconds, loss) in rows.items():
        ratio = seconds / rows[1][1]
        lines.append(
            f"| {chunks} | {predicted[chunks]:.0f} | {measured:.0f} | {seconds:.2f} | {ratio:.2f} | {loss:.6f} |"
        )
    lines += [
        "",
        f"One CPU rank, fp32, SGD, {BATCH * SEQ_LEN} tokens, {VOCABULARY:,} classes, width 256, one block: almost all "
        f"of the step is the output layer. Whole logits are {BATCH * SEQ_LEN * VOCABULARY * 4 / 2**20:.0f} MiB.",
        "",
        f"| 8B on 64 GPUs, tokens of a microbatch | {' | '.join(f'chunks = {c}' for c in CHUNKS)} |",
        f"|---:|{'---:|' * len(CHUNKS)}",
    ]
    for batch in batches:
        cells = " | ".join(f"{of_8b[chunks, batch]:.1f}" for chunks in CHUNKS)
        lines.append(f"| {8192 * batch:,} | {cells} |")
    lines += ["", "Predicted peak of active memory in GiB; bf16 compute, full activation checkpointing."]
    publish("\n".join(lines), "chunked_loss", options.write)
    os._exit(0)  # gloo's threads can abort an interpreter that shuts down


if __name__ == "__main__":
    main()
