"""The folder that holds everything a run writes."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from titan_launch.checkpoint.manager import complete_steps
from titan_launch.config.job import JobConfig
from titan_launch.config.load import dump_job
from titan_launch.errors import config_error

_log = logging.getLogger(__name__)


def prepare_run_folder(folder: Path, config: JobConfig) -> None:
    """Make the folder ready, on one rank: go on in it when the run will resume, else start with an empty one.

    What an earlier run left is moved aside as a whole, to `<name>.1`, `<name>.2` and so on: nothing is ever lost. The
    resolved configuration is written as `config.json`, which can itself be passed as `--config`. Raises ConfigError
    when the folder cannot be written.
    """
    try:
        _prepare(folder, config)
    except OSError as error:
        reason = f"the run's folder {folder} cannot be written: {error.strerror}"
        raise config_error(("job", "dump_folder"), reason, config.job.dump_folder) from error


def _prepare(folder: Path, config: JobConfig) -> None:
    if folder.exists() and any(folder.iterdir()) and not will_resume(folder, config):
        names = (folder.with_name(f"{folder.name}.{number}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        folder.rename(aside)
        _log.info("moved the earlier run in %s to %s", folder, aside)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(dump_job(config))


def checkpoint_folder(folder: Path) -> Path:
    """Where a run's checkpoints are."""
    return folder / "checkpoints"


def will_resume(folder: Path, config: JobConfig) -> bool:
    """Whether the run will find a checkpoint to resume from."""
    checkpoint = config.checkpoint
    return checkpoint.enable and checkpoint.load == "latest" and bool(complete_steps(checkpoint_folder(folder)))
