"""Finding a checkpoint that can be loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from titan_launch.checkpoint.manifest import DamagedCheckpointError, check, checkpoint_name, checkpoint_steps
from titan_launch.checkpoint.retention import set_aside
from titan_launch.collective import on_all, on_main, warn
from titan_launch.errors import KeyPath, UserError, config_error

_log = logging.getLogger(__name__)


def newest_valid(folder: Path, *, set_damaged_aside: bool) -> Path | None:
    """The newest checkpoint of a folder whose files all have their checksums; None where the folder has none at all.
    Collective: every rank reads a share of the files.

    Those that are damaged are reported, and with `set_damaged_aside` renamed once an older one is found to be whole.
    Raises UserError when all are damaged.
    """
    damaged: list[Path] = []
    for step in on_main(lambda: checkpoint_steps(folder)):
        candidate = folder / checkpoint_name(step)
        reason = damage(candidate)
        if reason is None:
            if set_damaged_aside:
                on_main(lambda: [set_aside(path) for path in damaged])
            return candidate
        damaged.append(candidate)
        warn(_log, "%s is damaged and not loaded: %s", candidate, reason)
    if damaged:
        raise UserError(
            f"all checkpoints in {folder} are damaged ({', '.join(path.name for path in damaged)}); "
            'start anew with checkpoint.load = "none", which moves the run aside as it is'
        )
    return None


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, or None; collective: every rank reads a share of the files."""
    from titan_launch.checkpoint.index import check_step  # not earlier: it loads DCP

    def look() -> str | None:
        try:
            manifest = check(checkpoint, share=slice(dist.get_rank(), None, dist.get_world_size()))
            if dist.get_rank() == 0:
                check_step(checkpoint, manifest.step)
        except DamagedCheckpointError as error:
            return str(error)
        except (OSError, ValueError) as error:  # names that no file can have, files that vanish
            return f"it cannot be read: {error}"
        return None

    return next((reason for reason in on_all(look) if reason is not None), None)


def find_checkpoint(path: Path, key: KeyPath) -> Path:
    """The checkpoint that a path of the job names: itself, or the newest valid one of a run's folder; collective.

    Raises ConfigError for `key`, on all ranks, when there is none, or it is damaged.
    """
    for folder in (path / "checkpoints", path):
        if on_main(lambda folder=folder: bool(checkpoint_steps(folder))):  # type: ignore[misc]
            found = newest_valid(folder, set_damaged_aside=False)
            assert found is not None
            return found
    if not on_main(path.is_dir):
        reason = "there is no such folder; name a checkpoint (.../step-100) or a run's folder"
        raise config_error(key, reason, str(path))
    damaged = damage(path)
    if damaged is not None:
        raise config_error(key, f"it holds no checkpoint that can be loaded: {damaged}", str(path))
    return path
