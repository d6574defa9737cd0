"""A signal stops a run after the current step, with everything saved."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import read_metrics, run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.core.errors import Stopped
from titan_launch.core.signals import RESTART_SIGNAL, RESTART_STATUS
from titan_launch.train.build import Surroundings, build_run
from titan_launch.train.health.coordination import StopRequest
from titan_launch.train.loop import ending, fit

VALIDATION = {"freq": 1, "max_samples": 4, "data": {"kind": "synthetic", "vocab_size": 61, "num_samples": 8}}


class StopAt(StopRequest):
    """A stop request whose signal arrives on the last rank only, at the nth query. The first query is before the first
    step."""

    def __init__(self, nth: int, number: int):
        super().__init__()
        self.asked, self.nth, self.number = 0, nth, number

    @property
    def signal(self) -> int:
        """Return the number of the signal from the nth query on."""
        self.asked += 1
        has_come = self.asked >= self.nth and dist.get_rank() == dist.get_world_size() - 1
        return self.number if has_come else 0

    @signal.setter
    def signal(self, number: int) -> None:
        pass


def run_stopped(job: dict[str, Any], nth: int, number: int = signal.SIGTERM) -> str:
    """Train until the signal. Return the last message of the run."""
    with ExitStack() as stack:
        process = Surroundings(stop=StopAt(nth, int(number)))
        run = build_run(JobConfig.model_validate(job), this_rank(), stack, process)
        assert not multiprocessing.active_children(), "these jobs need no process that writes checkpoints"
        fit(run)
        return ending(run)


def stop_and_go_on(folder: Path, parallelism: dict[str, Any]) -> None:
    whole = run_job(tiny_job(folder, job={"name": "whole"}, parallelism=parallelism))
    sections: dict[str, Any] = {"validation": VALIDATION, "parallelism": parallelism}
    job = tiny_job(folder, checkpoint={"enable": True, "interval": 100}, **sections)
    assert run_stopped(job, nth=1) == "stopped by SIGTERM before step 1 of 4; to go on, run the same command again"
    text = run_stopped(job, nth=3)
    stopped = "stopped by SIGTERM after step 2 of 4; a checkpoint of step 2 is saved"
    assert text == f"{stopped}; to resume, run the same command again"
    assert_equal(run_job(job), whole)


@pytest.mark.parametrize(
    "parallelism",
    [{}, pytest.param({"pipeline_parallel_degree": 2}, marks=pytest.mark.slow)],
    ids=["shards", "stages"],
)
def test_all_ranks_stop_at_the_step_in_which_one_is_signalled_and_resume_exactly(
    tmp_path: Path, parallelism: dict[str, Any]
) -> None:
    run_ranks(stop_and_go_on, 2, tmp_path, parallelism)
    reports = read_metrics(tmp_path)
    assert [report["step"] for report in reports] == [1, 2, 3, 4]
    assert ["validation/loss" in report for report in reports] == [True, False, True, True]


def stop_between_checkpoints(folder: Path) -> None:
    sections: dict[str, Any] = {"model": {"args": {"norm": "batchnorm"}}, "checkpoint": {"enable": True, "interval": 2}}
    sections["training"] = {"steps": 3}
    whole = run_job(tiny_job(folder, job={"name": "whole"}, **sections))
    run_stopped(tiny_job(folder, **sections), nth=2)
    assert_equal(run_job(tiny_job(folder, **sections)), whole)


@pytest.mark.slow
def test_a_stop_between_checkpoints_leaves_each_rank_its_own_statistics(tmp_path: Path) -> None:
    run_ranks(stop_between_checkpoints, 2, tmp_path)


def stop_and_enable_checkpoints(folder: Path) -> None:
    batchnorm: dict[str, Any] = {"model": {"args": {"norm": "batchnorm"}}}  # each rank has its own statistics
    only_last = {"save_last": True, "interval": 2, "async_mode": "process"}  # the last two need enable
    whole = run_job(tiny_job(folder, job={"name": "whole"}, checkpoint=only_last, **batchnorm))
    text = run_stopped(tiny_job(folder, checkpoint=only_last, **batchnorm), nth=1)
    assert text == "stopped by SIGTERM before step 1 of 4; to go on, run the same command again"
    text = run_stopped(tiny_job(folder, checkpoint=only_last, **batchnorm), nth=3)
    again = "run the same command again with --checkpoint.enable=true"
    assert text == f"stopped by SIGTERM after step 2 of 4; a checkpoint of step 2 is saved; to resume, {again}"
    assert [path.name for path in (folder / "tiny/checkpoints").glob("step-*")] == ["step-2"]
    enabled = {**only_last, "enable": True, "async_mode": "thread"}  # a process takes seconds to start
    assert_equal(run_job(tiny_job(folder, checkpoint=enabled, **batchnorm)), whole)


@pytest.mark.slow
def test_a_stopped_run_without_checkpoints_can_be_resumed_with_checkpoints(tmp_path: Path) -> None:
    run_ranks(stop_and_enable_checkpoints, 2, tmp_path)


def stop_without_saving(folder: Path) -> None:
    with pytest.raises(
        Stopped, match=r"after step 1 of 4; nothing was saved \(checkpoint.enable and .* false\)"
    ) as end:
        run_stopped(tiny_job(folder), nth=2)
    assert end.value.status == 128 + signal.SIGTERM


def stop_for_more_hosts(folder: Path) -> None:
    with pytest.raises(Stopped) as end:
        run_stopped(tiny_job(folder, checkpoint={"save_last": True}), nth=2, number=RESTART_SIGNAL)
    assert end.value.status == RESTART_STATUS and not (folder / "tiny/checkpoints").exists()


@pytest.mark.parametrize("stop", [stop_without_saving, stop_for_more_hosts])
def test_a_run_that_saves_nothing_reports_it_and_does_not_exit_with_status_0(
    stop: Callable[[Path], None], tmp_path: Path
) -> None:
    run_ranks(stop, 1, tmp_path)


@pytest.mark.parametrize("saves", [False, True])
def test_a_signal_in_the_last_step_changes_nothing(saves: bool, tmp_path: Path) -> None:
    job = tiny_job(tmp_path, training={"steps": 1}, checkpoint={"save_last": saves})
    (text,) = run_ranks(run_stopped, 1, job, 2)
    saved = f"the result is {tmp_path}/tiny/checkpoints/step-1"
    nothing = "nothing was saved (checkpoint.enable and checkpoint.save_last are false)"
    assert text == f"done: 1 steps; {saved if saves else f'{nothing}; the reports are in {tmp_path}/tiny'}"
    assert (tmp_path / "tiny/checkpoints").exists() == saves
