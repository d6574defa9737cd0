"""The folder that holds everything a run writes: whose it is, and what becomes of what an earlier run left there.

Nothing here needs torch: the command line calls `check_earlier_run` before torch is imported.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path
from types import TracebackType

from titan_launch.checkpoint.manifest import checkpoint_name, checkpoint_steps, complete_steps
from titan_launch.checkpoint.retention import BEST, LATEST, point
from titan_launch.config.job import JobConfig
from titan_launch.config.resume_compatibility import Difference, differences
from titan_launch.config.sections.parallelism import ActivationCheckpointConfig
from titan_launch.config.sections.training import GradientAccumulationConfig
from titan_launch.core.errors import ConfigError, RunError, config_error
from titan_launch.core.files import free_name, sync_folder
from titan_launch.plan.job import Choice
from titan_launch.train.run_folder.attempt import Attempt, attempt_name, next_attempt
from titan_launch.train.run_folder.records import (
    AUDIT_FILE,
    CONFIG_FILE,
    LAUNCH_FILE,
    METRICS_FILE,
    ROLLED_BACK_FILE,
    UNITS_FILE,
    damage_explained,
    describe_difference,
    recorded_launch,
    recorded_table,
    table_of,
)

_log = logging.getLogger(__name__)

LOCK_FILE = "lock"
"""Locked as long as a run writes to the folder. Its modification time is the time at which the run started."""

_FOLDERS = ("checkpoints", "logs", "tb", "faults", "hangs", "flight_recorder", "flight_recorder_gloo")
_FILES = (CONFIG_FILE, LAUNCH_FILE, LOCK_FILE, METRICS_FILE, ROLLED_BACK_FILE, UNITS_FILE, AUDIT_FILE)
"""All names that a run makes in its folder."""

Load = int | str
"""Where a run starts: `"latest"`, `"none"`, a step of its own folder, or the path of another run's checkpoint."""


def prepare_run_folder(folder: Path, config: JobConfig, attempt: Attempt, stack: ExitStack) -> None:
    """Make the folder ready, on one rank: keep it when the run will resume, else start with an empty one.

    An earlier run that is not resumed is moved aside as a whole, to `<name>.<time at which it started>`: nothing is
    ever lost. A restart of the same launch keeps its folder. The folder is locked until `stack` is closed or the
    process ends.

    Raises ConfigError when the folder cannot be written, belongs to something else than a run, is in use by another
    launch, has checkpoints of its own although `checkpoint.load` is a path, or for what `check_earlier_run` finds.
    """
    try:
        _prepare(folder, config, attempt, stack)
    except OSError as error:
        reason = f"the run's folder {folder} cannot be written: {error.strerror}"
        raise config_error(("job", "dump_folder"), reason, config.job.dump_folder) from error


def check_earlier_run(folder: Path, config: JobConfig, load: Load) -> None:
    """Raise ConfigError where a run must not start beside the earlier run in its folder: the folder has checkpoints of
    another experiment that could be resumed, or the checkpoint to load is in a folder that is not resumed.

    Raises it also where something in the folder is not of the kind that a run makes, a FIFO for example.

    `config` has its global batch size. Reads files only.
    """
    _check_kinds(folder, config)
    if not _has_begun(folder):
        return
    checkpoints = checkpoint_folder(folder)
    if config.checkpoint.enable and load != "none" and checkpoint_steps(checkpoints):
        before = recorded_table(folder, config)
        changed = [] if before is None else [d for d in differences(before, table_of(config)) if d.role != "operation"]
        is_complete = bool(complete_steps(checkpoints))
        if changed and not (is_complete and config.checkpoint.accept_changes and not _is_other_model(changed)):
            raise _other_experiment_error(folder, config, load, changed, is_complete)
    if not _resumes(folder, config, load):
        _check_loads_from_elsewhere(folder, config, load)


def effective_load(folder: Path, config: JobConfig, attempt: Attempt) -> Load:
    """Where this attempt starts: as `checkpoint.load` says, but for a restart of the launch that has done so already,
    which goes on from its own latest checkpoint.

    Asked on one rank, any number of times before `record_run`. (A launch that was told to start from another run's
    checkpoint and has none of its own yet starts there again.)
    """
    load = config.checkpoint.load
    if not _is_restart(folder, config, attempt):
        return load
    return load if _is_path(load) and not complete_steps(checkpoint_folder(folder)) else "latest"


def recorded_modes(folder: Path, config: JobConfig, attempt: Attempt) -> Choice | None:
    """Return the modes with which the run in this folder trained so far; None where nothing will be resumed."""
    resumes = _resumes(folder, config, effective_load(folder, config, attempt))
    saved = recorded_table(folder, config) if resumes else None
    if saved is None:
        return None
    with damage_explained(folder / CONFIG_FILE, f"move {folder} away", config):
        accumulation = GradientAccumulationConfig.model_validate(saved.get("gradient_accumulation"))
        recomputation = ActivationCheckpointConfig.model_validate(saved.get("activation_checkpoint"))
    return Choice(accumulation, recomputation)


