"""Communication that computation does not hide, on made-up kernels."""

from __future__ import annotations

import random

import pytest

from titan_launch.metrics.traffic import Kernel, exposed_seconds

GATHER, SCATTER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclKernel_ReduceScatter"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ([], 0),
        ([("gemm", 0, 10)], 0),
        ([(GATHER, 5, 15)], 10),
        ([(GATHER, 0, 10), ("gemm", 0, 10)], 0),
        ([(GATHER, 0, 10), ("gemm", 3, 5)], 8),  # before and after
        ([("gemm", 0, 4), (GATHER, 2, 10), ("add", 8, 20)], 4),
        ([(GATHER, 0, 10), (SCATTER, 5, 12)], 12),  # two at once count once
        ([(GATHER, 0, 10), ("gemm", 2, 6), ("add", 4, 5)], 6),  # one kernel within another
        ([(GATHER, 0, 2), ("gemm", 5, 6), (SCATTER, 8, 9)], 3),
        ([("Memcpy DtoD", 0, 3), (GATHER, 1, 4)], 1),
    ],
)
def test_time_in_which_only_nccl_runs(kernels: list[tuple[str, int, int]], expected: int) -> None:
    assert exposed_seconds(Kernel(*kernel) for kernel in kernels) == pytest.approx(expected / 1e9)
    assert exposed_seconds(Kernel(*kernel) for kernel in reversed(kernels)) == pytest.approx(expected / 1e9)


def test_any_kernels_against_a_count_of_moments() -> None:
    generator = random.Random(0)
    for _ in range(50):
        names = generator.choices([GATHER, SCATTER, "gemm"], k=30)
        starts = [(name, generator.randrange(1000), generator.randrange(60)) for name in names]
        kernels = [Kernel(name, start, start + length) for name, start, length in starts]
        moments = [{k.communicates for k in kernels if k.start <= t < k.end} for t in range(1100)]
        assert exposed_seconds(kernels) == pytest.approx(moments.count({True}) / 1e9)
