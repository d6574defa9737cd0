"""The attempt of a start, and the agent process that started the ranks."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

from tests.distributed import run_ranks
from titan_launch.train.run_folder.attempt import AgentProcess, Attempt, Launch, parse_launch, this_attempt
from titan_launch.train.run_folder.folder import new_attempt_folder


def attempt_under_torchrun(rank_folder: str) -> Attempt:
    """Return the attempt of a rank of torchrun, which gives each rank a file for its error."""
    environment = {"TORCHELASTIC_ERROR_FILE": f"{rank_folder}/attempt_0/0/error.json", "SLURM_JOB_ID": "5"}
    return this_attempt({**environment, "SLURM_RESTART_COUNT": "1"})


def test_an_attempt_is_the_same_on_all_ranks() -> None:
    first, second = run_ranks(attempt_under_torchrun, 2, "/tmp/torchelastic_a/none_b")
    assert first == second and len(first.agents) == 2  # each rank counts as the first of a host in this test
    assert (first.slurm_job, first.is_requeued) == ("5", True)
    assert {(agent.host, agent.folder) for agent in first.agents} == {
        (socket.gethostname(), "/tmp/torchelastic_a/none_b")
    }
    launch = Launch(first.agents, first.slurm_job, has_ended=False)
    assert parse_launch(launch.to_json().encode()) == launch
    assert run_ranks(this_attempt, 1, {}) == [Attempt()]


def test_an_agent_is_alive_until_its_process_ends_or_the_launch_has() -> None:
    pid = os.getpid()
    ticks = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    agent = AgentProcess(socket.gethostname(), "folder", pid, ticks)
    launch = Launch((agent,), None, has_ended=False)
    assert launch.agent_alive_here() == agent
    assert replace(launch, has_ended=True).agent_alive_here() is None
    for other in (replace(agent, started=ticks + 1), replace(agent, host="elsewhere"), replace(agent, started=None)):
        assert not other.is_alive_here()  # another process with the same number, another host, unknown


def test_attempts_are_numbered_consecutively(tmp_path: Path) -> None:
    assert new_attempt_folder(tmp_path) == tmp_path / "logs" / "attempt-1"
    for name in ("attempt-2", "attempt-10", "attempt-x"):
        (tmp_path / "logs" / name).mkdir(parents=True)
    assert new_attempt_folder(tmp_path) == tmp_path / "logs" / "attempt-11"
