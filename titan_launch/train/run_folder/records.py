"""What a run records of itself in its folder, and reads there when it goes on."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from pydantic import TypeAdapter, ValidationError

from titan_launch.config.job import JobConfig
from titan_launch.config.loading.load import dump_job
from titan_launch.config.loading.provenance import toml_value
from titan_launch.config.resume_compatibility import Difference, differences
from titan_launch.core.errors import config_error, format_key
from titan_launch.core.files import read_regular, replace_text
from titan_launch.train.run_folder.attempt import Attempt, Launch, launch_of, parse_launch

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
"""The complete configuration of the run, and the mark of a folder in which one has begun."""

LAUNCH_FILE = "launch.json"
"""The launch that wrote to the folder last."""

METRICS_FILE = "metrics.jsonl"
"""All reports."""

ROLLED_BACK_FILE = "metrics.rolled_back.jsonl"
"""Reports of steps before which the run went back to a checkpoint."""

AUDIT_FILE = "precision_audit.json"
"""Planned and observed dtypes of the first step."""

UNITS_FILE = "units.json"
"""The unit table."""

_SECTIONS = TypeAdapter(dict[str, dict[str, Any]])
"""What every version of the launcher records as a configuration."""


def record_run(folder: Path, config: JobConfig, attempt: Attempt, stack: ExitStack) -> None:
    """Write who runs here, and the resolved configuration, which can itself be passed as `--config`; once nothing else
    can go wrong: from now on a restart of this launch does not apply `checkpoint.load` again.

    Where the run goes on with another configuration than it had, the differences are logged. When `stack` is closed
    without an error, the launch is recorded as ended.
    """
    before = recorded_table(folder, config)
    replace_text(folder / LAUNCH_FILE, launch_of(attempt, has_ended=False).to_json())
    for difference in [] if before is None else differences(before, table_of(config)):
        _log.info("changed since the run began: %s", describe_difference(difference))
    replace_text(folder / CONFIG_FILE, dump_job(config))

    def end(kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None) -> None:
        if kind is None:
            with suppress(OSError):  # a full disk, at the very end: that the launch has ended shows without it
                replace_text(folder / LAUNCH_FILE, launch_of(attempt, has_ended=True).to_json())

    stack.push(end)


def record_units(folder: Path, units: list[dict[str, Any]]) -> None:
    """Write the unit table, as `titan_launch.plan.report.unit_table.describe_units` makes it."""
    replace_text(folder / UNITS_FILE, json.dumps(units, indent=2) + "\n")


def record_audit(folder: Path, audit: dict[str, Any]) -> None:
    """Write the dtypes that were planned and observed, as `titan_launch.precision.audit` describes them."""
    replace_text(folder / AUDIT_FILE, json.dumps(audit, indent=2) + "\n")


def describe_difference(difference: Difference) -> str:
    """A key that has another value than when the run began, in words."""
    was, now = ("unset" if v is None else toml_value(v) for v in (difference.was, difference.now))
    return f"{format_key(difference.key)} was {was}, is {now}"


def table_of(config: JobConfig) -> dict[str, Any]:
    """A configuration as it is recorded."""
    table: dict[str, Any] = json.loads(dump_job(config))
    return table


def recorded_table(folder: Path, config: JobConfig) -> dict[str, Any] | None:
    """Return the configuration of the run in a folder, or None where there is none; keys that are newer than the run
    have their defaults. Raises ConfigError where it is not a configuration at all."""
    path = folder / CONFIG_FILE
    with damage_explained(path, f"move {folder} away", config):
        try:
            saved = _SECTIONS.validate_json(read_regular(path))
        except FileNotFoundError:
            return None
    try:
        return table_of(JobConfig.model_validate(saved))
    except ValidationError:  # it has keys that there are no more
        return saved


def recorded_launch(folder: Path, config: JobConfig) -> Launch | None:
    """Return the launch that wrote to a folder last, or None where there is none. Raises ConfigError where the record
    cannot be read."""
    path = folder / LAUNCH_FILE
    with damage_explained(path, "delete it", config):
        try:
            return parse_launch(read_regular(path))
        except FileNotFoundError:
            return None


@contextmanager
def damage_explained(path: Path, remedy: str, config: JobConfig) -> Iterator[None]:
    """Raise ConfigError where a file of the run's folder cannot be read, or holds something else than a run writes."""
    try:
        yield
    except (OSError, ValidationError) as error:
        cause = error.strerror if isinstance(error, OSError) else error.errors()[0]["msg"]
        reason = f"{path} is damaged ({cause}); {remedy}, or choose another name"
        raise config_error(("job", "name"), reason, config.job.name) from None
