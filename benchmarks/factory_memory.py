"""Peak host memory of each rank while a model of a factory is built and sharded.

    torchrun --nproc-per-node 4 benchmarks/factory_memory.py

The factory makes 208 MB of values. The script prints, for each rank, by how much its resident memory grew at most from
the call of the factory until every rank has its shards, and the sum over the ranks at the end. The shards are a part of
both: a run on CPUs keeps them in the same memory.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from titan_launch.config.job import JobConfig
from titan_launch.core.process import exit_process
from titan_launch.distributed.mesh import build_mesh
from titan_launch.distributed.process_group import process_group
from titan_launch.models.init import allocate, initialize
from titan_launch.plan.layout import plan_layout
from titan_launch.train.model import build_on_all_ranks, plan_precision, shard_model

SIZE_MB = 16 * 1800 * 1800 * 4 / 1e6


class Net(nn.Module):
    """Sixteen matrices of 13 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(1800, 1800, bias=False) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the blocks."""
        for block in self.blocks:
            x = block(x)
        return x


def main() -> int:
    """Build the model on this rank, and print the memory of all ranks on rank 0."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    config = JobConfig.model_validate({"model": {"name": "benchmarks.factory_memory:Net"}, "job": {"device": "cpu"}})
    with process_group("cpu", 300) as ranks:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
        before = _status("VmRSS")
        built = build_on_all_ranks(config, ranks)
        mesh = build_mesh(plan_layout(config.parallelism, config.training, ranks.world_size), "cpu")
        model = shard_model(config, built, plan_precision(config, built), mesh)
        allocate(model, ranks.device)
        initialize(model, built.initializer, config.training.seed, ranks.device)
        grown: list[float] = [0.0] * ranks.world_size
        dist.all_gather_object(grown, _status("VmHWM") - before)
        if ranks.is_rank_0:
            peaks = ", ".join(f"{megabytes:.0f}" for megabytes in grown)
            print(f"{ranks.world_size} ranks, {SIZE_MB:.0f} MB of values: peaks {peaks} MB, sum {sum(grown):.0f} MB")
    return 0


def _status(field: str) -> float:
    """Return a field of this process's status in MB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    exit_process(main())
