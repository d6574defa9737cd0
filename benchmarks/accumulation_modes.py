"""Communication, memory and rounding errors of the accumulation modes, measured on a small Llama under HSDP.

    torchrun --nproc-per-node 4 benchmarks/accumulation_modes.py --write docs/verification/numerics.md

Collectives and their bytes are counted in a real step of 4 microbatches. Gradient memory and peak memory are those of
live tensors, and are compared with the planner's prediction. The error of a gradient is relative to a reference: the
sum in fp64 of the microbatches' gradients, each reduced in fp32. So the error is only that of accumulation and
reduction. Times are not measured, because processes of one machine do not have the speed of a network. The script
prints a table, and writes it between the markers of a Markdown file.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from publishing import markdown_table, publish
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_launch.config.job import JobConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.process import exit_process
from titan_launch.data.sources import Batch
from titan_launch.distributed.mesh import build_mesh
from titan_launch.distributed.process_group import Ranks, process_group
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.metrics.memory import track
from titan_launch.metrics.traffic import count_collectives
from titan_launch.models.build import build_model
from titan_launch.models.init import initialize
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.plan.communication import Traffic
from titan_launch.plan.job import configured_choice
from titan_launch.plan.layout import plan_layout
from titan_launch.plan.memory.ledger import Category, Ledger, StepPoint
from titan_launch.trace.recorder import recorded_engine
from titan_launch.train.model import plan_precision, shard_model
from titan_launch.train.step import forward_backward

FEW, MANY = 4, 64
"""Numbers of microbatches in a step."""

MODES = {
    "`immediate`": GradientAccumulationConfig(mode="immediate"),
    "`deferred_all_reduce`": GradientAccumulationConfig(mode="deferred_all_reduce"),
    "`deferred`": GradientAccumulationConfig(mode="deferred"),
    "`immediate`, unsharded parameters": GradientAccumulationConfig(mode="immediate", keep_params_unsharded=True),
    "`deferred`, unsharded parameters": GradientAccumulationConfig(mode="deferred", keep_params_unsharded=True),
}


@dataclass(frozen=True)
class Figures:
    """Measurements of one mode, and the planner's predictions."""

    traffic: Traffic
    planned_traffic: Traffic
    held_bytes: int
    """Bytes of gradients between the first microbatch and the second."""

    peak_bytes: int
    planned_peak_bytes: int
    errors: dict[tuple[str, int], float]
    """Relative error of the gradient, by reduce dtype and number of microbatches."""


def predict(accumulation: GradientAccumulationConfig, world_size: int) -> tuple[int, Traffic]:
    """Return the planner's predictions for one mode: peak memory in bytes, and traffic. The process must have no
    process group."""
    config = job(accumulation, FEW, "float32", world_size)
    layout = plan_layout(config.parallelism, config.training, world_size)
    engine, choice = recorded_engine(config, layout, "cpu"), configured_choice(config)
    return engine(choice).peak_bytes, engine.traffic(choice)


def measure(accumulation: GradientAccumulationConfig, ranks: Ranks, planned: tuple[int, Traffic]) -> Figures:
    """Measure one mode. `planned`: result of `predict`."""
    config = job(accumulation, FEW, "float32", ranks.world_size)
    model, batches = sharded(config, ranks), microbatches(config, ranks, FEW)
    with count_collectives(model) as count:
        run_step(model, accumulation, batches)
    model.zero_grad()
    ledger = Ledger()
    ledger.enter(StepPoint(0, "forward", ""))
    held: list[int] = []
    with track(model, ledger):
        ledger.allocate(optimizer_bytes(model), Category.OPTIMIZER)
        run_step(model, accumulation, batches, lambda: held.append(gradient_bytes(ledger)))
        peak = ledger.footprint().peak_bytes
    errors = {
        (dtype, number): gradient_error(accumulation, number, dtype, ranks)
        for dtype in ("float32", "bfloat16")
        for number in (FEW, MANY)
    }
    planned_peak, planned_traffic = planned
    return Figures(count.traffic, planned_traffic, held[0], peak, planned_peak, errors)


