"""Which launch the ranks belong to: whether they are started for the first time, or again after a failure."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from titan_launch.core.signals import process_fields

_PREFIX = "attempt-"


@dataclass(frozen=True)
class AgentProcess:
    """A process of torchrun, which starts the ranks of one host, watches them, and starts them again."""

    host: str
    folder: str
    """What torchrun made for the messages of its workers: another one for every launch, the same for its restarts."""

    pid: int
    """The process that started this one: torchrun, or a script between torchrun and the rank."""

    started: int | None
    """When that process was started, in clock ticks since the host was; None where the system does not tell."""

    def is_same(self, other: AgentProcess) -> bool:
        """Whether both are one process of torchrun."""
        return (self.host, self.folder) == (other.host, other.folder)

    def is_alive_here(self) -> bool:
        """Whether it is a process of this host that is still there. (A number alone may be another process by now.)"""
        return self.started is not None and self.host == socket.gethostname() and self.started == _start_time(self.pid)


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of a run."""

    agents: tuple[AgentProcess, ...] = ()
    """The processes of torchrun that started the ranks; none where something else did."""

    slurm_job: str | None = None
    is_requeued: bool = False
    """Whether Slurm has run this job before."""

    def continues(self, launch: Launch) -> bool:
        """Whether this is a restart of a launch: by one of its agents, or of the same job by Slurm.

        One agent that is the same is enough: with `--nnodes 1:2` the others may be new, and the counts of restarts
        that torchrun hands to its workers differ between hosts.
        """
        by_torchrun = any(agent.is_same(other) for agent in self.agents for other in launch.agents)
        return by_torchrun or (self.is_requeued and self.slurm_job == launch.slurm_job)


@dataclass(frozen=True)
class Launch:
    """The launch that wrote to a run's folder last, as the folder records it."""

    agents: tuple[AgentProcess, ...]
    slurm_job: str | None
    has_ended: bool
    """Whether the run has come to an orderly end, after which nothing starts it again."""

    def to_json(self) -> str:
        """As text; `parse_launch` reads it."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def agent_alive_here(self) -> AgentProcess | None:
        """The agent on this host that may yet start the ranks again."""
        return None if self.has_ended else next((agent for agent in self.agents if agent.is_alive_here()), None)


_LAUNCH = TypeAdapter(Launch)


def parse_launch(text: bytes) -> Launch:
    """Read what `Launch.to_json` wrote. Raises ValidationError where it is something else."""
    return _LAUNCH.validate_json(text, strict=True)


def launch_of(attempt: Attempt, has_ended: bool) -> Launch:
    """The launch that an attempt belongs to."""
    return Launch(attempt.agents, attempt.slurm_job, has_ended)


def this_attempt(environment: Mapping[str, str] = os.environ) -> Attempt:
    """Return the start that this process is part of, the same on all ranks; collective."""
    from titan_launch.distributed.collectives import (
        on_all_ranks,  # the rest of this module answers before torch is imported
    )

    found = on_all_ranks(lambda: _agent_of(environment))
    return Attempt(
        agents=tuple(agent for agent in found if agent is not None),
        slurm_job=environment.get("SLURM_JOB_ID"),
        is_requeued=int(environment.get("SLURM_RESTART_COUNT") or 0) > 0,
    )


def attempt_name(number: int) -> str:
    """The name of an attempt's folder of logs."""
    return f"{_PREFIX}{number}"


def next_attempt(logs: Path) -> int:
    """The number after the highest there is in a folder of logs, which need not exist; 1 for the first."""
    numbers = [entry.name.removeprefix(_PREFIX) for entry in logs.glob(f"{_PREFIX}*")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0) + 1


def _agent_of(environment: Mapping[str, str]) -> AgentProcess | None:
    """This rank's agent, told by the first rank of each host. torchrun names a file for each rank's error, three levels
    below the folder that it made for this launch."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or environment.get("LOCAL_RANK", "0") != "0":
        return None
    pid = os.getppid()
    return AgentProcess(socket.gethostname(), str(Path(error_file).parents[2]), pid, _start_time(pid))


def _start_time(pid: int) -> int | None:
    fields = process_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])  # a zombie starts nothing any more
