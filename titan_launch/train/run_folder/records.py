"""Records in the run folder: configuration, launch, unit table, precision audit and proof of the layout. A resume reads
the configuration and the launch. A launch starts all ranks once, and again after failures; each start is an attempt."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.resume_compatibility import Difference, differences
from titan_launch.core.errors import ConfigError, Stopped, config_error, format_key
from titan_launch.core.files import read_regular, replace_text
from titan_launch.core.json_files import MOST_BYTES, JsonError, parse_as, reason_of
from titan_launch.core.signals import RESTART_STATUS, process_fields
from titan_launch.plan.proof.certificate import Certificate

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
"""Complete configuration of the run. A folder with this file is a run folder."""

LAUNCH_FILE = "launch.json"
"""Last launch that wrote to the folder."""

ROLLED_BACK_FILE = "metrics.rolled_back.jsonl"
"""Metrics of steps that a rollback to a checkpoint has undone."""

AUDIT_FILE = "precision_audit.json"
"""Planned and observed dtypes of the first step."""

PROOF_FILE = "proof.json"
"""Certificate of the layout (result of `titan-launch prove`), if one was found when the run started."""

UNITS_FILE = "units.json"
"""Table of the FSDP2 units."""

_SECTIONS = TypeAdapter(dict[str, dict[str, Any]])
"""Type of `config.json` in every version of the launcher: tables by section."""

_ATTEMPT_PREFIX = "attempt-"
_ATTEMPT_NAME = re.compile(rf"{_ATTEMPT_PREFIX}([1-9][0-9]{{0,8}})")


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


def record_run(config: JobConfig, attempt: Attempt, stack: ExitStack) -> None:
    """Write `launch.json` and `config.json` to the run folder. `config.json` contains `config`, and can be passed as
    `--config`. Log the keys whose values differ from the previous `config.json`.

    Call this function after the checkpoint or the weights have been loaded. From then on, a restart of this launch
    loads the newest checkpoint instead of `checkpoint.load` (see `effective_load`). The launch is recorded as ended
    when `stack` is closed without an error, or after a signal has stopped the run.
    """
    folder, before = config.job.run_folder, recorded_table(config)
    launch = Launch(attempt.agents, attempt.slurm_job, has_ended=False)
    replace_text(folder / LAUNCH_FILE, launch.to_json())
    for difference in [] if before is None else differences(before, table_of(config)):
        _log.info("changed since the run began: %s", describe_difference(difference))
    replace_text(folder / CONFIG_FILE, dump_job(config))

    def end(_: object, error: BaseException | None, __: object) -> None:
        if error is None or (isinstance(error, Stopped) and error.status != RESTART_STATUS):
            with suppress(OSError):  # a full disk must not fail a finished run
                replace_text(folder / LAUNCH_FILE, replace(launch, has_ended=True).to_json())

    stack.push(end)


def record_table(path: Path, table: Any) -> None:
    """Write a value that JSON can represent to a file of the run folder."""
    replace_text(path, json.dumps(table, indent=2) + "\n")


def record_proof(folder: Path, certificate: Certificate | None) -> None:
    """Write the certificate of the layout. If it is None, remove the certificate of an earlier start."""
    if certificate is None:
        (folder / PROOF_FILE).unlink(missing_ok=True)
    else:
        replace_text(folder / PROOF_FILE, certificate.dumps())


def describe_difference(difference: Difference) -> str:
    """Return `key was a, is b` for a key whose value has changed."""
    was, now = ("unset" if v is None else toml_value(v) for v in (difference.was, difference.now))
    return f"{format_key(difference.key)} was {was}, is {now}"


def table_of(config: JobConfig) -> dict[str, Any]:
    """Return a configuration as the dict that `config.json` contains."""
    table: dict[str, Any] = json.loads(dump_job(config))
    return table


def recorded_table(config: JobConfig) -> dict[str, Any] | None:
    """Return the configuration in the run folder's `config.json`; None without that file. A key that the file lacks
    gets its default. If the file is no longer a valid job, for example because this version has fewer keys, its content
    is returned unchanged. Raises ConfigError if the file cannot be read, or is not a configuration."""
    with damage_explained(CONFIG_FILE, config):
        try:
            saved = parse_as(_SECTIONS, read_regular(config.job.run_folder / CONFIG_FILE, MOST_BYTES))
        except FileNotFoundError:
            return None
    try:
        return table_of(JobConfig.model_validate(saved))
    except ValidationError:
        return saved


def recorded_launch(config: JobConfig) -> Launch | None:
    """Return the last launch that wrote to the run folder, from `launch.json`; None without that file. Raises
    ConfigError if the file cannot be read."""
    with damage_explained(LAUNCH_FILE, config):
        try:
            return parse_launch(read_regular(config.job.run_folder / LAUNCH_FILE, MOST_BYTES))
        except FileNotFoundError:
            return None


@contextmanager
def damage_explained(name: str, config: JobConfig) -> Iterator[None]:
    """Raise ConfigError if the block fails to read or parse a file of the run folder. `name`: CONFIG_FILE or
    LAUNCH_FILE."""
    folder = config.job.run_folder
    try:
        yield
    except (OSError, JsonError, ValidationError) as error:
        cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else reason_of(error)
        remedy = f"move {folder} away" if name == CONFIG_FILE else "delete it"
        raise folder_error(config, f"{folder / name} is damaged ({cause}); {remedy}, or choose another name") from None


def folder_error(config: JobConfig, reason: str) -> ConfigError:
    """Return the error for a run folder that the run cannot use. The error names the key `job.name`."""
    return config_error(("job", "name"), reason, config.job.name)


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
    return f"{_ATTEMPT_PREFIX}{number}"


def attempt_numbers(logs: Path) -> list[int]:
    """Return the numbers of the attempts in a folder of logs, which need not exist, in increasing order."""
    try:
        found = (_ATTEMPT_NAME.fullmatch(name) for name in os.listdir(logs))
    except OSError:
        return []
    return sorted(int(match[1]) for match in found if match)


def _agent_of(environment: Mapping[str, str]) -> AgentProcess | None:
    """Return the torchrun agent that started this rank. Return None if this is not the first rank of its host, or if
    torchrun did not start it."""
    error_file = environment.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None or environment.get("LOCAL_RANK", "0") != "0":
        return None
    pid = os.getppid()
    folder = Path(error_file).parents[2]  # three levels above the error file of a rank
    return AgentProcess(socket.gethostname(), str(folder), pid, _start_time(pid))


def _start_time(pid: int) -> int | None:
    fields = process_fields(pid)
    return None if fields is None or fields[0] in "ZX" else int(fields[19])  # a zombie cannot restart ranks