def job(accumulation: GradientAccumulationConfig, number: int, reduce_dtype: str, world_size: int) -> JobConfig:
    """Return the job: a small Llama in bf16 on two replicas, with `number` microbatches of two sequences per rank."""
    return JobConfig.model_validate(
        {
            "model": {"args": {"dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 384}},
            "training": {"seq_len": 64, "local_batch_size": 2, "global_batch_size": 2 * number * world_size},
            "precision": {"reduce_dtype": reduce_dtype},
            "parallelism": {"data_parallel_replicate_degree": 2},
            "gradient_accumulation": accumulation.model_dump(),
        }
    )


def sharded(config: JobConfig, ranks: Ranks) -> nn.Module:
    """Return the job's wrapped model, with the initial values of seed 0."""
    layout = plan_layout(config.parallelism, config.training, ranks.world_size)
    built = build_model(config.model, config.training.seq_len)
    model = shard_model(config, built, plan_precision(config, built), build_mesh(layout, ranks.device.type))
    model.to_empty(device=ranks.device)
    initialize(model, built.initializer, 0, ranks.device)
    return model


def microbatches(config: JobConfig, ranks: Ranks, number: int) -> list[Batch]:
    """Return microbatches of random tokens, which differ between ranks."""
    generator = torch.Generator().manual_seed(ranks.rank)
    shape = (2, config.training.seq_len + 1)
    tokens = (torch.randint(0, 320, shape, generator=generator).to(ranks.device) for _ in range(number))
    return [Batch(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


def run_step(
    model: nn.Module,
    accumulation: GradientAccumulationConfig,
    batches: list[Batch],
    after_first: Callable[[], None] | None = None,
    share: float = 1.0,
) -> None:
    """Run forward and backward over all microbatches. `share`: the part of a step that they are."""
    strategy = Accumulation(accumulation)
    targets_of_all = sum(batch.targets.numel() for batch in batches) * torch.distributed.get_world_size()
    valid = torch.tensor(targets_of_all / share, device=batches[0].inputs.device)
    for index, microbatch in enumerate(batches):
        strategy.begin_microbatch(model, is_last=index == len(batches) - 1)
        forward_backward(model, microbatch, valid.device, lambda: valid, CrossEntropy())
        if index == 0 and after_first is not None:
            after_first()


def gradient_error(accumulation: GradientAccumulationConfig, number: int, reduce_dtype: str, ranks: Ranks) -> float:
    """Return |found - exact| / |exact| over all parameters and all ranks' shards."""
    config = job(accumulation, number, reduce_dtype, ranks.world_size)
    model, batches = sharded(config, ranks), microbatches(config, ranks, number)
    run_step(model, accumulation, batches)
    found = [gradient.double() for gradient in local_gradients(model)]
    exact = [torch.zeros_like(gradient) for gradient in found]
    alone = job(MODES["`immediate`"], number, "float32", ranks.world_size)
    model = sharded(alone, ranks)
    for batch in batches:
        model.zero_grad()
        run_step(model, alone.gradient_accumulation, [batch], share=1 / number)
        for total, gradient in zip(exact, local_gradients(model), strict=True):
            total += gradient
    sums = torch.tensor(
        [
            sum(float((a - b).square().sum()) for a, b in zip(found, exact, strict=True)),
            sum(float(b.square().sum()) for b in exact),
        ],
        dtype=torch.float64,
    )
    torch.distributed.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return this rank's shards of the gradients."""
    gradients = [parameter.grad for parameter in model.parameters()]
    return [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]


def optimizer_bytes(model: nn.Module) -> int:
    """Return the bytes of AdamW's two moments on this rank."""
    return 2 * sum(p.to_local().nbytes for p in model.parameters() if isinstance(p, DTensor))


def gradient_bytes(ledger: Ledger) -> int:
    """Return the bytes of live gradients, sharded and unsharded."""
    return ledger.live[Category.GRADIENTS] + ledger.live[Category.UNSHARDED_GRADIENTS]


def table(figures: dict[str, Figures]) -> str:
    """Return a Markdown table with one row for each mode."""
    columns = ["mode", "all-gathers", "reduce-scatters", "all-reduces", "gradients held, KiB", "peak, MiB", "predicted"]
    columns += [f"error, {name}, N = {number}" for name in ("fp32", "bf16") for number in (FEW, MANY)]
    rows = [columns]
    for name, found in figures.items():
        if found.traffic != found.planned_traffic:
            raise RuntimeError(f"{name}: measured {found.traffic}, planned {found.planned_traffic}")
        calls = found.traffic.collectives
        cells = [
            name,
            traffic_cell(calls.all_gathers, found.traffic.all_gather_bytes),
            traffic_cell(calls.reduce_scatters, found.traffic.reduce_scatter_bytes),
            traffic_cell(calls.all_reduces, found.traffic.all_reduce_bytes),
            f"{found.held_bytes / 2**10:,.0f}",
            f"{found.peak_bytes / 2**20:.3f}",
            f"{found.planned_peak_bytes / 2**20:.3f}",
            *(f"{error:.0e}" for error in found.errors.values()),
        ]
        rows.append(cells)
    return markdown_table(rows)


def traffic_cell(calls: int, num_bytes: int) -> str:
    """Return the number of calls and their bytes as text."""
    return f"{calls} ({num_bytes / 2**20:.2f} MiB)"


def main() -> None:
    """Measure on the ranks that torchrun has started, and write the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--write", type=Path, help="Markdown file with the markers")
    options = parser.parse_args()
    planned = {name: predict(accumulation, int(os.environ["WORLD_SIZE"])) for name, accumulation in MODES.items()}
    with process_group("cpu", timeout_seconds=600) as ranks:
        figures = {name: measure(accumulation, ranks, planned[name]) for name, accumulation in MODES.items()}
        if ranks.is_rank_0:
            machine = (
                f"{ranks.world_size} ranks (2 replicas x {ranks.world_size // 2} shards) on {os.cpu_count()} cores"
            )
            versions = f"torch {torch.__version__}, Python {platform.python_version()}"
            publish(f"{machine}, {versions}:\n\n{table(figures)}", "accumulation_modes", options.write)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
    exit_process(0)
