"""Launches and attempts. A launch starts all ranks once, and again after failures; each start is an attempt."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter

from titan_launch.core.json_files import parse_as
from titan_launch.core.signals import process_fields

_PREFIX = "attempt-"
_NUMBER = re.compile(rf"{_PREFIX}([1-9][0-9]{{0,8}})")


@dataclass(frozen=True)
class AgentProcess:
    """A torchrun process, which starts, monitors and restarts the ranks of one host."""

    host: str
    folder: str
    """torchrun's folder for the errors of its ranks, which identifies the launch: restarts use the same folder."""

    pid: Annotated[int, Field(ge=0, lt=2**31)]
    """Id of the parent process of the rank: torchrun, or a script between torchrun and the rank."""

    started: int | None
    """Start time of process `pid` in clock ticks since the boot of the host; None if unknown."""

    def is_alive_here(self) -> bool:
        """Return True if process `pid` runs on this host. A later process with the same id has another start time."""
        return self.started is not None and self.host == socket.gethostname() and self.started == _start_time(self.pid)


@dataclass(frozen=True)
class Attempt:
    """A start of all ranks of a run."""

    agents: tuple[AgentProcess, ...] = ()
    """torchrun processes that started the ranks; empty if torchrun did not start them."""

    slurm_job: str | None = None
    is_requeued: bool = False
    """True if Slurm has requeued `slurm_job`."""

    def continues(self, launch: Launch) -> bool:
        """Return True if this attempt restarts `launch`: both have at least one torchrun agent in common, or Slurm has
        requeued the same job."""
        # One agent is enough, because other hosts may be new (`--nnodes 1:2`). torchrun's restart counts are not
        # compared, because they differ between hosts.
        before = {(agent.host, agent.folder) for agent in launch.agents}
        by_torchrun = any((agent.host, agent.folder) in before for agent in self.agents)
        return by_torchrun or (self.is_requeued and self.slurm_job == launch.slurm_job)


@dataclass(frozen=True)
class Launch:
    """The last launch that wrote to a run folder, as `launch.json` records it."""

    agents: tuple[AgentProcess, ...]
    slurm_job: str | None
    has_ended: bool
    """True if the run was finished or stopped by a signal, so that nothing restarts it."""

    def to_json(self) -> str:
        """Return the launch as JSON text, which `parse_launch` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def agent_alive_here(self) -> AgentProcess | None:
        """Return an agent on this host that may restart the ranks, or None."""
        return None if self.has_ended else next((agent for agent in self.agents if agent.is_alive_here()), None)


_LAUNCH = TypeAdapter(Launch)


def parse_launch(text: bytes) -> Launch:
    """Parse the text of `Launch.to_json`. Raises JsonError for any other text."""
    return parse_as(_LAUNCH, text)


def this_attempt(environment: Mapping[str, str] = os.environ) -> Attempt:
    """Return the attempt to which this process belongs, equal on all ranks. Collective."""
    from titan_launch.distributed.collectives import on_all_ranks  # the rest of this module does not need torch

    found = on_all_ranks(lambda: _agent_of(environment))
    return Attempt(
        agents=tuple(agent for agent in found if agent is not None),
        slurm_job=environment.get("SLURM_JOB_ID"),
        is_requeued=int(environment.get("SLURM_RESTART_COUNT") or 0) > 0,
    )


def attempt_name(number: int) -> str:
    """Return the name of the log folder of an attempt."""
    return f"{_PREFIX}{number}"


def attempt_numbers(logs: Path) -> list[int]:
    """Return the numbers of the attempts in a folder of logs, which need not exist, in increasing order."""
    try:
        found = (_NUMBER.fullmatch(name) for name in os.listdir(logs))
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match)


def _agent_of(environment: Mapping[str, str]) -> AgentProcess | None:
    """Return the torchrun agent that started this rank. Return None if this rank is not the first rank of its host, or
    if torchrun did not start this rank."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or environment.get("LOCAL_RANK", "0") != "0":
        return None
    pid = os.getppid()
    folder = Path(error_file).parents[2]  # three levels above the error file of a rank
    return AgentProcess(socket.gethostname(), str(folder), pid, _start_time(pid))


def _start_time(pid: int) -> int | None:
    fields = process_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])  # a zombie cannot restart ranks
