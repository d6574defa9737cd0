"""Hang detection: reports of the ranks behind and of all stacks. Timeouts give the same reports."""

from __future__ import annotations

import json
import logging
import math
import pickle
import re
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d

from tests.distributed import run_command, run_ranks
from tests.train.jobs import run_job, this_rank, tiny_job
from titan_launch.config.job import JobConfig
from titan_launch.config.sections.run import CommConfig
from titan_launch.data.sources import Batch
from titan_launch.train.build import Surroundings, build_run
from titan_launch.train.health.watchdog import Watchdog, ranks_behind
from titan_launch.train.loop import fit
from titan_launch.train.run import Run

REPO = Path(__file__).parents[3]


def a_slow_disk(batches: Iterator[Batch], microbatches: int, seconds: float) -> Iterator[Batch]:
    for number, batch in enumerate(batches):
        if number == microbatches:
            time.sleep(seconds)
        yield batch


def train_with_a_slow_disk(job: dict[str, Any], seconds: float) -> list[str]:
    """Train while the last rank waits for its data in step 3. Return the log lines."""
    records: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("titan_launch.train.health.watchdog")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    config, ranks = JobConfig.model_validate(job), this_rank()
    with ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.comm, ranks))
        run: Run = build_run(config, ranks, stack, Surroundings(watchdog=watchdog))
        if ranks.rank == ranks.world_size - 1:
            run.batches.train._batches = a_slow_disk(
                run.batches.train._batches, 2 * run.job.layout.num_microbatches, seconds
            )
        fit(run)
    return records


def test_a_hang_names_the_rank_that_is_behind(tmp_path: Path) -> None:
    comm = {"hang_seconds": 1, "timeout_seconds": 60, "init_timeout_seconds": 1200}
    main, other = run_ranks(train_with_a_slow_disk, 2, tiny_job(tmp_path, comm=comm), 2.5)
    behind = "rank 1 is behind: it is in step 3 (loading data) while rank 0 is in step 3 (forward, backward"
    for records in (main, other):
        assert len([text for text in records if behind in text]) == 1
        assert any(text.startswith("this rank continues after a hang of ") for text in records)
    stacks = (tmp_path / "tiny" / "hangs" / "rank_1.txt").read_text()
    assert "in a_slow_disk" in stacks and "in _watch" in stacks  # all threads
    assert "in a_slow_disk" not in (tmp_path / "tiny" / "hangs" / "rank_0.txt").read_text()


MODEL_THAT_HANGS = """
import os, time
from torch import nn

class Model(nn.Sequential):
    calls = 0

    def forward(self, tokens):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            self.wait_for_ever()
        return super().forward(tokens)

    def wait_for_ever(self):
        time.sleep(600)

def build():
    return Model(nn.Embedding(61, 8), nn.Linear(8, 61))
"""


def launched(folder: Path, model: str, comm: dict[str, Any]) -> tuple[int, str]:
    """Train the model on two ranks to the end, with `launch`. Return the exit status, and what was reported."""
    (folder / "hanging.py").write_text(model)
    job = tiny_job(folder, comm=comm, debug={"audit_precision": False})
    job = {**job, "model": {"name": "hanging:build"}, "training": {**job["training"], "local_batch_size": 2}}
    (folder / "job.json").write_text(json.dumps(job))
    command = ["launch", "--nproc-per-node=2", "--config", "job.json"]
    status, _, reported = run_command(command, folder, environment={"PYTHONPATH": f"{folder}:{REPO}"})
    return status, reported


def test_a_timeout_ends_the_run_with_the_rank_that_was_behind(tmp_path: Path) -> None:
    status, error = launched(tmp_path, MODEL_THAT_HANGS, {"hang_seconds": 1, "timeout_seconds": 3})
    assert status == 1, error
    error = error[error.index("error: ") :]
    assert error.startswith("error: a collective took longer than comm.timeout_seconds: Timed out waiting 3000ms")
    assert "all ranks are in step 3 (forward, backward and update); rank 1 is behind: it started" in error
    assert error.count("\n") == 2  # there is no other error, and the rank that hung ended without a signal
    run = tmp_path / "tiny"
    assert "in wait_for_ever" in (run / "hangs" / "rank_1.txt").read_text()
    assert "and this rank hangs in step 3" in next(run.glob("logs/*/rank_1.log")).read_text()
    traces = {rank: pickle.loads((run / "flight_recorder" / f"rank_{rank}").read_bytes()) for rank in (0, 1)}
    assert len(traces[0]["entries"]) == len(traces[1]["entries"]) + 1
    for trace in traces.values():  # torchfrtrace needs these fields to compare ranks, and gloo does not write them
        assert {entry["process_group"][0] for entry in trace["entries"]} <= trace["pg_config"].keys()
        assert "[0, 1]" in {group["ranks"] for group in trace["pg_config"].values()}


