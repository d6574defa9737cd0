"""The run folder, which holds all files of a run: creation, lock, and handling of an earlier run in the same folder.
This module does not import torch: the command line calls `check_earlier_run` before it imports torch."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from titan_launch.checkpoint.manifest import checkpoint_name, checkpoint_steps, complete_steps
from titan_launch.checkpoint.retention import BEST, LATEST, point
from titan_launch.config.job import JobConfig
from titan_launch.config.resume_compatibility import KeyDifference, differences
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import ConfigError, KeyPath, RunError, config_error
from titan_launch.core.files import free_name, replace_text, sync
from titan_launch.core.phantom import FILE as WITHOUT_VALUES_FILE
from titan_launch.core.phantom import TEXT, is_marked, is_phantom
from titan_launch.metrics.sinks.jsonl import METRICS_FILE
from titan_launch.plan.job import Choice
from titan_launch.train.run_folder.attempt import Attempt, attempt_name, attempt_numbers
from titan_launch.train.run_folder.records import (
    AUDIT_FILE,
    CONFIG_FILE,
    LAUNCH_FILE,
    PROOF_FILE,
    ROLLED_BACK_FILE,
    UNITS_FILE,
    damage_explained,
    describe_difference,
    folder_error,
    recorded_launch,
    recorded_table,
    table_of,
)

_log = logging.getLogger(__name__)

LOCK_FILE = "lock"
"""File that is locked while a run writes to the folder. Its modification time is the start time of the run."""

_FOLDERS = (
    *("checkpoints", "logs", "tb", "wandb"),
    *("profiling", "skipped_steps", "hangs", "flight_recorder", "flight_recorder_gloo"),
)
"""Names of all folders in a run folder."""

_FILES = (
    *(CONFIG_FILE, LAUNCH_FILE, METRICS_FILE, ROLLED_BACK_FILE, UNITS_FILE, AUDIT_FILE, PROOF_FILE),
    *(LOCK_FILE, WITHOUT_VALUES_FILE),
)
"""Names of all files in a run folder."""

Load = int | str
"""The checkpoint to load: `"latest"`, `"none"`, the step of a checkpoint in the run folder, or the path of another
run's checkpoint."""


def prepare_run_folder(config: JobConfig, attempt: Attempt, stack: ExitStack) -> None:
    """Prepare and lock the run folder, on one rank. A resumed run keeps the folder; a new run gets an empty folder.

    The folder of an earlier run that is not resumed is renamed to `<name>.<start time of that run>`, so nothing is
    lost. A restart of the same launch keeps its folder. The folder is locked until `stack` is closed or the process
    ends.

    Raises ConfigError if the folder cannot be written, is not a run folder, or is in use by another launch. Also raises
    ConfigError if `checkpoint.load` is a step without a complete checkpoint, or is a path and the folder has
    checkpoints. Raises the errors of `check_earlier_run`.
    """
    folder = config.job.run_folder
    try:
        _prepare(config, attempt, stack)
        if is_phantom():
            replace_text(folder / WITHOUT_VALUES_FILE, TEXT)
    except OSError as error:
        reason = f"the run folder {folder} cannot be written: {error.strerror}"
        raise config_error(("job", "dump_folder"), reason, config.job.dump_folder) from error


def check_earlier_run(config: JobConfig, load: Load) -> None:
    """Raise ConfigError if the earlier run in the run folder prevents this run from starting.

    There are five cases:
    - This run would resume another experiment (configuration), which `checkpoint.accept_changes` does not allow.
    - The earlier run's config.json is damaged.
    - One of the two runs has a phantom GPU (a simulated GPU that runs no kernels), and the other has none.
    - The checkpoint, weights or adapter to load are in the folder, which will be moved away.
    - An entry of the folder has the wrong kind, for example a FIFO.

    `config`: job whose `training.global_batch_size` is set. `load`: the checkpoint to load. This function only reads.
    """
    folder = config.job.run_folder
    _check_kinds(config)
    if not _has_begun(folder):
        return
    if is_marked(folder) != is_phantom():
        phantom, real = "on a phantom GPU", "on real devices"
        kinds = (real, phantom) if is_phantom() else (phantom, real)
        reason = f"{folder} holds a run {kinds[0]}, and this run is {kinds[1]}; choose another name"
        raise folder_error(config, reason)
    checkpoints = checkpoint_folder(folder)
    if config.checkpoint.enable and load != "none" and checkpoint_steps(checkpoints):
        before = recorded_table(config)
        changed = [] if before is None else [d for d in differences(before, table_of(config)) if d.role != "operation"]
        is_complete = bool(complete_steps(checkpoints))
        if changed and not (is_complete and config.checkpoint.accept_changes and not _is_other_model(changed)):
            raise _other_experiment_error(config, load, changed, is_complete)
    if not resumes(config, load):
        _check_loads_from_elsewhere(config, load)


