"""Training processes that are signalled, killed and started again by `launch`, for real."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import model_source, read_metrics, run_job, tiny_job

REPO = Path(__file__).parent.parent

STEPS = 40


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    tmp_path.joinpath("slow_model.py").write_text(
        model_source(in_forward='time.sleep(float(os.environ.get("SECONDS_PER_FORWARD", "0")))')
    )
    return tiny_job(
        tmp_path,
        model={"name": "slow_model:Model"},
        training={"steps": STEPS},
        checkpoint={"enable": True, "interval": 5, "keep_latest": 3},
    ) | {"model": {"name": "slow_model:Model"}}


@contextmanager
def launched(job: dict[str, Any], *options: str) -> Iterator[subprocess.Popen[str]]:
    """`launch` with a job whose steps take long enough to be interrupted."""
    folder = Path(job["job"]["dump_folder"])
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_launch", "launch", "--config", str(path), *options],
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "SECONDS_PER_FORWARD": "0.03"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            for pid in ranks_of(process):
                os.kill(pid, signal.SIGKILL)
            process.kill()
            process.wait()


def run_here(job: dict[str, Any]) -> dict[str, Tensor]:
    """The same job in a rank of the tests, without pauses."""
    sys.path.insert(0, job["job"]["dump_folder"])
    return run_job(job)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return [int(pid) for pid in found]


def wait_for(is_so: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 180
    while not is_so():
        assert time.monotonic() < deadline and process.poll() is None, (process.kill(), process.communicate())
        time.sleep(0.02)


def steps_done(folder: Path) -> int:
    path = folder / "tiny" / "metrics.jsonl"
    return int(read_metrics(folder)[-1]["step"]) if path.exists() and path.read_text().endswith("\n") else 0


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def test_a_killed_rank_and_a_signal_leave_no_trace_in_the_result(job: dict[str, Any], tmp_path: Path) -> None:
    expected = run_ranks(run_here, 2, {**job, "job": {**job["job"], "name": "whole"}})
    with launched(job, "--nproc-per-node", "2", "--max-restarts", "1") as process:
        wait_for(lambda: steps_done(tmp_path) >= 7, process)
        first_ranks = ranks_of(process)
        os.kill(first_ranks[1], signal.SIGKILL)
        wait_for(lambda: len(set(ranks_of(process)) - set(first_ranks)) == 2, process)
        killed_after = steps_done(tmp_path)  # they go back to a checkpoint before
        wait_for(lambda: steps_done(tmp_path) >= killed_after + 3, process)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0
    stopped = int(read_metrics(tmp_path)[-1]["step"])
    assert output.count("SIGTERM: the run ends after this step") == 1  # not when the ranks beside the killed one ended
    assert f"stopped by SIGTERM after step {stopped} of {STEPS}, which is saved; to resume, " in output.splitlines()[-1]
    assert "killed by SIGKILL" in errors and "starting all ranks again: restart 1 of at most 1" in errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    for whole, went_on in zip(expected, run_ranks(run_here, 2, job), strict=True):
        assert_equal(whole, went_on)
    assert [report["step"] for report in read_metrics(tmp_path)] == list(range(1, STEPS + 1))


def test_a_lost_host_leaves_the_others_to_finish_the_run(job: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(run_here, 1, {**job, "job": {**job["job"], "name": "whole"}})
    soon = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"  # to see that a host is gone
    options = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "1", "--rdzv-backend", "c10d"]
    options += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "hosts", "--rdzv-conf", soon]
    with launched(job, *options, "--rdzv-conf", f"{soon},is_host=1") as stays:
        with launched(job, *options, "--rdzv-conf", f"{soon},is_host=0") as goes:
            wait_for(lambda: steps_done(tmp_path) >= 7, stays)
            for pid in (*ranks_of(goes), goes.pid):
                os.kill(pid, signal.SIGKILL)
            goes.communicate(timeout=60)
        output, errors = stays.communicate(timeout=90)
    assert stays.returncode == 0, errors
    assert "2 on each of 2 ranks" in output or "1 on each of 2 ranks x 2 microbatches" in output
    assert "1 on each of 1 rank" in output
    reports, whole = read_metrics(tmp_path), read_metrics(tmp_path, "whole")
    assert [report["train/samples_seen"] for report in reports] == [report["train/samples_seen"] for report in whole]
    losses, expected = ([report["train/loss"] for report in run] for run in (reports, whole))
    assert losses == pytest.approx(expected, rel=1e-5)
