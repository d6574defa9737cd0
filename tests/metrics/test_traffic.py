"""Collectives counted while they are called, and the seconds of communication that computation does not hide."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from tests.distributed import run_ranks
from tests.trace.traces import planned
from tests.train.jobs import planned_and_sharded, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.data.sources import Batch
from titan_launch.distributed.torch_private import parameter_group
from titan_launch.loss.cross_entropy import CrossEntropy
from titan_launch.metrics.traffic import Kernel, count_collectives, exposed_seconds
from titan_launch.optim.clip import clip_grad_norm
from titan_launch.parallel.fsdp import Accumulation
from titan_launch.plan.communication import Traffic
from titan_launch.plan.layout import plan_layout
from titan_launch.precision.observation import observe
from titan_launch.train.step import forward_backward


def job(mode: str, ranks: int, replicate: int) -> JobConfig:
    sections: dict[str, Any] = {
        "parallelism": {"data_parallel_replicate_degree": replicate},
        "gradient_accumulation": {"mode": mode},
        "training": {"global_batch_size": 3 * ranks},
    }
    return JobConfig.model_validate(tiny_job(Path("unused"), **sections))


def count(config: JobConfig) -> tuple[Traffic, Traffic, bool]:
    """Return the traffic of a step on this rank: counted alone, and counted beside the precision audit. The last value
    tells if FSDP2's own collectives are restored."""
    model, plan, layout = planned_and_sharded(config, config.training.seq_len)
    groups = [parameter_group(module) for module in model.modules() if isinstance(module, FSDPModule)]
    before = [vars(group).copy() for group in groups if group is not None]

    def step() -> None:
        strategy = Accumulation(config.gradient_accumulation)
        tokens, valid = torch.zeros(1, 16, dtype=torch.int64), torch.ones((), dtype=torch.int64)
        dist.all_reduce(valid)
        for index in range(layout.num_microbatches):
            strategy.begin_microbatch(model, is_last=index == layout.num_microbatches - 1)
            forward_backward(model, Batch(tokens, tokens), torch.device("cpu"), lambda: valid, CrossEntropy())
        clip_grad_norm(model.parameters(), 1.0)

    with count_collectives(model) as counted:
        step()
        alone = counted.take()
        with observe(model, plan):
            step()
        observed = counted.take()
    names = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
    after = [vars(group) for group in groups if group is not None]
    is_restored = all(a[name] is b[name] for a, b in zip(before, after, strict=True) for name in names)
    return alone, observed, is_restored


@pytest.mark.parametrize(
    ("mode", "ranks", "replicate"), [("immediate", 2, 1), ("deferred", 2, 2), ("deferred_all_reduce", 4, 2)]
)
def test_counted_traffic_is_the_planned_traffic(mode: str, ranks: int, replicate: int) -> None:
    config = job(mode, ranks, replicate)
    _, expected = planned(config, plan_layout(config.parallelism, config.training, ranks), "cpu")
    for alone, observed, is_restored in run_ranks(count, ranks, config):
        assert alone == observed == expected
        assert expected.collectives.total > 0 and is_restored


GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclKernel_ReduceScatter"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([], 0),
        ([("gemm", 0, 10)], 0),
        ([(GATHER, 5, 15)], 10),
        ([(GATHER, 0, 10), ("gemm", 0, 10)], 0),
        ([(GATHER, 0, 10), ("gemm", 3, 5)], 8),  # the gather is exposed before and after the product
        ([("gemm", 0, 4), (GATHER, 2, 10), ("add", 8, 20)], 4),
        ([(GATHER, 0, 10), (SCATTER, 5, 12)], 12),  # overlapping collectives count once
        ([(GATHER, 0, 10), ("gemm", 2, 6), ("add", 4, 5)], 6),  # one kernel is inside another
        ([(GATHER, 0, 2), ("gemm", 5, 6), (SCATTER, 8, 9)], 3),
        ([("Memcpy DtoD", 0, 3), (GATHER, 1, 4)], 1),
    ],
)
def test_exposed_time_is_the_time_in_which_only_nccl_runs(kernels: list[tuple[str, int, int]], expected: int) -> None:
    assert exposed_seconds(Kernel(*kernel) for kernel in kernels) == pytest.approx(expected / 1e9)
    assert exposed_seconds(Kernel(*kernel) for kernel in reversed(kernels)) == pytest.approx(expected / 1e9)


def test_exposed_time_of_random_kernels_equals_a_count_of_nanoseconds() -> None:
    generator = random.Random(0)
    for _ in range(50):
        names = generator.choices([GATHER, SCATTER, "gemm"], k=30)
        starts = [(name, generator.randrange(1000), generator.randrange(60)) for name in names]
        kernels = [Kernel(name, start, start + length) for name, start, length in starts]
        moments = [{k.communicates for k in kernels if k.start <= t < k.end} for t in range(1100)]
        assert exposed_seconds(kernels) == pytest.approx(moments.count({True}) / 1e9)
