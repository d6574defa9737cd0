"""Records in the run folder: configuration, launch, unit table, precision audit and proof of the layout. A resume reads
the configuration and the launch."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.resume_compatibility import KeyDifference, differences
from titan_launch.core.errors import ConfigError, Stopped, config_error, format_key
from titan_launch.core.files import read_regular, replace_text
from titan_launch.core.json_files import MOST_BYTES, JsonError, parse_as, reason_of
from titan_launch.core.signals import RESTART_STATUS
from titan_launch.plan.proof.certificate import Certificate
from titan_launch.train.run_folder.attempt import Attempt, Launch, parse_launch

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


def describe_difference(difference: KeyDifference) -> str:
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
    ConfigError if the file cannot be read, or is damaged."""
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
    except OSError as error:
        reason = f"{folder / name} cannot be read ({reason_of(error)}); choose another name"
        raise folder_error(config, reason) from None
    except (JsonError, ValidationError) as error:
        cause = error.errors()[0]["msg"] if isinstance(error, ValidationError) else reason_of(error)
        remedy = f"move {folder} away" if name == CONFIG_FILE else "delete it"
        raise folder_error(config, f"{folder / name} is damaged ({cause}); {remedy}, or choose another name") from None


def folder_error(config: JobConfig, reason: str) -> ConfigError:
    """Return the error for a run folder that the run cannot use. The error names the key `job.name`."""
    return config_error(("job", "name"), reason, config.job.name)
