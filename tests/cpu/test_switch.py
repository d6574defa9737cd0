from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import run_ranks
from tests.train.jobs import read_metrics, run_job, tiny_job
from titan_launch.cpu import blocked_attention, overlapped_all_reduce, switch
from titan_launch.train import build


def train_with_and_without_speedups(folder: Path) -> dict[str, int]:
    """Run a job on two replicas twice. Return how often each speedup was used by the run with speedups."""
    used: Counter[str] = Counter()

    def counted(inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            used[inner.__name__] += 1
            return inner(*args)

        return call

    patch = pytest.MonkeyPatch()  # the process ends with the test
    for owner in (blocked_attention, switch):
        patch.setattr(owner, "lengths", lambda: {torch.float32: range(16, 17)})
    for owner, name in (
        (blocked_attention, "attention"),
        (overlapped_all_reduce._PendingAllReduces, "add"),
        (switch, "keep_freed_memory"),
    ):
        patch.setattr(owner, name, counted(getattr(owner, name)))
    replicas = {"data_parallel_replicate_degree": 2}
    run_job(tiny_job(folder, job={"name": "fast"}, parallelism=replicas))
    patch.setattr(build, "cpu_speedups", lambda *_: nullcontext())
    used_when_on = dict(used)
    run_job(tiny_job(folder, job={"name": "plain"}, parallelism=replicas))
    assert used == used_when_on
    return used_when_on


def test_training_without_the_cpu_speedups_gives_the_same_losses(tmp_path: Path) -> None:
    for used in run_ranks(train_with_and_without_speedups, 2, tmp_path):
        assert used.keys() == {"attention", "add", "keep_freed_memory"} and used["keep_freed_memory"] == 1
    fast, plain = (read_metrics(tmp_path, name) for name in ("fast", "plain"))
    for name in ("train/loss", "train/grad_norm"):
        assert [step[name] for step in fast] == pytest.approx([step[name] for step in plain], rel=1e-5)