@pytest.mark.slow
def test_a_rank_that_native_code_aborts_at_a_hang_is_reported_with_its_collective(tmp_path: Path) -> None:
    """NCCL's watchdog thread aborts a rank like this: rank 0 waits for rank 1, and is aborted after the report."""
    abort = 'if self.calls == 3 and os.environ["RANK"] == "0": threading.Timer(3, os.abort).start()'
    model = MODEL_THAT_HANGS.replace("self.calls += 1", f"self.calls += 1\n        {abort}")
    model = model.replace("import os, time", "import os, threading, time").replace(
        "time.sleep(600)", "time.sleep(5); os._exit(1)"
    )
    status, error = launched(tmp_path, model, {"hang_seconds": 1, "timeout_seconds": 60})
    assert status == 128 + signal.SIGABRT, error
    error = error[error.index("error: rank 0 was killed by SIGABRT: native code aborted the process") :]
    assert re.search(
        r"not finished: gloo:\w+ number \d+ of group \w+: started by rank 0, not by rank 1 "
        r"\(last started on rank 1: gloo:",
        error,
    )
    assert error.endswith(f"; see the flight records and stacks in {tmp_path / 'tiny'}\n")


def hang_within_a_phase(comm: CommConfig) -> str:
    """Put two ranks into the same phase, in which one rank has started a collective and the other has not."""
    ranks = this_rank()
    with Watchdog(comm, ranks) as watchdog:
        watchdog.end_warm_up()
        watchdog.enter("forward, backward and update", 7)
        work = dist.barrier(async_op=True) if ranks.rank == 0 else None
        time.sleep(2.5)
        sentence = ranks_behind(watchdog._board, watchdog._now)  # type: ignore[arg-type]
    (work or dist.barrier(async_op=True)).wait()
    return sentence


@pytest.mark.slow
def test_the_rank_behind_within_a_phase_is_named(tmp_path: Path) -> None:
    """The started collectives of the ranks tell which rank is behind."""
    sentence, _ = run_ranks(hang_within_a_phase, 2, CommConfig(timeout_seconds=60, hang_seconds=1))
    assert sentence.startswith("all ranks are in step 7 (forward, backward and update); rank 1 is behind: it started")


def timeouts() -> set[float]:
    """Return the timeouts of all groups, in seconds."""
    groups = distributed_c10d._world.pg_map
    return {group._get_backend(this_rank().device).options._timeout.total_seconds() for group in groups}


def timeouts_of_groups(job: dict[str, Any]) -> tuple[set[float], set[float]]:
    """Return the timeouts of all groups while a run is built and at its end."""
    with ExitStack() as stack:
        run = build_run(JobConfig.model_validate(job), this_rank(), stack)
        before = timeouts()
        fit(run)
        return before, timeouts()


def test_every_group_has_the_timeout_of_the_job(tmp_path: Path) -> None:
    comm = {"timeout_seconds": 77, "init_timeout_seconds": 99}
    norm = {"args": {"norm": "batchnorm"}}
    parallelism = {"data_parallel_replicate_degree": 2}
    statistics = {"statistics": "synchronized"}
    job = tiny_job(tmp_path, model=norm, comm=comm, parallelism=parallelism, batchnorm=statistics)
    assert run_ranks(timeouts_of_groups, 2, job) == [({99.0}, {77.0})] * 2


def timeouts_after_a_rollback(job: dict[str, Any]) -> list[float]:
    """Train three steps. Resume, and go back to the checkpoint after the first step of the resumed run. Return the
    timeout of collectives in each forward after the rollback."""
    run_job(job)
    found: list[float] = []
    with ExitStack() as stack:
        longer = {**job, "training": {**job["training"], "steps": 5}}
        run = build_run(JobConfig.model_validate(longer), this_rank(), stack)

        def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            if run.progress.rollbacks:
                found.append(min(timeouts()))  # the group that checkpoints use has a longer timeout
            return output * (1.0 if run.progress.rollbacks else math.inf)

        run.model.get_submodule("tok_embeddings").register_forward_hook(hook)
        fit(run)
    return found


def test_a_rollback_in_the_first_step_of_a_process_keeps_its_timeout(tmp_path: Path) -> None:
    job = tiny_job(
        tmp_path,
        training={"steps": 3, "local_batch_size": 4},
        comm={"timeout_seconds": 77, "init_timeout_seconds": 99},
        debug={"on_nonfinite": "skip", "max_skips": 1, "on_repeated_skips": "rollback"},
        checkpoint={"enable": True},
        lr_scheduler={"kind": "constant"},
    )
    assert run_ranks(timeouts_after_a_rollback, 1, job) == [[99.0, 77.0]]


@pytest.mark.parametrize(("hang_seconds", "limits"), [(None, (90, 30, 90)), (20, (60, 20, 60))])
def test_time_limits_of_the_phases_of_a_run(hang_seconds: int | None, limits: tuple[int, int, int]) -> None:
    comm = CommConfig(timeout_seconds=60, init_timeout_seconds=180, hang_seconds=hang_seconds)
    assert run_ranks(limits_of_phases, 1, comm) == [limits]


def limits_of_phases(comm: CommConfig) -> tuple[float, ...]:
    watchdog = Watchdog(comm, this_rank())
    first = watchdog._now.limit_s
    watchdog.end_warm_up()
    watchdog.enter("loading data", 2)
    usual = watchdog._now.limit_s
    watchdog.enter("saving a checkpoint", 2, is_slow=True)
    return first, usual, watchdog._now.limit_s
