"""The folder that holds everything a run writes."""

from __future__ import annotations

import fcntl
import itertools
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from titan_launch.checkpoint.manager import complete_steps
from titan_launch.config.activation_checkpoint import ActivationCheckpointConfig
from titan_launch.config.explain import toml_value
from titan_launch.config.gradient_accumulation import GradientAccumulationConfig
from titan_launch.config.job import JobConfig
from titan_launch.config.load import dump_job
from titan_launch.errors import KeyPath, config_error, format_key
from titan_launch.plan.choices import Choice

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
"""The complete configuration of the run, and the mark of a run's folder."""

AUDIT_FILE = "precision_audit.json"
"""Planned and observed dtypes of the first step."""


def prepare_run_folder(folder: Path, config: JobConfig, stack: ExitStack) -> None:
    """Make the folder ready, on one rank: go on in it when the run will resume, else start with an empty one.

    What an earlier run left is moved aside as a whole, to `<name>.1`, `<name>.2` and so on: nothing is ever lost. The
    folder is locked until `stack` is closed or the process ends.

    Raises ConfigError when the folder cannot be written, belongs to something else than a run, is in use by another
    run, or holds checkpoints of another model.
    """
    try:
        _prepare(folder, config, stack)
    except OSError as error:
        reason = f"the run's folder {folder} cannot be written: {error.strerror}"
        raise config_error(("job", "dump_folder"), reason, config.job.dump_folder) from error


def record_config(folder: Path, config: JobConfig) -> None:
    """Write the resolved configuration, which can itself be passed as `--config`; once nothing else can go wrong.

    Where the run goes on with another configuration than it had, the differences are logged.
    """
    path, text = folder / CONFIG_FILE, dump_job(config)
    if path.exists():
        before, now = (dict(_leaves(json.loads(source), ())) for source in (path.read_text(), text))
        for key in sorted(before.keys() | now.keys()):
            if before.get(key) != now.get(key):
                was, is_now = (toml_value(v[key]) if key in v else "unset" for v in (before, now))
                _log.info("changed since the run began: %s was %s, is %s", format_key(key), was, is_now)
    path.write_text(text)


def recorded_modes(folder: Path, config: JobConfig) -> Choice | None:
    """The modes with which the run in this folder trained so far; None where nothing will be resumed."""
    path = folder / CONFIG_FILE
    if not (_will_resume(folder, config) and path.exists()):
        return None
    saved = json.loads(path.read_text())
    accumulation = GradientAccumulationConfig.model_validate(saved["gradient_accumulation"])
    recomputation = ActivationCheckpointConfig.model_validate(saved["activation_checkpoint"])
    return Choice(accumulation, recomputation)


def record_units(folder: Path, units: list[dict[str, Any]]) -> None:
    """Write the unit table, as `titan_launch.plan.report.describe_units` makes it."""
    (folder / "units.json").write_text(json.dumps(units, indent=2) + "\n")


def record_audit(folder: Path, audit: dict[str, Any]) -> None:
    """Write the dtypes that were planned and observed, as `titan_launch.precision.audit` describes them."""
    (folder / AUDIT_FILE).write_text(json.dumps(audit, indent=2) + "\n")


def _leaves(table: dict[str, Any], key: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*key, name))
        else:
            yield (*key, name), value


def checkpoint_folder(folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return folder / "checkpoints"


def _prepare(folder: Path, config: JobConfig, stack: ExitStack) -> None:
    if folder.exists() and any(folder.iterdir()):
        _check_is_a_run(folder, config)
        if _will_resume(folder, config):
            _check_same_model(folder, config)
        else:
            with ExitStack() as until_moved:
                _lock(folder, config, until_moved)
                _move_aside(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder, config, stack)


def _check_is_a_run(folder: Path, config: JobConfig) -> None:
    if not any((folder / name).exists() for name in (CONFIG_FILE, "lock")):
        reason = f"{folder} exists and is not a run's (it has no {CONFIG_FILE}); choose another name"
        raise config_error(("job", "name"), reason, config.job.name)


def _will_resume(folder: Path, config: JobConfig) -> bool:
    checkpoint = config.checkpoint
    return checkpoint.enable and checkpoint.load == "latest" and bool(complete_steps(checkpoint_folder(folder)))


def _check_same_model(folder: Path, config: JobConfig) -> None:
    """A checkpoint of another model would load in part, or fail half-way."""
    if not (folder / CONFIG_FILE).exists():
        return
    saved = json.loads((folder / CONFIG_FILE).read_text())["model"]
    for key in ("name", "flavor", "args"):
        was, now = saved.get(key), getattr(config.model, key)
        if was == now:
            continue
        different: KeyPath = ("model", key)
        if isinstance(was, dict):
            name = next(name for name in (*was, *now) if was.get(name) != now.get(name))
            different, was, now = (*different, name), was.get(name), now.get(name)
        raise _other_model(folder, different, was, now)


def _other_model(folder: Path, key: KeyPath, was: Any, now: Any) -> Exception:
    before = "unset" if was is None else f"= {toml_value(was)}"
    reason = (
        f"the checkpoints in {folder} are of a model with {format_key(key)} {before}; choose another job.name, or "
        'start anew with checkpoint.load = "none", which moves them aside'
    )
    return config_error(key, reason, now) if now is not None else config_error(key, reason)


def _lock(folder: Path, config: JobConfig, stack: ExitStack) -> None:
    """Hold the folder for this process; the operating system lets go of it when the process ends, however it ends."""
    descriptor = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o644)
    stack.callback(os.close, descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not inherited by data workers
    except (BlockingIOError, PermissionError):
        reason = f"another run is writing to {folder}; wait for it, or choose another name"
        raise config_error(("job", "name"), reason, config.job.name) from None


def _move_aside(folder: Path) -> None:
    names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    folder.rename(aside)
    _log.info("moved the earlier run in %s to %s", folder, aside)