def supersede_later_checkpoints(folder: Path, step: int) -> None:
    """Move the checkpoints of later steps to `checkpoints/superseded-K/` with a copy of all reports, on one rank, once
    the run has gone back to `step`. Killed at any point, nothing is lost, and doing it again does the rest."""
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
        (checkpoints / BEST).unlink()  # the next save points it to the best of those that are left
    for other in later:  # the newest first: those that are left are always the run's first ones
        (checkpoints / checkpoint_name(other)).rename(aside / checkpoint_name(other))
    sync_folder(aside)
    sync_folder(checkpoints)
    _log.info("moved the checkpoints of steps after %d to %s", step, aside)


def new_attempt_folder(folder: Path) -> Path:
    """Make the folder for the logs of this start of the ranks: `logs/attempt-K` with the next free K, on one rank."""
    logs = folder / "logs"
    attempt = logs / attempt_name(next_attempt(logs))
    attempt.mkdir(parents=True)
    return attempt


class OpenRunFolder:
    """The run's folder, which somebody may delete or move while the run writes to it.

    with OpenRunFolder(folder, advice) as held:
        held.check()

    The end of the block raises RunError instead of an OSError when the folder is gone.
    """

    def __init__(self, folder: Path, advice: str):
        """`advice`: what to do when the folder is gone."""
        self._folder = folder
        self._advice = advice

    def __enter__(self) -> OpenRunFolder:
        self._descriptor = os.open(self._folder, os.O_RDONLY)  # no other folder gets its number while it is open
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            if isinstance(error, OSError):
                self.check()
        finally:
            os.close(self._descriptor)

    def check(self) -> None:
        """Raise RunError if the path names the folder no more: checkpoints would be lost, or written into another."""
        try:
            if os.path.samestat(os.fstat(self._descriptor), os.stat(self._folder)):
                return
        except FileNotFoundError:
            pass
        except OSError:  # a file system that does not answer for a moment
            return
        raise RunError(f"{self._folder} was deleted or moved while the run wrote to it; {self._advice}")


