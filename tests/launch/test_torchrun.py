"""Training processes that are signalled, killed and restarted by `launch`."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from tests.distributed import run_ranks
from tests.tensors import assert_equal
from tests.train.jobs import model_source, read_metrics, run_job, tiny_job
from titan_launch.core.patches import environment, replaced
from titan_launch.core.signals import RESTART_SIGNAL, signals_handled
from titan_launch.launch.agent import ElasticAgent
from titan_launch.launch.torchrun import Stopping

REPO = Path(__file__).parents[2]

STEPS = 16
CANNOT_MAKE_NAMESPACES = 77
"""Exit status of scripts/two_hosts.sh."""


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    tmp_path.joinpath("slow_model.py").write_text(
        model_source(in_forward='time.sleep(float(os.environ.get("SECONDS_PER_FORWARD", "0")))')
    )
    return tiny_job(
        tmp_path,
        model={"name": "slow_model:Model"},
        training={"steps": STEPS},
        checkpoint={"enable": True, "interval": 3, "keep_latest": 3},
    ) | {"model": {"name": "slow_model:Model"}}


@contextmanager
def launched(job: dict[str, Any], *options: str) -> Iterator[subprocess.Popen[str]]:
    """Start `launch` with a job whose steps are slow enough to be interrupted."""
    folder = Path(job["job"]["dump_folder"])
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    process = subprocess.Popen(
        [sys.executable, "-m", "titan_launch", "launch", "--config", str(path), *options],
        cwd=REPO,
        env={
            **os.environ,
            "PYTHONPATH": str(folder),
            "OMP_NUM_THREADS": "1",
            "SECONDS_PER_FORWARD": "0.05",
            "TMPDIR": str(temporary_files(folder)),
        },
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


def temporary_files(folder: Path) -> Path:
    """Return the folder for temporary files that `launched` gives to its processes. Its path is longer than that of a
    Unix socket may be."""
    path = folder / ("temporary" * 10)
    path.mkdir(exist_ok=True)
    return path


def run_here(job: dict[str, Any]) -> dict[str, Tensor]:
    """Run the same job in a rank of the tests, without pauses."""
    sys.path.insert(0, job["job"]["dump_folder"])
    return run_job(job)


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    return sorted(int(pid) for pid in found)


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


@pytest.mark.parametrize("async_mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_killed_rank_and_a_signal_do_not_change_the_result(
    job: dict[str, Any], async_mode: str, tmp_path: Path
) -> None:
    expected = run_ranks(run_here, 2, {**job, "job": {**job["job"], "name": "whole"}})
    options = ("--nproc-per-node", "2", "--max-restarts", "1", f"--checkpoint.async_mode={async_mode}")
    with launched(job, *options) as process:
        wait_for(lambda: steps_done(tmp_path) >= 4, process)
        first_ranks = ranks_of(process)
        os.kill(first_ranks[1], signal.SIGKILL)
        wait_for(lambda: len(set(ranks_of(process)) - set(first_ranks)) == 2, process)
        killed_after = steps_done(tmp_path)  # the ranks resume from an earlier checkpoint
        wait_for(lambda: steps_done(tmp_path) >= killed_after + 1, process)
        ranks = ranks_of(process)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, output + errors
    stopped = int(read_metrics(tmp_path)[-1]["step"])
    # The restart prints no such line, although torchrun then stops the other ranks with SIGTERM.
    assert output.count("SIGTERM: the run ends after this step") == 1
    ended = f"stopped by SIGTERM after step {stopped} of {STEPS}; a checkpoint of step {stopped} is saved; to resume, "
    assert ended in output.splitlines()[-1]
    assert "killed by SIGKILL" in errors and "starting all ranks again: restart 1 of at most 1" in errors
    assert "Traceback" not in errors
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    left = [path.name for path in temporary_files(tmp_path).iterdir()]
    assert [name for name in left if not name.startswith("torchinductor_")] == []  # PyTorch's cache of kernels
    for whole, went_on in zip(expected, run_ranks(run_here, 2, job), strict=True):
        assert_equal(whole, went_on)
    assert [report["step"] for report in read_metrics(tmp_path)] == list(range(1, STEPS + 1))


@pytest.mark.slow
def test_a_lost_host_leaves_the_others_to_finish_the_run(job: dict[str, Any], tmp_path: Path) -> None:
    run_ranks(run_here, 1, {**job, "job": {**job["job"], "name": "whole"}})
    soon = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=1"  # so that a lost host is noticed early
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
    assert " = 2 ranks x " in output and " = 1 rank x " in output
    reports, whole = read_metrics(tmp_path), read_metrics(tmp_path, "whole")
    assert [report["train/samples_seen"] for report in reports] == [report["train/samples_seen"] for report in whole]
    losses, expected = ([report["train/loss"] for report in run] for run in (reports, whole))
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_host_without_others_ends_after_the_timeout_of_the_rendezvous(job: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"127.0.0.1:{server.getsockname()[1]}"
    options = ("--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-conf=join_timeout=1")
    with launched(job, *options) as process:
        _, reported = process.communicate(timeout=60)
    expected = "error: fewer hosts than --nnodes joined before the timeout; start the missing hosts, or set --rdzv-conf"
    assert (process.returncode, reported.strip()) == (1, f"{expected} join_timeout=SECONDS")


def test_a_rank_that_is_killed_while_it_starts_ends_the_launch_in_seconds(job: dict[str, Any]) -> None:
    with launched(job, "--nproc-per-node", "2") as process:
        wait_for(lambda: len(ranks_of(process)) == 2, process)
        os.kill(ranks_of(process)[0], signal.SIGKILL)  # rank 1 waits for rank 0 at the rendezvous, or will
        _, errors = process.communicate(timeout=60)  # a rendezvous waits for minutes
    assert process.returncode == 128 + signal.SIGKILL
    assert errors.splitlines() == [
        "error: rank 0 was killed by SIGKILL; the usual cause is that the host ran out of memory"
    ]


def build_agent(folder: Path, stopping: Stopping, code: str) -> ElasticAgent:
    """Return the agent of a rank that runs Python code."""
    options = RendezvousParameters("c10d", "localhost:0", "hosts", 1, 1, is_host=True)
    rendezvous = get_rendezvous_handler(options)
    spec = WorkerSpec("rank", 1, rendezvous, entrypoint=sys.executable, args=("-u", "-c", code))
    return ElasticAgent(spec, DefaultLogsSpecs(str(folder)), stopping=stopping, on_failure=lambda _: None)


def start_signalled(folder: Path) -> WorkerState:
    """Signal an agent while it starts a rank that waits for a signal. Return the state of the rank at its end."""
    stopping = Stopping(timeout_s=10, rank_folders=str(folder))
    agent = build_agent(folder, stopping, "import signal; signal.alarm(60); signal.sigwait([signal.SIGTERM])")
    start = LocalElasticAgent._start_workers

    def start_and_signal(agent: LocalElasticAgent, group: WorkerGroup) -> dict[int, Any]:
        ids: dict[int, Any] = start(agent, group)
        os.kill(os.getpid(), signal.SIGTERM)
        while stopping.signal is None:  # until the thread that handles signals has run
            time.sleep(0.01)
        return ids

    with (
        environment(TORCHELASTIC_SIGNALS_TO_HANDLE="SIGQUIT"),  # as `launch` does
        signals_handled(stopping.on_request),
        replaced(LocalElasticAgent, "_start_workers", start_and_signal),
    ):
        return agent.run().state


def test_a_signal_while_ranks_are_started_reaches_these_ranks(tmp_path: Path) -> None:
    assert run_ranks(start_signalled, 1, tmp_path) == [WorkerState.SUCCEEDED]


def runs_with_a_new_host(folder: Path, number: int | None) -> int:
    """Let an agent notice a new host, after the signal `number` if it is not None. Return how often its rank ran."""
    runs = folder / "runs"
    stopping = Stopping(timeout_s=10, rank_folders=str(folder))
    stopping.signal = number
    # Without a signal, the first run lasts until the agent ends it.
    code = f"""