def effective_load(config: JobConfig, attempt: Attempt) -> Load:
    """Return the checkpoint that this attempt loads: `"latest"` for a restart of the same launch, otherwise
    `checkpoint.load`.

    Exception: a restart loads a path in `checkpoint.load` again until this run has a checkpoint of its own. Call this
    function on one rank, before `record_run`.
    """
    load = config.checkpoint.load
    if not _is_restart(config, attempt):
        return load
    return load if _is_path(load) and not complete_steps(checkpoint_folder(config.job.run_folder)) else "latest"


def recorded_modes(config: JobConfig, attempt: Attempt) -> Choice | None:
    """Return the modes of gradient accumulation and activation checkpointing of the run to resume. Return None if no
    run is resumed, or if that run has no config.json. Raises ConfigError if that file is damaged."""
    saved = recorded_table(config) if resumes(config, effective_load(config, attempt)) else None
    if saved is None:
        return None
    with damage_explained(CONFIG_FILE, config):
        accumulation = GradientAccumulationConfig.model_validate(saved.get("gradient_accumulation"))
        activation_checkpoint = ActivationCheckpointConfig.model_validate(saved.get("activation_checkpoint"))
    return Choice(accumulation, activation_checkpoint)


def supersede_later_checkpoints(folder: Path, step: int) -> None:
    """Move the checkpoints of later steps to `checkpoints/superseded-K/`, and copy metrics.jsonl there, on one rank.

    Call this function after the run has loaded the checkpoint of `step`. After an interruption, a second call completes
    the move, and nothing is lost.
    """
    checkpoints = checkpoint_folder(folder)
    later = [other for other in checkpoint_steps(checkpoints) if other > step]
    if not later:
        return
    aside = free_name(checkpoints / "superseded-{}")
    aside.mkdir()
    if (folder / METRICS_FILE).exists():
        shutil.copy2(folder / METRICS_FILE, aside / METRICS_FILE)
    point(checkpoints, LATEST, step)
    if (checkpoints / BEST).is_symlink() and os.readlink(checkpoints / BEST) in map(checkpoint_name, later):
        (checkpoints / BEST).unlink()  # the next save links the best remaining checkpoint
    for other in later:  # newest first, so that an interruption leaves no gap between the remaining steps
        (checkpoints / checkpoint_name(other)).rename(aside / checkpoint_name(other))
    sync(aside)
    sync(checkpoints)
    _log.info("moved the checkpoints of steps after %d to %s", step, aside)


def new_attempt_folder(folder: Path) -> Path:
    """Create the log folder of this attempt, `logs/attempt-K` with the next free K from 1. Call this function on one
    rank."""
    logs = folder / "logs"
    attempt = logs / attempt_name(max(attempt_numbers(logs), default=0) + 1)
    attempt.mkdir(parents=True)
    return attempt


class OpenRunFolder:
    """The run folder during a run, with a check that the folder was neither deleted nor moved. If a `with` block of
    this object ends with an OSError and the folder is gone, RunError is raised instead."""

    def __init__(self, folder: Path, advice: str):
        """`advice`: what to do when the folder is gone."""
        self.path = folder
        self._advice = advice

    def __enter__(self) -> OpenRunFolder:
        # While the folder is open, no other folder can get its inode number.
        self._descriptor = os.open(self.path, os.O_RDONLY)
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if isinstance(error, OSError):
                self.check()
        finally:
            os.close(self._descriptor)

    def check(self) -> None:
        """Raise RunError if the run folder was deleted, moved or replaced, because later checkpoints would be lost, or
        written to another folder."""
        try:
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                return
        except FileNotFoundError:
            pass
        except OSError:  # a temporary failure of the file system
            return
        raise RunError(f"{self.path} was deleted or moved while the run wrote to it; {self._advice}")


def run_id(folder: Path) -> str:
    """Return eight hexadecimal digits that differ for every run, and stay the same when a run resumes. `folder`: run
    folder, which is locked."""
    started = (folder / LOCK_FILE).stat().st_mtime_ns
    return hashlib.sha256(f"{folder.resolve()} {started}".encode()).hexdigest()[:8]


