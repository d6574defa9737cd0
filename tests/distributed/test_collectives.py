"""Collectives: the functional all-gather of CPU tensors gathers as PyTorch's does, without the collective that corrupts
memory, and ranks wait for slow actions of rank 0."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Shard, distribute_tensor
from torch.profiler import ProfilerActivity, profile

from tests.distributed import run_ranks
from tests.train.jobs import this_mesh
from titan_launch.core.errors import UserError
from titan_launch.distributed.collectives import on_rank_0_slowly
from titan_launch.distributed.process_group import set_timeouts

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64)


def gather(x: Tensor) -> Tensor:
    """All-gather a tensor of shape [n, ...] to [ranks * n, ...]."""
    functional, group = torch.ops._c10d_functional, dist.distributed_c10d._get_default_group()
    return functional.wait_tensor(functional.all_gather_into_tensor(x, group.size(), group.group_name))


def gather_all_dtypes() -> list[tuple[Tensor, Tensor]]:
    """All-gather each dtype and shape with PyTorch's operator and with its replacement, and compare."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    numbers = torch.randint(0, 100, (3, 2, 5), generator=generator)
    inputs = [numbers.to(dtype) for dtype in DTYPES] + [numbers[:1, 0, 0], numbers[0, 0]]
    expected = [gather(x) for x in inputs]
    this_mesh()
    return [(gather(x), y) for x, y in zip(inputs, expected, strict=True)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_all_gather_returns_the_result_of_pytorchs_operator(ranks: int) -> None:
    for results in run_ranks(gather_all_dtypes, ranks):
        for gathered, expected in results:
            assert gathered.dtype == expected.dtype
            assert torch.equal(gathered, expected)


def collectives_of_all_gathers() -> set[str]:
    """Return the c10d operators of a functional all-gather, and of the all-gather of a DTensor."""
    mesh = this_mesh().ranks
    full = torch.arange(12.0).view(4, 3)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        gather(full)
        assert torch.equal(sharded.full_tensor(), full)
    return {event.key for event in profiled.key_averages() if event.key.startswith("c10d::")}


def test_no_all_gather_uses_the_collective_that_corrupts_memory() -> None:
    for operators in run_ranks(collectives_of_all_gathers, 2):
        assert operators == {"c10d::_allgather_base_"}


def gather_with_several_in_flight() -> None:
    """Run 10,000 all-gathers, 8 at a time: PyTorch's operator crashed a process after 3,000 to 510,000 of them."""
    this_mesh()
    functional, group = torch.ops._c10d_functional, dist.distributed_c10d._get_default_group()
    x = torch.ones(1, 65)
    for _ in range(1250):
        for gathered in [functional.all_gather_into_tensor(x, 1, group.group_name) for _ in range(8)]:
            functional.wait_tensor(gathered)


@pytest.mark.slow  # usually passes without the workaround, too; benchmarks/memory_check.py repeats it
def test_many_all_gathers_do_not_corrupt_memory() -> None:
    run_ranks(gather_with_several_in_flight, 1)


def wait_for_rank_0() -> tuple[str, str]:
    """Wait for an action that takes longer than the timeout of collectives, then for one that fails. Return the result
    of the first, and the error of the second."""
    set_timeouts(1)

    def act() -> str:
        time.sleep(2)
        return f"done by rank {dist.get_rank()}"

    def fail() -> None:
        raise UserError("failed")

    done = on_rank_0_slowly(act)
    with pytest.raises(UserError) as caught:
        on_rank_0_slowly(fail)
    return done, str(caught.value)


def test_ranks_wait_for_rank_0_longer_than_the_timeout_of_collectives() -> None:
    assert run_ranks(wait_for_rank_0, 2) == [("done by rank 0", "failed")] * 2