def checkpoint_folder(folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return folder / "checkpoints"


def _prepare(folder: Path, config: JobConfig, attempt: Attempt, stack: ExitStack) -> None:
    if folder.exists() and any(folder.iterdir()):
        _check_is_a_run(folder, config)
    folder.mkdir(parents=True, exist_ok=True)
    _check_kinds(folder, config)
    with ExitStack() as lock:
        _lock(folder, config, lock)
        _check_no_launch_is_between_attempts(folder, config, attempt)
        load = effective_load(folder, config, attempt)
        _check_step_is_there(folder, load)
        check_earlier_run(folder, config, load)
        _check_path_goes_with_folder(folder, config, load)
        if not _has_begun(folder):
            os.utime(folder / LOCK_FILE)  # the time at which this run starts: `_move_aside` reads it
        elif not (_resumes(folder, config, load) or _restarts_without_checkpoint(folder, config, attempt)):
            _move_aside(folder)
            folder.mkdir()
            _lock(folder, config, stack)
            return
        stack.push(lock.pop_all())


def _check_is_a_run(folder: Path, config: JobConfig) -> None:
    """Raise ConfigError for a folder that holds something else. What is left of a run's folder that was deleted while
    the run wrote to it has a run's names only."""
    has_others = any(entry.name.removesuffix(".tmp") not in (*_FOLDERS, *_FILES) for entry in folder.iterdir())
    if has_others and not any((folder / name).exists() for name in (CONFIG_FILE, LOCK_FILE)):
        reason = f"{folder} exists and is not a run's (it has no {CONFIG_FILE}); choose another name"
        raise config_error(("job", "name"), reason, config.job.name)


def _check_kinds(folder: Path, config: JobConfig) -> None:
    """Raise ConfigError where something has the name of a run's file or folder and is none. A link in the place of a
    file counts: the run would write to what it points to."""
    for path in (folder / name for name in (*_FOLDERS, *_FILES)):
        is_folder = path.name in _FOLDERS
        is_right = path.is_dir() if is_folder else path.is_file() and not path.is_symlink()
        if os.path.lexists(path) and not is_right:
            reason = (
                f"{path} is not a {'folder' if is_folder else 'regular file'}; move it away, or choose another name"
            )
            raise config_error(("job", "name"), reason, config.job.name)


def _has_begun(folder: Path) -> bool:
    """Whether there is anything to lose: a run that ended before its first step has left no more than messages."""
    return (folder / CONFIG_FILE).exists() or bool(checkpoint_steps(checkpoint_folder(folder)))


def _is_restart(folder: Path, config: JobConfig, attempt: Attempt) -> bool:
    """Return True if the launch that wrote to the folder last has started its ranks again."""
    launch = recorded_launch(folder, config)
    return launch is not None and attempt.continues(launch)


def _restarts_without_checkpoint(folder: Path, config: JobConfig, attempt: Attempt) -> bool:
    """Return True for a restart before the first checkpoint. With a checkpoint that is not resumed, the run before the
    restart had ended, and its result is kept apart from the next one."""
    return _is_restart(folder, config, attempt) and not checkpoint_steps(checkpoint_folder(folder))


def _resumes(folder: Path, config: JobConfig, load: Load) -> bool:
    """Return True if a run goes on with what is in its folder."""
    possible = config.checkpoint.enable and load != "none" and not _is_path(load)
    return possible and bool(checkpoint_steps(checkpoint_folder(folder)))  # damaged ones are not begun anew over


def _is_path(load: Load) -> bool:
    return isinstance(load, str) and load not in ("latest", "none")


def _check_step_is_there(folder: Path, load: Load) -> None:
    steps = complete_steps(checkpoint_folder(folder))
    if isinstance(load, int) and load not in steps:
        there = f"complete are those of steps {', '.join(map(str, sorted(steps)))}" if steps else "it has no checkpoint"
        raise config_error(("checkpoint", "load"), f"no such step in {checkpoint_folder(folder)}; {there}", load)


def _check_loads_from_elsewhere(folder: Path, config: JobConfig, load: Load) -> None:
    """Raise ConfigError where a run that begins anew would load a checkpoint from the folder that it moves aside."""
    paths = {"load": str(load) if _is_path(load) else None, "initial_load_path": config.checkpoint.initial_load_path}
    for key, path in paths.items():
        if path is not None and Path(path).resolve().is_relative_to(folder.resolve()):
            reason = (
                f"is in {folder}, where this run would begin anew; resume that run with --checkpoint.enable=true "
                "--checkpoint.load=latest, or choose another folder with --job.name"
            )
            raise config_error(("checkpoint", key), reason, path)


def _check_path_goes_with_folder(folder: Path, config: JobConfig, load: Load) -> None:
    """Raise ConfigError where a run would load another run's checkpoint beside checkpoints of its own."""
    steps = complete_steps(checkpoint_folder(folder)) if config.checkpoint.enable else []
    if _is_path(load) and steps:
        reason = (
            f"{folder} holds a run with checkpoints of its own, up to step {max(steps)}; go on with that run with "
            '--checkpoint.load="latest", or choose another folder with --job.name'
        )
        raise config_error(("checkpoint", "load"), reason, load)


def _other_experiment_error(
    folder: Path, config: JobConfig, load: Load, changed: Sequence[Difference], has_checkpoints: bool
) -> ConfigError:
    """What is different, and the ways out that there are."""
    ways = []
    if has_checkpoints and not _is_path(load) and not _is_other_model(changed):
        ways.append("--checkpoint.accept_changes=true resumes it all the same")
    if not _is_path(load):
        ways.append("--checkpoint.load=none starts anew, and moves it aside")
    ways.append("--job.name=... takes another folder")
    kind = "model, which cannot be resumed" if _is_other_model(changed) else "experiment"
    lines = [
        f"{folder} holds a run of another {kind}; {folder / CONFIG_FILE} records",
        *(f"    {describe_difference(difference)}" for difference in changed),
        *(f"  {way}" for way in ways),
    ]
    return config_error(("job", "name"), "\n".join(lines), config.job.name)


def _is_other_model(changed: Sequence[Difference]) -> bool:
    """A checkpoint of another model would load in part, or fail half-way."""
    return any(difference.role == "model" for difference in changed)


def _check_no_launch_is_between_attempts(folder: Path, config: JobConfig, attempt: Attempt) -> None:
    """Raise ConfigError where another launch, whose ranks have failed, will start them again. It holds no lock then."""
    launch = recorded_launch(folder, config)
    agent = None if launch is None or attempt.continues(launch) else launch.agent_alive_here()
    if agent is not None:
        reason = f"another launch (process {agent.pid}) is about to start its ranks in {folder} again; " + _WAIT
        raise config_error(("job", "name"), reason, config.job.name)


_WAIT = "wait for it, or choose another name"


def _lock(folder: Path, config: JobConfig, stack: ExitStack) -> None:
    """Hold the folder for this process; the operating system lets go of it when the process ends, however it ends."""
    descriptor = os.open(folder / LOCK_FILE, os.O_CREAT | os.O_RDWR, 0o644)
    stack.callback(os.close, descriptor)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # unlike flock's, not inherited by data workers
    except (BlockingIOError, PermissionError):
        raise _in_use_error(folder, config) from None
    if not os.path.samestat(os.fstat(descriptor), os.stat(folder / LOCK_FILE)):
        raise _in_use_error(folder, config)  # it has been moved aside meanwhile, for a run that has begun in its place


def _in_use_error(folder: Path, config: JobConfig) -> ConfigError:
    return config_error(("job", "name"), f"another run is writing to {folder}; {_WAIT}", config.job.name)


def _move_aside(folder: Path) -> None:
    """Rename the folder of an earlier run, whose lock file is as old as the run."""
    started = datetime.fromtimestamp((folder / LOCK_FILE).stat().st_mtime)
    aside = folder.with_name(f"{folder.name}.{started:%Y-%m-%d_%H-%M-%S}")
    if aside.exists():
        aside = free_name(aside.with_name(f"{aside.name}_{{}}"))
    folder.rename(aside)
    _log.info("moved the earlier run in %s to %s", folder, aside)