def checkpoint_folder(folder: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return folder / "checkpoints"


def _prepare(config: JobConfig, attempt: Attempt, stack: ExitStack) -> None:
    folder = config.job.run_folder
    if folder.exists() and any(folder.iterdir()):
        _check_is_a_run(config)
    folder.mkdir(parents=True, exist_ok=True)
    _check_kinds(config)
    with ExitStack() as lock:
        limit_s = min(_LEASE_S, config.comm.init_timeout_seconds / 2)  # other ranks wait for rank 0
        _lock(config, lock, limit_s if _is_restart(config, attempt) else 0)
        _check_no_launch_is_between_attempts(config, attempt)
        load = effective_load(config, attempt)
        _check_step_is_there(folder, load)
        check_earlier_run(config, load)
        _check_path_goes_with_folder(config, load)
        # A restart of the same launch keeps the folder, also if there is no checkpoint yet.
        begins_again = _is_restart(config, attempt) and not checkpoint_steps(checkpoint_folder(folder))
        if not _has_begun(folder):
            os.utime(folder / LOCK_FILE)  # start time of this run, which `_move_aside` reads
        elif not (resumes(config, load) or begins_again):
            _move_aside(folder)
            folder.mkdir()
            _lock(config, stack)
            return
        stack.push(lock.pop_all())


def _check_is_a_run(config: JobConfig) -> None:
    """Raise ConfigError if the run folder exists, but is not a run folder.

    If a user deletes a run folder during the run, the run creates a few files again. Such a folder may lack
    config.json and the lock file. It counts as a run folder, because all its files have names of a run's files.
    """
    folder = config.job.run_folder
    has_others = any(entry.name.removesuffix(".tmp") not in (*_FOLDERS, *_FILES) for entry in folder.iterdir())
    if has_others and not any((folder / name).exists() for name in (CONFIG_FILE, LOCK_FILE)):
        reason = f"{folder} exists and is not a run folder (it has no {CONFIG_FILE}); choose another name"
        raise folder_error(config, reason)


def _check_kinds(config: JobConfig) -> None:
    """Raise ConfigError if an entry of `_FILES` is not a regular file, or an entry of `_FOLDERS` is not a folder."""
    for path in (config.job.run_folder / name for name in (*_FOLDERS, *_FILES)):
        kind = "folder" if path.name in _FOLDERS else "regular file"
        # The run would write to the target of a link that is in place of a file.
        has_right_kind = path.is_dir() if kind == "folder" else path.is_file() and not path.is_symlink()
        if os.path.lexists(path) and not has_right_kind:
            raise folder_error(config, f"{path} is not a {kind}; move it away, or choose another name")


def _has_begun(folder: Path) -> bool:
    """Return True if the folder has a `config.json` or checkpoints. A run has neither until it calls `record_run`."""
    return (folder / CONFIG_FILE).exists() or bool(checkpoint_steps(checkpoint_folder(folder)))


def _is_restart(config: JobConfig, attempt: Attempt) -> bool:
    """Return True if this attempt is a restart of the last launch that wrote to the run folder."""
    launch = recorded_launch(config)
    return launch is not None and attempt.continues(launch)


def resumes(config: JobConfig, load: Load) -> bool:
    """Return True if the run resumes from a checkpoint in its own folder."""
    possible = config.checkpoint.enable and load != "none" and not _is_path(load)
    # Damaged checkpoints count, too.
    return possible and bool(checkpoint_steps(checkpoint_folder(config.job.run_folder)))


def _is_path(load: Load) -> bool:
    return isinstance(load, str) and load not in ("latest", "none")


def _check_step_is_there(folder: Path, load: Load) -> None:
    steps = complete_steps(checkpoint_folder(folder))
    if isinstance(load, int) and load not in steps:
        available = f"complete steps: {', '.join(map(str, sorted(steps)))}" if steps else "no checkpoint is complete"
        raise config_error(("checkpoint", "load"), f"no such step in {checkpoint_folder(folder)}; {available}", load)


def _check_loads_from_elsewhere(config: JobConfig, load: Load) -> None:
    """Raise ConfigError if a new run would load a checkpoint, weights or an adapter from the earlier run's folder. The
    new run moves this folder away."""
    folder = config.job.run_folder
    paths: dict[KeyPath, str | None] = {
        ("checkpoint", "load"): str(load) if _is_path(load) else None,
        ("checkpoint", "initial_load_path"): config.checkpoint.initial_load_path,
        ("model", "weights"): config.model.weights,
        ("lora", "adapter"): config.lora.adapter,
    }
    for key, path in paths.items():
        if path is not None and Path(path).resolve().is_relative_to(folder.resolve()):
            reason = (
                f"is in the folder of an earlier run, {folder}, which a new run would move away; resume the earlier "
                "run with --checkpoint.enable=true --checkpoint.load=latest, or choose another folder with --job.name"
            )
            raise config_error(key, reason, path)


def _check_path_goes_with_folder(config: JobConfig, load: Load) -> None:
    """Raise ConfigError if `checkpoint.load` is a path, but the run folder already has checkpoints."""
    folder = config.job.run_folder
    steps = complete_steps(checkpoint_folder(folder)) if config.checkpoint.enable else []
    if _is_path(load) and steps:
        reason = (
            f"{folder} holds a run with checkpoints of its own, up to step {max(steps)}; resume that run with "
            '--checkpoint.load="latest", or choose another folder with --job.name'
        )
        raise config_error(("checkpoint", "load"), reason, load)


def _other_experiment_error(
    config: JobConfig, load: Load, changed: Sequence[KeyDifference], has_checkpoints: bool
) -> ConfigError:
    """Return the error for an earlier run with another configuration: the differences, and what the user can do."""
    folder, ways = config.job.run_folder, []
    if has_checkpoints and not _is_path(load) and not _is_other_model(changed):
        ways.append("--checkpoint.accept_changes=true resumes the earlier run nevertheless")
    if not _is_path(load):
        ways.append("--checkpoint.load=none starts a new run and moves the earlier run's folder away")
    ways.append("--job.name=... uses another folder")
    kind = "model, which cannot be resumed" if _is_other_model(changed) else "experiment"
    lines = [
        f"{folder} holds a run of another {kind}; differences from {folder / CONFIG_FILE}:",
        *(f"    {describe_difference(difference)}" for difference in changed),
        *(f"  {way}" for way in ways),
    ]
    return folder_error(config, "\n".join(lines))


def _is_other_model(changed: Sequence[KeyDifference]) -> bool:
    """Return True if a difference changes the model. Then a run cannot load all of the earlier run's checkpoint."""
    return any(difference.role == "model" for difference in changed)


def _check_no_launch_is_between_attempts(config: JobConfig, attempt: Attempt) -> None:
    """Raise ConfigError if another launch is about to restart its ranks in the run folder. Between two attempts a
    launch does not lock the folder."""
    launch = recorded_launch(config)
    agent = None if launch is None or attempt.continues(launch) else launch.agent_alive_here()
    if agent is not None:
        restarts = f"another launch (process {agent.pid}) is about to restart its ranks in {config.job.run_folder}"
        raise folder_error(config, f"{restarts}; {_WAIT}")


_WAIT = "wait until it has ended, or choose another name"


_LEASE_S = 120
"""Longest time in seconds for which a restart waits for the lock. After the death of the host that had the lock, an NFS
server keeps the lock for about 90 s."""


def _lock(config: JobConfig, stack: ExitStack, wait_s: float = 0) -> None:
    """Lock the folder for this process. The operating system releases the lock when the process ends. Raises
    ConfigError if another run has locked the folder for longer than `wait_s` seconds, or has just moved it away."""
    folder = config.job.run_folder
    descriptor = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    stack.callback(os.close, descriptor)
    is_free, deadline = _try_to_lock(descriptor), time.monotonic() + wait_s
    if not is_free and wait_s:
        _log.info("waiting up to %.0f s for the lock of an earlier start: %s", wait_s, folder / LOCK_FILE)
    while not is_free and time.monotonic() < deadline:
        time.sleep(1)
        is_free = _try_to_lock(descriptor)
    # The file differs if another run has just moved the folder away.
    if not is_free or not os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK_FILE)):
        raise folder_error(config, f"another run is writing to {folder}; {_WAIT}")


def _try_to_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # data workers would inherit a lock of `flock`
    except (BlockingIOError, PermissionError):
        return False
    return True


def _move_aside(folder: Path) -> None:
    """Rename the folder of an earlier run: append the start time of that run."""
    started = datetime.fromtimestamp((folder / LOCK_FILE).stat().st_mtime)
    aside = folder.with_name(f"{folder.name}.{started:%Y-%m-%d_%H-%M-%S}")
    if aside.exists():
        aside = free_name(aside.with_name(f"{aside.name}_{{}}"))
    folder.rename(aside)
    _log.info("moved the earlier run in %s to %s", folder, aside)