import signal, time
signal.pthread_sigmask(signal.SIG_UNBLOCK, [{RESTART_SIGNAL:d}])  # the agent starts ranks with blocked signals
with open({str(runs)!r}, "a+") as file:
    print(file=file, flush=True)
    file.seek(0)
    time.sleep(60 if {number is None} and len(file.readlines()) == 1 else 1)
"""
    agent = build_agent(folder, stopping, code)
    waiting = iter([1])
    with replaced(agent._worker_group.spec.rdzv_handler, "num_nodes_waiting", lambda: next(waiting, 0)):
        assert agent.run().state == WorkerState.SUCCEEDED
    return len(runs.read_text().splitlines())


@pytest.mark.parametrize(("number", "runs"), [(None, 2), (signal.SIGTERM, 1)])
def test_a_new_host_restarts_the_ranks_only_before_a_signal(number: int | None, runs: int, tmp_path: Path) -> None:
    assert run_ranks(runs_with_a_new_host, 1, tmp_path, number) == [runs]


PARENTS = (
    ("titan_launch", "launch", "--nproc-per-node", "2"),
    ("torch.distributed.run", "--nproc-per-node", "2", "-m", "titan_launch"),
)


def processes_with(variable: str) -> list[int]:
    """Return the processes that have this environment variable."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process belongs to another user, or has just ended
            if f"{variable}=".encode() in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def left_of_killed_parent(parent: tuple[str, ...], job: Path, seconds: float, since_first_rank: bool) -> int:
    """Kill the parent of two ranks some seconds after its start, or after that of its first rank. Return the number of
    processes that are still alive 60 s later, or 0 as soon as all have ended."""
    variable = f"KILLED_PARENT_{uuid.uuid4().hex}"
    command = [sys.executable, "-m", *parent, "--config", str(job), f"--job.name={variable}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary_files(job.parent)), variable: "1"}
    with subprocess.Popen(
        command, cwd=REPO, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while since_first_rank and len(processes_with(variable)) < 2:
            time.sleep(0.01)
        time.sleep(seconds)
        process.kill()
    deadline = time.monotonic() + 60
    while (left := processes_with(variable)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return len(left)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("instants", "since_first_rank"),
    [
        ((0.7,), True),
        pytest.param([random.Random(5).uniform(0, 4) for _ in range(10)], False, marks=pytest.mark.slow),
        pytest.param([random.Random(6).uniform(0, 4) for _ in range(10)], True, marks=pytest.mark.slow),
    ],
    ids=["some", "since start", "since the first rank"],
)
def test_a_killed_parent_leaves_no_process(tmp_path: Path, instants: Sequence[float], since_first_rank: bool) -> None:
    """The killed parents are `launch` and torchrun in turn."""
    path = tmp_path / "job.json"
    path.write_text(json.dumps(tiny_job(tmp_path, training={"steps": 10_000}, metrics={"log_freq": 1000})))
    with ThreadPoolExecutor(2) as executor:
        left = [
            executor.submit(left_of_killed_parent, PARENTS[number % 2], path, seconds, since_first_rank)
            for number, seconds in enumerate(instants)
        ]
    assert [future.result() for future in left] == [0] * len(instants)


@pytest.mark.multi_node
@pytest.mark.timeout(900)
def test_a_run_continues_after_the_loss_and_the_return_of_a_host(tmp_path: Path) -> None:
    """Every step has the loss of an uninterrupted run on one host. The script describes the steps of the test."""
    script = [str(REPO / "scripts" / "two_hosts.sh"), str(tmp_path)]
    result = subprocess.run(script, capture_output=True, text=True)
    if result.returncode == CANNOT_MAKE_NAMESPACES:
        pytest.skip(result.stderr.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    ranks = re.findall(r"^  ranks: +(\d)", result.stdout, flags=re.MULTILINE)
    assert ranks == ["2", "1", "2"], result.stdout
    assert "starting all ranks again: restart 1" in result.stdout and "they differ by" in result.stdout
