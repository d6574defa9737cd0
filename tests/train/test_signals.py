"""A signal ends a run after its step, with everything saved."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import read_metrics, run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.errors import Stopped, format_key
from titan_launch.train.build import build_run
from titan_launch.train.loop import ending, fit
from titan_launch.train.signals import StopRequest

VALIDATION = {"freq": 1, "max_samples": 4, "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 8}}


class StopAt(StopRequest):
    """A signal that arrives on the last rank only, when it is asked for the nth time: before the first step is one."""

    def __init__(self, nth: int):
        super().__init__()
        self.asked, self.nth = 0, nth

    @property
    def signal(self) -> int:
        """15 from then on."""
        self.asked += 1
        has_come = self.asked >= self.nth and dist.get_rank() == dist.get_world_size() - 1
        return int(signal.SIGTERM) if has_come else 0

    @signal.setter
    def signal(self, number: int) -> None:
        pass


def run_stopped(job: dict[str, Any], nth: int) -> str:
    """Train until the signal; how the run says that it ended."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack, format_key, StopAt(nth))
        fit(run)
        return ending(run)


def stop_and_go_on(folder: Path, parallelism: dict[str, Any]) -> None:
    whole = run_job(tiny_job(folder, job={"name": "whole"}, parallelism=parallelism))
    sections: dict[str, Any] = {"validation": VALIDATION, "parallelism": parallelism}
    job = tiny_job(folder, checkpoint={"enable": True, "interval": 100}, **sections)
    assert run_stopped(job, nth=1) == "stopped by SIGTERM before step 1 of 4; to go on, run the same command again"
    text = run_stopped(job, nth=3)
    assert text == "stopped by SIGTERM after step 2 of 4, which is saved; to resume, run the same command again"
    assert_equal(run_job(job), whole)


@pytest.mark.parametrize("parallelism", [{}, {"pipeline_parallel_degree": 2}], ids=["shards", "stages"])
def test_all_ranks_stop_at_the_step_in_which_one_is_signalled_and_go_on_exactly(
    tmp_path: Path, parallelism: dict[str, Any]
) -> None:
    run_ranks(stop_and_go_on, 2, tmp_path, parallelism)
    reports = read_metrics(tmp_path)
    assert [report["step"] for report in reports] == [1, 2, 3, 4]
    assert ["validation/loss" in report for report in reports] == [True, False, True, True]


def stop_between_checkpoints(folder: Path) -> None:
    sections: dict[str, Any] = {"model": {"args": {"norm": "batchnorm"}}, "checkpoint": {"enable": True, "interval": 3}}
    whole = run_job(tiny_job(folder, job={"name": "whole"}, **sections))
    run_stopped(tiny_job(folder, **sections), nth=3)
    assert_equal(run_job(tiny_job(folder, **sections)), whole)


def test_a_stop_between_checkpoints_leaves_each_rank_its_own_statistics(tmp_path: Path) -> None:
    run_ranks(stop_between_checkpoints, 2, tmp_path)


def stop_without_checkpoints(folder: Path) -> None:
    with pytest.raises(Stopped, match=r"after step 1 of 4; checkpoint.enable is false: nothing was saved") as end:
        run_stopped(tiny_job(folder), nth=2)
    assert end.value.status == 128 + signal.SIGTERM


def test_a_run_that_saves_nothing_says_so_and_does_not_end_with_success(tmp_path: Path) -> None:
    run_ranks(stop_without_checkpoints, 1, tmp_path)


def stop_in_the_last_step(folder: Path) -> None:
    assert run_stopped(tiny_job(folder), nth=5).startswith("done: 4 steps")


def test_a_signal_in_the_last_step_changes_nothing(tmp_path: Path) -> None:
    run_ranks(stop_in_the_last_step, 1, tmp_path)
